"""The kind of each edit, and a message that explains it. English only.

Kinds come from the words alone or, if ERRANT and spaCy's English model are installed, from ERRANT, which sees parts of speech and
lemmas. Our kinds are coarser than ERRANT's types.

    >>> text = "He go to a old mill."
    >>> [edit.kind.value for edit in classify_edits(text, word_edits(text, "He goes to an old mill."))]
    ['agreement', 'article']

Source of ERRANT: Bryant et al. 2017, "Automatic Annotation and Evaluation of Error Types for Grammatical Error Correction".
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from ragspec.rag.grammar.edits import Edit, EditKind, apply_edits
from ragspec.rag.grammar.word_forms import (
    AGREEING,
    ARTICLES,
    AUXILIARIES,
    PREPOSITIONS,
    are_numbers_of_one_word,
    are_verb_forms,
    verb_base,
)

EditClassifier = Callable[[str, Sequence[Edit]], list[Edit]]
"""Takes a sentence and its edits; returns the edits with kinds."""

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_MAX_MOVED = 4
"""A word moved over more words than this counts as two edits."""
_EXCHANGED = frozenset({EditKind.ARTICLE, EditKind.PREPOSITION, EditKind.AGREEMENT, EditKind.VERB_FORM})
"""Two edits of these kinds are not a move: in "a apple and an pear" both articles are corrected."""
_ALIKE = 0.6
"""The least similarity of a word and its misspelling (`SequenceMatcher.ratio`)."""

_ERRANT_TYPES = {
    EditKind.SPELLING: "SPELL ORTH NOUN:INFL VERB:INFL",
    EditKind.AGREEMENT: "VERB:SVA NOUN:NUM",
    EditKind.ARTICLE: "DET",
    EditKind.PREPOSITION: "PREP",
    EditKind.VERB_FORM: "VERB:FORM VERB:TENSE",
    EditKind.WORD_ORDER: "WO",
    EditKind.PUNCTUATION: "PUNCT NOUN:POSS CONTR",
}
_KIND_OF_ERRANT_TYPE = {name: kind for kind, names in _ERRANT_TYPES.items() for name in names.split()}

_REASONS = {
    EditKind.SPELLING: "Possible spelling mistake",
    EditKind.AGREEMENT: "These words do not agree in number or person",
    EditKind.ARTICLE: "The article does not fit here",
    EditKind.PREPOSITION: "The preposition does not fit here",
    EditKind.VERB_FORM: "The form of the verb does not fit here",
    EditKind.WORD_ORDER: "The words are in another order",
    EditKind.PUNCTUATION: "Punctuation or spacing",
    EditKind.OTHER: "This reads better otherwise",
}


def classify_edits(text: str, edits: Sequence[Edit]) -> list[Edit]:
    """The edits of `text` with kinds; two edits that move a word become one."""
    return [replace(edit, kind=edit_kind(edit.original, edit.replacement)) for edit in _joined_moves(text, edits)]


def edit_message(edit: Edit) -> str:
    """One line that explains the edit to the writer."""
    old, new = edit.original.strip(), edit.replacement.strip()
    if not old and not new:
        what = "a space here" if edit.replacement else "no space here"
    elif not new:
        what = f"leave out “{old}”"
    elif not old:
        what = f"put in “{new}”"
    else:
        what = f"“{new}” instead of “{old}”"
    return f"{_REASONS[edit.kind]}: {what}."


def edit_kind(original: str, replacement: str) -> EditKind:
    """The kind of one change. Unambiguous kinds are tried first."""
    old, new = _words(original), _words(replacement)
    if _bare(old) == _bare(new):
        return EditKind.PUNCTUATION
    lower_old, lower_new = [w.casefold() for w in old], [w.casefold() for w in new]
    if "".join(_bare(lower_old)) == "".join(_bare(lower_new)):
        return EditKind.SPELLING
    if len(old) > 1 and sorted(lower_old) == sorted(lower_new):
        return EditKind.WORD_ORDER
    return _kind_of_words(lower_old, lower_new)


def _kind_of_words(old: Sequence[str], new: Sequence[str]) -> EditKind:
    gone, come = _difference(old, new), _difference(new, old)
    for words, kind in ((ARTICLES, EditKind.ARTICLE), (PREPOSITIONS, EditKind.PREPOSITION)):
        if {*gone, *come} <= words:
            return kind
    if len(gone) == len(come) == 1:
        return _kind_of_word(gone[0], come[0])
    if {*gone, *come} <= AUXILIARIES:
        return EditKind.VERB_FORM
    if [verb_base(w) for w in gone if w not in AUXILIARIES] == [verb_base(w) for w in come if w not in AUXILIARIES]:
        return EditKind.VERB_FORM
    return EditKind.OTHER


def _kind_of_word(old: str, new: str) -> EditKind:
    if any({old, new} <= group for group in AGREEING) or are_numbers_of_one_word(old, new):
        return EditKind.AGREEMENT
    if {old, new} <= AUXILIARIES or are_verb_forms(old, new):
        return EditKind.VERB_FORM
    alike = SequenceMatcher(None, old, new, autojunk=False).ratio() >= _ALIKE
    return EditKind.SPELLING if alike else EditKind.OTHER


def _joined_moves(text: str, edits: Sequence[Edit]) -> list[Edit]:
    """Why: to a reader, a word deleted here and inserted there is one change."""
    joined: list[Edit] = []
    for edit in edits:
        if joined and (whole := _move(text, joined[-1], edit)):
            joined[-1] = whole
        else:
            joined.append(edit)
    return joined


def _move(text: str, first: Edit, second: Edit) -> Edit | None:
    between = text[first.end : second.start]
    old = [w.casefold() for w in _words(first.original + " " + second.original)]
    new = [w.casefold() for w in _words(first.replacement + " " + second.replacement)]
    if not old or sorted(old) != sorted(new) or len(_words(between)) > _MAX_MOVED or "\n" in between:
        return None
    if sorted(_words(first.original.casefold())) == sorted(_words(first.replacement.casefold())):  # nothing moves
        return None
    exchanged = (_words(e.original) and edit_kind(e.original, e.replacement) in _EXCHANGED for e in (first, second))
    if all(exchanged):
        return None
    original = text[first.start : second.end]
    return Edit(first.start, second.end, original, first.replacement + between + second.replacement)


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _bare(words: Iterable[str]) -> list[str]:
    return ["".join(c for c in word if c.isalnum()) for word in words]


def _difference(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return list((Counter(one) - Counter(other)).elements())


class ErrantClassifier:
    """Owns a loaded ERRANT annotator."""

    def __init__(self, annotator: Any) -> None:
        self._annotator, self._lock = annotator, threading.Lock()  # Why a lock: the annotator keeps state between calls

    def __call__(self, text: str, edits: Sequence[Edit]) -> list[Edit]:
        """The edits with kinds. Moves stay moves, and an edit whose ERRANT type we do not map keeps our kind."""
        edits = classify_edits(text, edits)
        if not edits:
            return edits
        with self._lock:
            before, after = (self._annotator.parse(each, tokenise=True) for each in (text, apply_edits(text, edits)))
            classified, shift = [], 0
            for edit in edits:
                old = _touched_tokens(before, edit.start, edit.end)
                new_start = edit.start + shift
                shift += len(edit.replacement) - len(edit.original)
                new = _touched_tokens(after, new_start, edit.end + shift)
                if edit.kind is not EditKind.WORD_ORDER:
                    theirs = self._annotator.import_edit(before, after, [*old, *new], min=True)
                    edit = replace(edit, kind=_KIND_OF_ERRANT_TYPE.get(theirs.type.partition(":")[2], edit.kind))
                classified.append(edit)
        return classified


@functools.cache
def default_classifier() -> EditClassifier:
    """ERRANT if it and its spaCy model are installed, else `classify_edits`; always the same object."""
    try:
        return ErrantClassifier(importlib.import_module("errant").load("en"))
    except (ImportError, OSError):  # OSError: without the spaCy model
        return classify_edits


def _touched_tokens(doc: Any, start: int, end: int) -> tuple[int, int]:
    """The half-open range of tokens that the characters touch; an empty range between two tokens if they touch none."""
    touched = [token.i for token in doc if token.idx < end and token.idx + len(token) > start]
    if touched:
        return touched[0], touched[-1] + 1
    place = sum(token.idx < start for token in doc)
    return place, place
