"""What is wrong with what an edit changes, told from the words alone; and the sentence that says so to people.

English. Where the ERRANT library is installed, `ragspec.rag.grammar.errant_kinds` asks it instead.

    >>> text = "He go to a old mill."
    >>> [edit.kind.value for edit in classify_edits(text, word_edits(text, "He goes to an old mill."))]
    ['agreement', 'article']
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from ragspec.rag.grammar.edits import Edit, EditKind
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
"""Edits of a sentence, with their kinds."""

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_MAX_MOVED = 4
"""Words between a word's old and new place at most, for it to count as moved."""
_EXCHANGED = frozenset({EditKind.ARTICLE, EditKind.PREPOSITION, EditKind.AGREEMENT, EditKind.VERB_FORM})
"""Two words put right, each in its place: "a apple and an pear" moves nothing."""
_ALIKE = 0.6
"""Letters in common at least (twice over both lengths), for one word to be the other misspelt."""

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
    """The edits of `text` with their kinds; two that move a word become one."""
    return [replace(edit, kind=edit_kind(edit.original, edit.replacement)) for edit in _joined_moves(text, edits)]


def edit_message(edit: Edit) -> str:
    """One line for whoever is to accept it."""
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
    """The kind of one change; what can be told for certain first."""
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
    """Why: a word that is taken away here and put in there is one change to whoever reads it."""
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
    if all(
        edit_kind(edit.original, edit.replacement) in _EXCHANGED and _words(edit.original) for edit in (first, second)
    ):
        return None
    original = text[first.start : second.end]
    return Edit(first.start, second.end, original, first.replacement + between + second.replacement)


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _bare(words: Iterable[str]) -> list[str]:
    return ["".join(c for c in word if c.isalnum()) for word in words]


def _difference(one: Sequence[str], other: Sequence[str]) -> list[str]:
    return list((Counter(one) - Counter(other)).elements())
