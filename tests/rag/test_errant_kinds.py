"""Kinds by ERRANT, where it is installed; that nothing misses it where it is not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from ragspec.rag.grammar.edit_kinds import classify_edits, default_classifier
from ragspec.rag.grammar.edits import word_edits


def test_without_it_words_alone_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that cannot correct because an optional library is missing."""

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    default_classifier.cache_clear()
    assert default_classifier() is classify_edits
    default_classifier.cache_clear()


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ("He go to a old mill .", "He goes to an old mill .", "agreement article"),
        ("I recieve it .", "I receive it .", "spelling"),
        ("It depends of him .", "It depends on him .", "preposition"),
        ("He has go home", "He has gone home", "verb_form"),
        ("Yes he did .", "Yes , he did .", "punctuation"),
        ("He went yesterday home", "He went home yesterday", "word_order"),
        ("\U0001f600 He go home", "\U0001f600 He goes home", "agreement"),
    ],
)
def test_its_types_become_our_kinds(before: str, after: str, kinds: str) -> None:
    """Characters counted where it counts words: every kind is its neighbour's."""
    pytest.importorskip("errant")
    edits = default_classifier()(before, word_edits(before, after))
    assert " ".join(edit.kind for edit in edits) == kinds
