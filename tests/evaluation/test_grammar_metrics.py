"""GLEU against values worked out by hand."""

import math

import pytest

from ragspec.evaluation.metrics import edit_distance, gleu

SOURCE = "a b c d e f".split()
REFERENCE = "a b c d e g".split()


def test_perfect_output_scores_100() -> None:
    """Penalties must not hit n-grams that the reference has too."""
    assert gleu([SOURCE], [REFERENCE], [[REFERENCE]]) == pytest.approx(100.0)


def test_unchanged_source_is_penalised() -> None:
    """Matches 5, 4, 3, 2 of 6, 5, 4, 3; each order keeps one wrong n-gram, so one is taken off each."""
    expected = math.exp((math.log(4 / 6) + math.log(3 / 5) + math.log(2 / 4) + math.log(1 / 3)) / 4)
    assert gleu([SOURCE], [SOURCE], [[REFERENCE]]) == pytest.approx(100 * expected)


def test_short_output_pays_the_brevity_penalty() -> None:
    """Without it, deleting everything doubtful would win."""
    output = REFERENCE[:5]
    assert gleu([SOURCE], [output], [[REFERENCE]]) == pytest.approx(100 * math.exp(1 - 6 / 5))


def test_references_are_drawn() -> None:
    """With one perfect and one hopeless reference the mean lies between."""
    score = gleu([SOURCE], [REFERENCE], [[REFERENCE, "x y z u v w".split()]])
    assert 30 < score < 70


def test_edit_distance_counts_words() -> None:
    """Substitution, insertion and deletion cost one each."""
    assert edit_distance("a b c".split(), "a x c".split()) == 1
    assert edit_distance("a b c".split(), "a b".split()) == 1
    assert edit_distance([], "a b".split()) == 2
