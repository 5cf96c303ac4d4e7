"""Edits as LanguageTool's matches: what its clients underline, and what they put there.

Offsets count UTF-16 code units of the text with its markup. A match covers a word or more, since nobody sees one that covers
nothing: what is put in comes with its neighbour. Applied from the last to the first, matches make the corrected text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ragspec.rag.characters import Utf16Offsets
from ragspec.rag.grammar.correction import Correction
from ragspec.rag.grammar.edit_kinds import edit_message
from ragspec.rag.grammar.edits import Edit, EditKind
from ragspec.rag.grammar.markup import MarkedText, Span
from services.languagetool.rules import RULES

_CONTEXT = 40
"""Characters on either side of a match that are shown with it."""
_WORD_BEHIND = re.compile(r"\w+|\S")
_WORD_BEFORE = re.compile(r"(?:\w+|\S)\Z")
_LONGEST_WORD = 100


def matches_of(correction: Correction, marked: MarkedText, offsets: Utf16Offsets) -> list[dict[str, Any]]:
    """All edits, in their order."""
    starts = [start for start, _ in correction.sentences]
    found = []
    for edit in visible(correction.text, correction.edits, marked.text_spans()):
        number = bisect_right(starts, edit.start) - 1
        sentence = correction.sentences[max(0, number)]
        found.append(_match(correction.text, edit, sentence, offsets))
    return found


def visible(text: str, edits: Sequence[Edit], texts: Sequence[Span]) -> Iterator[Edit]:
    """The same changes, each with something to underline where there is a word beside it. `texts`: where there is no markup."""
    at, starts = 0, [start for start, _ in texts]
    for number, edit in enumerate(edits):
        if edit.start == edit.end:
            following = edits[number + 1].start if number + 1 < len(edits) else len(text)
            low, high = _room(edit.start, texts, starts)
            edit = _widened(text, edit, max(at, low), min(following, high))
        at = edit.end
        yield edit


def _room(place: int, texts: Sequence[Span], starts: Sequence[int]) -> Span:
    """How far a match may reach from a place without covering markup."""
    number = bisect_right(starts, place) - 1
    if number < 0 or place > texts[number][1]:
        return place, place
    low, high = texts[number]
    if place == low and number and texts[number - 1][1] == place:  # Why: two texts beside each other are one
        low = texts[number - 1][0]
    return low, high


def _widened(text: str, edit: Edit, low: int, high: int) -> Edit:
    """What is put in before a word comes with that word, anything else with what stands before it."""
    place = edit.start
    before = _WORD_BEFORE.search(text, max(low, place - _LONGEST_WORD), place)
    behind = _WORD_BEHIND.match(text, place, min(high, place + _LONGEST_WORD))
    first = behind if edit.replacement[:1].isalnum() else before
    chosen = first or before or behind
    if chosen is None:
        return edit
    start, end = min(place, chosen.start()), max(place, chosen.end())
    replacement = text[start:place] + edit.replacement + text[place:end]
    return replace(edit, start=start, end=end, original=text[start:end], replacement=replacement)


def _match(text: str, edit: Edit, sentence: Span, offsets: Utf16Offsets) -> dict[str, Any]:
    rule, start = RULES[edit.kind], offsets.units(edit.start)
    return {
        "message": edit_message(edit),
        "shortMessage": rule.description,
        "replacements": [{"value": edit.replacement}],
        "offset": start,
        "length": offsets.units(edit.end) - start,
        "context": _context(text, edit),
        "sentence": text[slice(*sentence)],
        "type": {"typeName": "UnknownWord" if edit.kind is EditKind.SPELLING else "Other"},
        "rule": rule.as_json(),
        "ignoreForIncompleteSentence": False,
        "contextForSureMatch": 0,
    }


def _context(text: str, edit: Edit) -> dict[str, Any]:
    """One line around the match, with dots where it was cut."""
    begin, end = max(0, edit.start - _CONTEXT), min(len(text), edit.end + _CONTEXT)
    before = "..." if begin else ""
    around = re.sub(r"[\r\n\t]", " ", text[begin:end])
    shown = before + around + ("..." if end < len(text) else "")
    offsets, start = Utf16Offsets(shown), len(before) + edit.start - begin
    offset = offsets.units(start)
    return {"text": shown, "offset": offset, "length": offsets.units(start + edit.end - edit.start) - offset}
