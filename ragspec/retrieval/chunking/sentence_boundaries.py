"""Sentence boundaries in many scripts. Knows no document and no passage.

>>> sentences("It rained. Then it stopped.")
[(0, 10), (11, 27)]
"""

from __future__ import annotations

import re

from ragspec.retrieval.chunking.abbreviations import is_abbreviation

Span = tuple[int, int]

_GREEK = "Ͱ-Ͽἀ-῿"
_BREAK = re.compile(
    # Why the first character before the alternatives: the search skips to it, and no alternative is tried elsewhere
    "[.!?…。！？｡।॥؟።፧፨։៕။។۔;\u037e\n](?:"
    r"(?P<stop>(?<=[.!?…])(?<![.!?…]{2})[.!?…]*+[\"')\]}”’»“«‹›]*+(?:[ \u00a0\u202f]»)?+)(?=\s)"  # `_ends_sentence` decides
    r"|(?P<wide>(?<=[。！？｡])[。！？｡]*+[」』”’）]*+)"  # an ideographic full stop needs no space after it
    # nor do those of South Asia, Ethiopia, Armenia
    r"|(?P<script>(?:(?<=[।॥؟።፧፨։៕။])|(?<=។)(?!ល។)|(?<=۔)(?=\s))[।॥؟!?…]*+[\"')\]}”’»]*+)"
    rf"|(?P<greek>(?<=[{_GREEK}][;\u037e])[;\u037e]*+[\"')\]}}”’»]*+)(?=\s+[\"'(“‘«]*+[{_GREEK}])"
    r"|(?P<lines>(?<=\n)(?=[ \t]*\n|[ \t]*(?:[-*•] |\d{1,3}[.)] |>>> |=====|-----|\| [^\n]*\|[ \t]*(?:\n|\Z)))))"
    # a blank line, or a line that is an item, a doctest, a rule or a row of a table
)
_OPENING = "\"'(“‘«"


def sentences(text: str, start: int = 0, end: int | None = None) -> list[Span]:
    """Half-open character spans of the sentences of `text[start:end]`, in order, without the white space around them.

    Everything but white space lies in exactly one span. Abbreviations, initials and decimals do not end a sentence; blank
    lines, list items, doctest prompts and rows of tables do.
    """
    end = len(text) if end is None else end
    spans: list[Span] = []
    for match in _BREAK.finditer(text, start, end):
        if _ends_sentence(text, start, end, match):
            _append(spans, text, start, match.end())
            start = match.end()
    _append(spans, text, start, end)
    return spans


def _ends_sentence(text: str, start: int, end: int, match: re.Match[str]) -> bool:
    if match.lastgroup not in ("stop", "greek"):
        return True
    following = lstrip(text, match.end(), end)
    if following == end or text.count("\n", match.end(), following) > 1:
        return True
    head = text[following]
    if match.lastgroup == "greek":
        return not text[following : following + 3].lstrip(_OPENING)[:1].islower()
    if head.islower():
        return False
    if match.group() != ".":
        return True
    return not is_abbreviation(text, start, match.start(), following)


def _append(spans: list[Span], text: str, start: int, end: int) -> None:
    start = lstrip(text, start, end)
    end = rstrip(text, start, end)
    if start < end:
        spans.append((start, end))


def lstrip(text: str, start: int, end: int) -> int:
    while start < end and text[start].isspace():
        start += 1
    return start


def rstrip(text: str, start: int, end: int) -> int:
    while end > start and text[end - 1].isspace():
        end -= 1
    return end
