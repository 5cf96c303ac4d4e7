"""Questions about software documentation (.md and .rst), made by rule from the passages that the product cuts.

Owns the rules and the split: a file whose sha256(path) mod 5 is 0 is for evaluation only. Every quote is a slice of its
passage. Equal folders give equal questions.

    >>> next(documentation_questions(Path("docs"), evaluation=False)).question
    'What does PyBool_Check do?'
"""

import hashlib
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragspec.config import AnalyzerConfig, ChunkingConfig
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.search.analysis import Analyzer
from ragspec.retrieval.search.bm25 import Postings, PostingsBuilder, SparseConfig, sparse_query
from ragspec.training.documentation_rules import RuleMatch, found_in
from ragspec.training.sentences import normalise

ANSWERED_KINDS = ("definition", "how-to", "option", "table value", "comparison")
UNANSWERABLE = "not answerable"
MAX_QUOTE_WORDS, MAX_QUESTION_WORDS = 55, 28
SAME_QUOTE = 2
"""Most questions of one quote: tools share their flags."""
NUM_OTHERS, SAME_FILE = 3, 10
"""Distractors of a question, and most questions of one file in the evaluation."""


class DocumentationQuestion(NamedTuple):
    """`quote`: the sentence of `passage` that answers; empty if no passage does. `path`: relative to the folder. `others`:
    passages that share words with the question and do not hold the quote."""

    question: str
    passage: str
    quote: str
    short_answer: str
    kind: str
    path: str
    others: tuple[str, ...] = ()


def is_for_evaluation(name: str) -> bool:
    """Whether a file of the documentation, by its path in the folder, or an article of CANARD, by its title, is kept out of all
    training."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()) % 5 == 0


def documentation_questions(folder: Path, *, evaluation: bool) -> Iterator[DocumentationQuestion]:
    """All questions about the evaluation files, or about all other files, in the order of their paths.

    Raises: InputError for a file that cannot be read.
    """
    num_asked: Counter[str] = Counter()
    for path, name in _files(folder, evaluation):
        module = re.search(r"^\.\. (?:module|currentmodule):: ([\w.]+)", path.read_text(), re.MULTILINE)
        passages = [p for document in read_file(path, name) for p in chunk(document, ChunkingConfig())]
        asked: set[str] = set()
        for passage in passages:
            for found in found_in(passage, module[1] if module else "", path.stem):
                question = normalise(found.question)
                if question in asked or not _is_good(question, found, passage.text):
                    continue
                num_asked[found.quote] += 1
                if num_asked[found.quote] <= SAME_QUOTE or found.kind == "table value":
                    asked.add(question)
                    answer = found.quote, found.short_answer, found.kind
                    yield DocumentationQuestion(question, passage.text, *answer, name)


def evaluation_questions(folder: Path, count: int = 300) -> list[DocumentationQuestion]:
    """A sixth of them not answerable, the other kinds alike as far as the files have them; each with other passages.

    No quote occurs in a file that is trained on.
    """
    trained = normalise("\n".join(path.read_text() for path, _ in _files(folder, evaluation=False)))
    questions = list(documentation_questions(folder, evaluation=True))
    questions.sort(key=lambda q: hashlib.sha256(f"{q.path}\n{q.question}".encode()).digest())
    texts = list(dict.fromkeys(q.passage for q in questions))
    neighbours = Neighbours(texts)

    def others(question: DocumentationQuestion) -> list[str]:
        near = [texts[row] for row in neighbours.nearest(question.question, NUM_OTHERS + 5)]
        return [text for text in near if text != question.passage and question.quote not in text]

    num_absent, chosen, absent = count // 6, list[DocumentationQuestion](), list[DocumentationQuestion]()
    num_of_file: Counter[str] = Counter()
    kinds = [[q for q in questions if q.kind == kind] for kind in ANSWERED_KINDS]
    for question in itertools.chain.from_iterable(itertools.zip_longest(*kinds)):
        if question is None or normalise(question.quote) in trained or num_of_file[question.path] == SAME_FILE:
            continue
        num_of_file[question.path] += 1
        if len(chosen) < count - num_absent:
            chosen.append(question._replace(others=tuple(others(question)[:NUM_OTHERS])))
            continue
        apart = [text for text in others(question) if not _may_answer(question.question, text)]
        if len(absent) < num_absent and len(apart) > 2 and question.kind != "table value":
            changes = {"passage": apart[0], "quote": "", "short_answer": "", "kind": UNANSWERABLE}
            absent.append(question._replace(**changes, others=tuple(apart[1:3])))
    return chosen + absent


def _files(folder: Path, evaluation: bool) -> Iterator[tuple[Path, str]]:
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".rst")):
        name = path.relative_to(folder).as_posix()
        if is_for_evaluation(name) == evaluation:
            yield path, name


def _is_good(question: str, found: RuleMatch, passage: str) -> bool:
    num_words = len(found.quote.split())
    is_sized = num_words <= MAX_QUOTE_WORDS and (num_words >= 4 or found.kind == "table value")
    is_text = not found.quote.endswith(":") and "::" not in found.quote and not re.search(r"`_|:\w+:`", question)
    return is_sized and is_text and found.quote in passage and len(question.split()) <= MAX_QUESTION_WORDS


def _may_answer(question: str, text: str) -> bool:
    """Whether the text holds the name that the question asks about, or nearly all its long words."""
    words = [word.strip(".").rsplit(".", 1)[-1] for word in re.findall(r"[\w.-]{4,}", question.lower())]
    words = [word for word in words if word not in ("what", "does", "flag", "from", "with", "happens", "differ")]
    return sum(word in text.lower() for word in words) > len(words) - (2 if len(words) > 3 else 1)


class Neighbours:
    """Texts and their postings."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._analyzer, builder = Analyzer(AnalyzerConfig()), PostingsBuilder()
        for text in texts:
            builder.add(self._analyzer.terms(text))
        with tempfile.TemporaryDirectory() as folder:
            builder.write(Path(folder))
            self._postings = Postings.open(Path(folder))  # a mapped file outlives its name

    def nearest(self, text: str, count: int) -> list[int]:
        """Numbers of at most `count` texts, the best first."""
        terms = self._analyzer.terms(text)
        rows, scores = self._postings.scores(sparse_query(terms, self._postings.statistics(terms), SparseConfig()))
        return [int(row) for row in rows[np.lexsort((rows, -scores))[:count]]]
