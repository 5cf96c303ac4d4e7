"""The suite answers: its measures tell right from wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_data import DATA, needs_data

from ragspec.config import EncoderConfig, IndexConfig
from ragspec.core import Document, Passage
from ragspec.evaluation.suites.answers.json_outputs import is_valid
from ragspec.evaluation.suites.answers.retrieved import measure_retrieval, rank_of
from ragspec.evaluation.suites.answers.suite import measure_support
from ragspec.evaluation.timing import no_tick
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import build_index
from ragspec.training.documentation import DocumentationQuestion, documentation_questions

FLOOR = "math.floor returns the floor of x as an integral number."
OPEN = "The mill opens at nine on weekdays and closes at noon."


def asked(question: str, quote: str, path: str) -> DocumentationQuestion:
    return DocumentationQuestion(question, quote, quote, "", "definition", path)


def test_questions_with_their_passage_are_found_and_without_it_abstain(tmp_path: Path) -> None:
    """A measure that counts every first passage as gold, or no abstention at all."""
    encoder = Encoder.load(EncoderConfig())
    documents = [
        Document("math.rst", FLOOR, "math"),
        Document("mill.md", OPEN, "The mill"),
        Document("sea.md", "Salt."),
    ]
    build_index(documents, tmp_path, encoder, IndexConfig())
    questions = [
        asked("What does math.floor return?", FLOOR, "math.rst"),
        asked("When does the mill open on weekdays?", OPEN, "mill.md"),
        asked("What does math.floor return?", "Another quote.", "math.rst"),
    ]
    found = measure_retrieval(Store.open(tmp_path, encoder.identity), encoder, questions, no_tick)
    assert found["doc_top1"] == found["doc_top3"] == pytest.approx(2 / 3)
    assert found["good_answers_lost"] == found["wrongly_answered_ratio"] == 0.0
    assert found["num_doc_questions"] == 3 and found["retrieval_p50_ms"] > 0


def test_the_rank_is_the_first_passage_with_the_quote() -> None:
    """A quote that counts wherever its document is."""
    passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(("Salt.", FLOOR, FLOOR))]
    assert rank_of(asked("?", FLOOR, "d"), passages) == 1 and rank_of(asked("?", OPEN, "d"), passages) == 3


@pytest.mark.parametrize(
    ("name", "text", "valid"),
    [
        ("facts", '{"subject": "mill", "year": 1874}', True),
        ("facts", '{"subject": "mill", "year": true}', False),
        ("facts", '{"subject": "mill"}', False),
        ("facts", '{"subject": "mill", "year": 18', False),
        ("words", '["yes", "no"]', True),
        ("words", '["maybe"]', False),
        ("words", "[]", False),
    ],
)
def test_outputs_that_break_their_schema_are_counted(name: str, text: str, valid: bool) -> None:
    """A parser that is content with any JSON."""
    assert is_valid(name, text) == valid


@needs_data
def test_alterations_of_the_data_lose_their_label() -> None:
    """The rule's promise: at most five in a hundred alterations keep their label, every quote equals its source."""
    pages = [question.passage for question in documentation_questions(DATA / "docs", evaluation=True)]
    measured = measure_support(DATA, list(dict.fromkeys(pages)), 60, 1)
    assert measured["num_altered"] >= 60 and measured["altered_still_supported"] <= 0.05
    assert measured["quoted_confirmed"] == measured["invented_marked"] == 1.0
