"""Collections of documents with questions whose relevant documents are known. Every list is fixed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ragspec.config import ChunkingConfig, IndexConfig
from ragspec.core import Document
from ragspec.evaluation.datasets import json_rows, lines_of, squad_list
from ragspec.retrieval.encoder import EncoderWrapper, TextEncoder

WHOLE = IndexConfig(chunking=ChunkingConfig(max_chars=10_000_000))
"""An index whose passages are whole documents, because the relevant documents are known and not the passages."""
_QUESTION_SEED = 13
_ALL_QUESTIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class Collection:
    """`queries`: by id; `relevant`: by query, the grade of each document that answers (1: it does)."""

    name: str
    documents: Sequence[Document]
    queries: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, int]]

    def first(self, count: int) -> Collection:
        """The collection with the first `count` queries only."""
        return replace(self, queries=dict(islice(self.queries.items(), count)))


class WholeTexts(EncoderWrapper):
    """An encoder without a length limit, so that a document is one passage; its model reads the beginning.

    Why: the published figures, and bm25s, count whole documents.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__(encoder)
        self.max_tokens = 10**9

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [0 for _ in texts]


def squad_collection(data_dir: Path) -> tuple[Collection, frozenset[str]]:
    """All questions of SQuAD dev over its paragraphs and distractors, and the ids of questions from held-out
    articles.

    Raises: InputError if the files are not there.
    """
    held_out = squad_list(data_dir, _ALL_QUESTIONS)
    rows = [row for _, row in json_rows(data_dir / "squad_open" / "questions_dev.jsonl")]
    random.Random(_QUESTION_SEED).shuffle(rows)
    queries = {row["id"]: row["question"].strip() for row in rows}
    relevant = {row["id"]: {row["gold"]: 1} for row in rows}
    collection = Collection("squad", held_out.documents, queries, relevant)
    return collection, frozenset(question.id for question in held_out.questions)


def cranfield_collection(data_dir: Path) -> Collection:
    """Abstracts on aerodynamics and questions of engineers, every relevant document known. Raises: InputError."""
    folder = data_dir / "cranfield" / "beir"
    documents = [Document(row["_id"], row["text"], title=row["title"]) for _, row in json_rows(folder / "corpus.jsonl")]
    queries = {row["_id"]: row["text"] for _, row in json_rows(folder / "queries.jsonl")}
    relevant: dict[str, dict[str, int]] = {}
    for line in lines_of(folder / "qrels.tsv")[1:]:
        query_id, document_id, grade = line.split("\t")
        relevant.setdefault(query_id, {})[document_id] = int(grade)
    return Collection("cranfield", documents, queries, relevant)
