"""What a report rounds, and what it must not round away."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ragspec.core import Passage
from ragspec.errors import SaveError
from ragspec.evaluation.datasets import Question
from ragspec.evaluation.metrics import answer_scores
from ragspec.evaluation.report import rounded, write_figures


def test_one_difference_among_many_is_seen() -> None:
    """20,999 equal answers of 21,000 were reported as all."""
    assert rounded({"identical": [20_999 / 21_000, 1.0, 0.5]}) == {"identical": [0.9999, 1.0, 0.5]}
    assert rounded(1234.567) == 1235.0 and rounded(-0.00012345) == -0.0001234


def test_what_was_not_scored_is_nothing() -> None:
    """Zero of zero was a score of 0; NaN is not JSON."""
    assert rounded((math.nan, 0.0)) == [None, 0.0]


def test_a_sentence_that_was_to_be_quoted_is_compared_with_the_quote() -> None:
    """A perfect answer about the standard library scored 0: it has no short answer."""
    sentence = "Return the floor of x as an Integral."
    questions = [Question("a", "What?", (sentence,), "a", is_quoted=True), Question("b", "When?", ("1874",), "b")]
    texts = [f'"{sentence}" [1]', '"It was built in 1874." [1] – 1874.']
    passages = [[Passage("a", "a", sentence, 0, len(sentence))], []]
    scores = answer_scores(questions, texts, passages)
    assert (scores["em"], scores["f1"]) == (1.0, 1.0)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Bug guarded: a traceback after an hour of measuring."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError):
        write_figures(dict, tmp_path / "file")
