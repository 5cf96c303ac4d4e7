"""The data sets of the suites: fixed lists of questions and sentences, collections of documents with questions whose relevant
documents are known, and cached indexes.

A shorter list is the beginning of a longer list. No target of ours was trained on the texts. Nothing here depends on a model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ragspec.config import ChunkingConfig, IndexConfig
from ragspec.core import Document
from ragspec.errors import InputError, StoreError
from ragspec.retrieval.encoder import EncoderWrapper, TextEncoder
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.retriever import ProgressCallback, build_index
from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.reference.mixture import NUM_EVAL_ARTICLES
from ragspec.training.sentences import normalise, split_sentences
from ragspec.training.stdlib_corpus import is_held_out, stdlib_documents

T = TypeVar("T")

_LIST_SEED = 13
_LONG_WORDS = range(20, 41)
JFLEG, LONG, CLEAN = "jfleg", "long", "clean"
NUM_JFLEG, NUM_SENTENCES = 200, 100
NUM_QUESTIONS = 200


@dataclass(frozen=True, slots=True)
class Question:
    """`gold`: id of the document that holds the answer."""

    id: str
    text: str
    gold: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence to correct; `references` are corrections by people, if there are any."""

    id: str
    part: str
    text: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RagList:
    """Questions and the documents that answer them."""

    documents: list[Document]
    questions: list[Question]


def squad_list(data_dir: Path, count: int = NUM_QUESTIONS) -> RagList:
    """Questions of the 10 held-out SQuAD articles over the paragraphs of all articles and distractors.

    Raises: InputError if the files are not there.
    """
    open_dir = data_dir / "squad_open"
    held_out = {qa["id"] for a in held_out_articles(data_dir) for p in a["paragraphs"] for qa in p["qas"]}
    rows = [row for _, row in json_rows(open_dir / "questions_dev.jsonl") if row["id"] in held_out]
    questions = [Question(row["id"], normalise(row["question"]), row["gold"]) for row in rows]
    names = ("corpus.jsonl", "corpus_distractors.jsonl")
    documents = [document for name in names for document in read_file(open_dir / name, name)]
    return RagList(documents, fixed_sample(questions, count))


def stdlib_list(count: int = NUM_QUESTIONS) -> RagList:
    """Questions about held-out names of the running Python's standard library, over its documentation."""
    corpus = stdlib_documents()
    questions = [Question(name, f"What does {name} do?", name) for name, _ in corpus if is_held_out(name)]
    documents = [Document(name, text, title=name) for name, text in corpus]
    return RagList(documents, fixed_sample(questions, count))


def grammar_list(data_dir: Path, per_part: int = NUM_JFLEG) -> list[Sentence]:
    """200 sentences of JFLEG dev, 100 corrupted sentences of 20-40 words, and 100 clean sentences; at most
    `per_part` of each.

    Raises: InputError if the files are not there.
    """
    clean = clean_sentences(data_dir, NUM_SENTENCES)[:per_part]
    return [
        *jfleg_sentences(data_dir, min(NUM_JFLEG, per_part)),
        *_long_sentences(data_dir, min(NUM_SENTENCES, per_part)),
        *(Sentence(f"{CLEAN}-{i}", CLEAN, text, (text,)) for i, text in enumerate(clean)),
    ]


def held_out_articles(data_dir: Path) -> list[dict[str, Any]]:
    """The articles of SQuAD dev 1.1 that training never sees."""
    path = data_dir / "squad" / "dev-v1.1.json"
    return list(parse_json("".join(lines_of(path)), path)["data"][-NUM_EVAL_ARTICLES:])


def _held_out_sentences(data_dir: Path) -> list[str]:
    paragraphs = [p for article in held_out_articles(data_dir) for p in article["paragraphs"]]
    return [s for p in paragraphs for s in split_sentences(normalise(p["context"]))]


def clean_sentences(data_dir: Path, count: int) -> list[str]:
    """Sentences of 8-30 words of the held-out articles."""
    sentences = _held_out_sentences(data_dir)
    return random.Random(0).sample([s for s in sentences if 8 <= len(s.split()) <= 30 and s[-1] == "."], count)


def jfleg_sentences(data_dir: Path, count: int) -> list[Sentence]:
    """The first sentences of JFLEG dev, each with four corrections. Raises: InputError."""
    names = ("src", "ref0", "ref1", "ref2", "ref3")
    source, *references = (lines_of(data_dir / "jfleg" / f"dev.{name}")[:count] for name in names)
    return [
        Sentence(f"{JFLEG}-{i}", JFLEG, text.strip(), tuple(r.strip() for r in own))
        for i, (text, *own) in enumerate(zip(source, *references, strict=True))
    ]


def correct_sentences(data_dir: Path, count: int) -> list[str]:
    """Sentences of 20 to 40 words of the held-out articles; the same sentences every time."""
    sentences = dict.fromkeys(_held_out_sentences(data_dir))
    return fixed_sample([s for s in sentences if len(s.split()) in _LONG_WORDS and s.endswith(".")], count)


def _long_sentences(data_dir: Path, count: int) -> list[Sentence]:
    """Correct sentences with inserted errors."""
    errors, rng = GrammarErrors(data_dir), random.Random(_LIST_SEED)
    return [
        Sentence(f"{LONG}-{i}", LONG, errors.corrupt(text, rng), (text,))
        for i, text in enumerate(correct_sentences(data_dir, count))
    ]


def fixed_sample(items: Sequence[T], count: int) -> list[T]:
    """The first `count` of one fixed shuffle, so a short list is the beginning of a long one."""
    shuffled = list(items)
    random.Random(_LIST_SEED).shuffle(shuffled)
    return shuffled[:count]


def lines_of(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
        return text.removesuffix("\n").split("\n") if text else []  # Why not splitlines: JSON strings may hold U+2028
    except (OSError, UnicodeDecodeError) as cause:
        raise InputError(f"this suite needs {path}: {cause}") from cause


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The JSON of every line, after the line's place for messages. Raises: InputError."""
    for number, line in enumerate(lines_of(path), 1):
        where = f"{path}, line {number}"
        yield where, parse_json(line, where)


def parse_json(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except ValueError as cause:
        raise InputError(f"{where}: not JSON ({cause})") from cause


def cached_store(
    documents: Sequence[Document],
    encoder: TextEncoder,
    cache_dir: Path,
    config: IndexConfig | None = None,
    progress: ProgressCallback | None = None,
) -> Store:
    """Open the index of these documents, or build it; a damaged cache is built anew. Raises: SaveError,
    InputError."""
    config = config or IndexConfig()
    folder = cache_dir / content_key(documents, encoder.identity, config)[:24]
    try:
        return Store.open(folder, encoder.identity)
    except StoreError:
        build_index(documents, folder, encoder, config, progress)
        return Store.open(folder, encoder.identity)


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
