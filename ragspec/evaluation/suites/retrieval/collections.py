"""Collections of the suite `retrieval`: texts with known answers, and synthetic texts and vectors of any number.

Owns the selection; never an index or a measure. Every list is fixed: a shorter list is the beginning of a longer
list.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Document
from ragspec.evaluation.datasets import json_rows, lines_of, squad_list
from ragspec.retrieval.chunking.passage_text import join_passage_text
from ragspec.retrieval.encoder import EncoderWrapper, FloatArray, TextEncoder
from ragspec.training.stdlib_corpus import stdlib_documents

DIMENSION = 384
_QUESTION_SEED = 13
_ALL_QUESTIONS = 1_000_000
_SENTENCES_PER_DOCUMENT = 40
_SENTENCE_WORDS = (8, 25)

_VECTORS_PER_CLUSTER = 1000
_SPREAD = 2.5
"""Length of the noise relative to its centre: a query's ten nearest have a cosine of about 0.5, as questions and passages do."""

_BLOCK_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class Collection:
    """`queries`: by id; `relevant`: by query, the grade of each document that answers (1: it does)."""

    name: str
    documents: Sequence[Document]
    queries: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, int]]

    def first(self, count: int | None) -> Collection:
        """The first `count` queries; None: all of them."""
        return replace(self, queries=dict(islice(self.queries.items(), count)))

    def only(self, query_ids: Set[str]) -> Collection:
        """The collection with these queries only."""
        return replace(self, queries={i: text for i, text in self.queries.items() if i in query_ids})


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
    collection = _questions("squad", held_out.documents, data_dir / "squad_open" / "questions_dev.jsonl")
    return collection, frozenset(question.id for question in held_out.questions)


def nq_collection(data_dir: Path, documents: Sequence[Document]) -> Collection:
    """Questions of Natural Questions over the same documents. Raises: InputError."""
    return _questions("nq", documents, data_dir / "squad_open" / "questions_nq.jsonl")


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


def searched_text(document: Document) -> str:
    """The text by which a whole document is indexed."""
    return join_passage_text(document.title, "", document.text)


def synthetic_documents(count: int, seed: int) -> Iterator[Document]:
    """Documents of about seven passages whose words are as frequent as in the standard library's documentation."""
    words = Counter(word for _, text in stdlib_documents() for word in text.split() if word.isalpha())
    vocabulary, weights = list(words), list(words.values())
    rng = random.Random(seed)
    for number in range(count):
        lengths = [rng.randint(*_SENTENCE_WORDS) for _ in range(_SENTENCES_PER_DOCUMENT)]
        sentences = (" ".join(rng.choices(vocabulary, weights, k=length)).capitalize() + "." for length in lengths)
        yield Document(f"synthetic-{number}", " ".join(sentences), title=f"Text {number}")


class Mixture:
    """Unit vectors around random centres: a mixture of Gaussians on the sphere, a function of the seed."""

    def __init__(self, num_vectors: int, seed: int, dimension: int = DIMENSION) -> None:
        self._rng = np.random.default_rng([seed, num_vectors])
        num_clusters = max(1, num_vectors // _VECTORS_PER_CLUSTER)
        self._centres = self._rng.standard_normal((num_clusters, dimension), np.float32)  # [clusters, E]
        # Why a decay: texts vary along few directions; noise that fills every direction alike has no near neighbours to find
        decaying = 1.0 / np.sqrt(1.0 + np.arange(dimension))  # [E]
        length = _SPREAD * np.sqrt(dimension)
        self._scales = (length * decaying / np.linalg.norm(decaying)).astype(np.float32)  # [E]

    def draw(self, count: int) -> FloatArray:
        """The next vectors. Shapes: [count, E]."""
        centres = self._centres[self._rng.integers(len(self._centres), size=count)]
        vectors = centres + self._scales * self._rng.standard_normal(centres.shape, np.float32)
        unit: FloatArray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


def write_vectors(path: Path, mixture: Mixture, count: int) -> None:
    """A .npy file of float32 vectors, block by block. Raises: OSError."""
    rows: NDArray[np.float32] = np.lib.format.open_memmap(path, "w+", np.float32, (count, DIMENSION))
    for first in range(0, count, _BLOCK_ROWS):
        rows[first : first + _BLOCK_ROWS] = mixture.draw(min(_BLOCK_ROWS, count - first))
    rows.flush()  # type: ignore[attr-defined]


def _questions(name: str, documents: Sequence[Document], path: Path) -> Collection:
    rows = [row for _, row in json_rows(path)]
    random.Random(_QUESTION_SEED).shuffle(rows)
    queries = {row["id"]: row["question"].strip() for row in rows}
    return Collection(name, documents, queries, {row["id"]: {row["gold"]: 1} for row in rows})
