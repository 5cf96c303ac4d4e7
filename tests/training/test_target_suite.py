"""The scores of the target suite on made-up outputs."""

import pytest

from ragspec.evaluation.metrics import answer_f1
from ragspec.evaluation.suites.target import abstention_scores, question_scores
from ragspec.evaluation.suites.target_cases import QuestionCase, passage_with
from ragspec.rag.wording import ABSTENTION, quoted_answer

CASE = QuestionCase("Who sat?", ["A dog ran.", "The cat sat. It rained."], 2, ["cat", "The cat"])


def test_scores_tell_exact_quotes_from_invented_ones() -> None:
    """A quote counts only as a substring; its number only where the quote is right."""
    outputs = [
        quoted_answer("The cat sat.", 2, "The cat"),
        quoted_answer("A dog ran.", 2, "a dog"),
        quoted_answer("The cat slept.", 2, "cat"),
        "no format at all",
    ]
    scores = question_scores([CASE] * 4, outputs)
    assert scores["quote_exact"] == 0.5
    assert scores["quote_has_answer"] == 0.25
    assert scores["em"] == 0.5
    assert scores["citation_correct"] == 0.5


def test_abstention_counts_both_ways() -> None:
    """Precision over all abstentions, recall over all unanswerable questions."""
    none = QuestionCase("Who flew?", CASE.passages, 1, [])
    scores = abstention_scores([CASE, CASE, none, none], [ABSTENTION, "x", ABSTENTION, "x"])
    assert scores == {"abstain_precision": 0.5, "abstain_recall": 0.5}


def test_f1_ignores_articles_and_case() -> None:
    """As in SQuAD's own script."""
    assert answer_f1("the Cat", "a cat") == 1.0
    assert answer_f1("black cat", "cat") == pytest.approx(2 / 3)
    assert answer_f1("dog", "cat") == 0.0


def test_passages_keep_the_answer_when_cut() -> None:
    """A long paragraph cut at its beginning would make its question unanswerable."""
    text = " ".join(f"Sentence number {i} says a few words more." for i in range(60)) + " The end is near."
    passage = passage_with(text, "What is near?", ["The end"])
    assert "The end is near." in passage and len(passage.split()) <= 120
