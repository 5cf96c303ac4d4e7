"""Responses under /v2 in LanguageTool's format, with every field that its clients read.

Owns the path from edits to matches. Offsets of matches count UTF-16 code units of the text with its markup. A match covers at
least a word where possible, because clients underline it: an insertion is joined with a word beside it. Applying the matches from
the last to the first gives the corrected text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from ragspec.rag.characters import Utf16Offsets
from ragspec.rag.grammar.correction import Correction
from ragspec.rag.grammar.edit_kinds import edit_message
from ragspec.rag.grammar.edits import Edit, EditKind
from ragspec.rag.grammar.markup import MarkedText, Span
from services.languagetool.check_request import RULES
from services.languagetool.corrector import Corrected
from services.languagetool.languages import LANGUAGES, DetectedLanguage

API_VERSION = 1
_CONTEXT_CHARS = 40
"""Characters shown before and after a match."""
_WORD_AFTER = re.compile(r"\w+|\S")
_WORD_BEFORE = re.compile(r"(?:\w+|\S)\Z")
_MAX_WORD_CHARS = 100
_UNFINISHED = "There was not enough time for all of the text, or the correction of a sentence had no end"

_REWRITTEN = "The model rewrote {} of the sentences instead of correcting them; these were not checked"
_UNPROVEN = (
    "The model left most sentences of a test as wrong as they were, so a sentence without a match may be wrong too"
)

_VERSION = version("ragspec")
_SOFTWARE = {
    "name": "ragspec",
    "version": _VERSION,
    "buildDate": _VERSION,
    "apiVersion": API_VERSION,
    "premium": False,
    "premiumHint": "",
    "status": "",
}


def check_reply(language: str, found: DetectedLanguage, corrected: Corrected | None) -> dict[str, Any]:
    """`language`: the requested code. `corrected` None: the text is not English."""
    warnings: dict[str, Any] = {"incompleteResults": False}
    matches, ranges = list[dict[str, Any]](), list[list[int]]()
    if corrected is None:
        reason = f"The text seems to be {found.name}, and only English is corrected"
        warnings = {"incompleteResults": True, "incompleteResultsReason": reason}
    else:
        offsets = Utf16Offsets(corrected.correction.text)
        matches = matches_of(corrected.correction, corrected.marked, offsets)
        ranges = [[offsets.units(start), offsets.units(end)] for start, end in corrected.correction.sentences]
        if corrected.correction.unfinished:
            warnings = {"incompleteResults": True, "incompleteResultsReason": _UNFINISHED}
        elif num_rewritten := corrected.correction.num_rewritten:
            warnings = {"incompleteResults": True, "incompleteResultsReason": _REWRITTEN.format(num_rewritten)}
        elif corrected.is_unproven:
            warnings = {"incompleteResults": True, "incompleteResultsReason": _UNPROVEN}
    code, confidence = language if language in LANGUAGES else found.code, found.confidence
    detected = {"name": found.name, "code": found.code, "confidence": confidence, "source": "words"}
    rates = [{"language": found.code.split("-")[0], "rate": confidence}]
    return {
        "software": _SOFTWARE,
        "warnings": warnings,
        "language": {"name": LANGUAGES.get(code, found.name), "code": code, "detectedLanguage": detected},
        "matches": matches,
        "sentenceRanges": ranges,
        "extendedSentenceRanges": [{"from": start, "to": end, "detectedLanguages": rates} for start, end in ranges],
    }


def languages_reply() -> list[dict[str, str]]:
    return [{"name": name, "code": code.split("-")[0], "longCode": code} for code, name in LANGUAGES.items()]


def software_reply() -> dict[str, Any]:
    kept = {name: _SOFTWARE[name] for name in ("name", "version", "buildDate", "premium")}
    return {"software": kept | {"commit": _VERSION}}


def config_reply(max_text_chars: int) -> dict[str, Any]:
    rules = [
        {
            "ruleId": rule.id,
            "description": rule.description,
            "categoryId": rule.category,
            "categoryName": rule.category_name,
            "locQualityIssueType": rule.issue,
            "isDictionaryBasedSpellingRule": False,
            "isOfficeDefaultOn": True,
            "isOfficeDefaultOff": False,
        }
        for rule in RULES.values()
    ]
    return {"software": _SOFTWARE, "parameter": {"maxTextLength": max_text_chars}, "rules": rules}


def matches_of(correction: Correction, marked: MarkedText, offsets: Utf16Offsets) -> list[dict[str, Any]]:
    """All edits as matches, in order."""
    starts = [start for start, _ in correction.sentences]
    found = []
    for edit in visible(correction.text, correction.edits, marked.text_spans()):
        number = bisect_right(starts, edit.start) - 1
        sentence = correction.sentences[max(0, number)]
        found.append(_match(correction.text, edit, sentence, offsets))
    return found


def visible(text: str, edits: Sequence[Edit], texts: Sequence[Span]) -> Iterator[Edit]:
    """The same edits, widened so that each covers text if possible. `texts`: the spans without markup."""
    at, starts = 0, [start for start, _ in texts]
    for number, edit in enumerate(edits):
        if edit.start == edit.end:
            following = edits[number + 1].start if number + 1 < len(edits) else len(text)
            low, high = _room(edit.start, texts, starts)
            edit = _widened(text, edit, max(at, low), min(following, high))
        at = edit.end
        yield edit


def _room(place: int, texts: Sequence[Span], starts: Sequence[int]) -> Span:
    """The span around `place` that a match may cover without covering markup."""
    number = bisect_right(starts, place) - 1
    if number < 0 or place > texts[number][1]:
        return place, place
    low, high = texts[number]
    if place == low and number and texts[number - 1][1] == place:  # adjacent texts count as one
        low = texts[number - 1][0]
    return low, high


def _widened(text: str, edit: Edit, low: int, high: int) -> Edit:
    """Joins an inserted word with the word after it, and any other insertion with the word before it."""
    place = edit.start
    before = _WORD_BEFORE.search(text, max(low, place - _MAX_WORD_CHARS), place)
    after = _WORD_AFTER.match(text, place, min(high, place + _MAX_WORD_CHARS))
    first = after if edit.replacement[:1].isalnum() else before
    chosen = first or before or after
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
    """One line around the match, with dots where it is cut."""
    begin, end = max(0, edit.start - _CONTEXT_CHARS), min(len(text), edit.end + _CONTEXT_CHARS)
    before = "..." if begin else ""
    around = re.sub(r"[\r\n\t]", " ", text[begin:end])
    shown = before + around + ("..." if end < len(text) else "")
    offsets, start = Utf16Offsets(shown), len(before) + edit.start - begin
    offset = offsets.units(start)
    return {"text": shown, "offset": offset, "length": offsets.units(start + edit.end - edit.start) - offset}
