"""Kinds of edits as ERRANT classifies them, where its library and spaCy's English model are installed.

ERRANT looks at parts of speech and lemmas, which words alone do not show; our kinds are a coarser division of its types.

    >>> classify = load_errant()
    >>> classify(text, edits)

Source: Bryant et al. 2017, "Automatic Annotation and Evaluation of Error Types for Grammatical Error Correction".
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ragspec.errors import ConfigError
from ragspec.rag.grammar.edit_kinds import EditClassifier, classify_edits
from ragspec.rag.grammar.edits import Edit, EditKind, apply_edits

_KINDS = {
    "SPELL": EditKind.SPELLING,
    "ORTH": EditKind.SPELLING,
    "NOUN:INFL": EditKind.SPELLING,
    "VERB:INFL": EditKind.SPELLING,
    "VERB:SVA": EditKind.AGREEMENT,
    "NOUN:NUM": EditKind.AGREEMENT,
    "DET": EditKind.ARTICLE,
    "PREP": EditKind.PREPOSITION,
    "VERB:FORM": EditKind.VERB_FORM,
    "VERB:TENSE": EditKind.VERB_FORM,
    "WO": EditKind.WORD_ORDER,
    "PUNCT": EditKind.PUNCTUATION,
    "NOUN:POSS": EditKind.PUNCTUATION,
    "CONTR": EditKind.PUNCTUATION,
}


class ErrantClassifier:
    """Owns a loaded annotator."""

    def __init__(self, annotator: Any) -> None:
        self._annotator, self._lock = annotator, threading.Lock()  # Why a lock: it keeps state between calls

    def __call__(self, text: str, edits: Sequence[Edit]) -> list[Edit]:
        """The edits of a sentence with kinds. Moves stay moves, and what ERRANT has no name for keeps its kind."""
        own = classify_edits(text, edits)
        if not own:
            return own
        with self._lock:
            return self._of(text, own)

    def _of(self, text: str, own: Sequence[Edit]) -> list[Edit]:
        before, after = (self._annotator.parse(each, tokenise=True) for each in (text, apply_edits(text, own)))
        kinds, shift = [], 0
        for edit in own:
            new_start = edit.start + shift
            shift += len(edit.replacement) - len(edit.original)
            old, new = _tokens(before, edit.start, edit.end), _tokens(after, new_start, edit.end + shift)
            kinds.append(self._kind(before, after, old, new) if edit.kind is not EditKind.WORD_ORDER else None)
        return [replace(edit, kind=kind or edit.kind) for edit, kind in zip(own, kinds, strict=True)]

    def _kind(self, before: Any, after: Any, old: tuple[int, int], new: tuple[int, int]) -> EditKind | None:
        found = self._annotator.import_edit(before, after, [*old, *new], min=True)
        name = found.type.partition(":")[2]
        return next((kind for known, kind in _KINDS.items() if name == known), None)


@functools.cache
def default_classifier() -> EditClassifier:
    """ERRANT's if it is installed, else our own; the same object every time."""
    try:
        return load_errant()
    except ConfigError:
        return classify_edits


def load_errant() -> ErrantClassifier:
    """Raises: ConfigError where ERRANT or the model it needs is not installed."""
    try:
        return ErrantClassifier(importlib.import_module("errant").load("en"))
    except (ImportError, OSError) as cause:
        raise ConfigError(f'kinds by ERRANT need it and its model: pip install "ragspec[errant]" ({cause})') from cause


def _tokens(doc: Any, start: int, end: int) -> tuple[int, int]:
    """The tokens that a stretch of characters touches; where it touches none, the place between two."""
    touched = [token.i for token in doc if token.idx < end and token.idx + len(token) > start]
    if touched:
        return touched[0], touched[-1] + 1
    place = sum(token.idx < start for token in doc)
    return place, place
