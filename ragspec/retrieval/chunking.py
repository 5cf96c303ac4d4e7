"""Documents become passages: whole sentences, cut so that every passage is a slice of its document.

Owns sentence boundaries and passage spans. Never changes, strips or normalises a character: for every passage
`document.text[p.start:p.end] == p.text`, which is what makes a citation checkable.

    >>> chunk(Document("a", "One sentence. Another one."), ChunkingConfig(max_chars=40))
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragspec.config import ChunkingConfig
from ragspec.core import Document, Passage

Span = tuple[int, int]

_ABBREVIATIONS = frozenset(
    "dr mr mrs ms prof st jr sr vs cf al fig figs eq sec ch vol pp ed eds approx dept inc ltd co corp gen rep sen gov lt col sgt "
    "capt rev hon messrs mme mlle mt ft e.g i.e viz resp incl ca jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
_BEFORE_NUMBERS = frozenset("no nos art para p".split())
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]", re.UNICODE)
_LAST_WORD = re.compile(r"[\w.]*\Z")
_LONGEST_ABBREVIATION = 12

_BREAK = re.compile(
    r"(?P<stop>(?<![.!?…])[.!?…]++[\"')\]}”’»]*+)(?=\s)"  # the end of a western sentence, judged further by what stands around it
    r"|(?P<wide>[。！？｡]++[」』”’）]*+)"  # an ideographic full stop needs no space after it
    r"|(?P<lines>\n(?=[ \t]*\n|[ \t]*(?:[-*•] |\d{1,3}[.)] |>>> |=====|-----)))"  # blank line, list item, doctest, rule
)
_JOINERS = frozenset("\u200d\ufe0e\ufe0f")


def sentences(text: str) -> list[Span]:
    """Half-open character spans of the sentences, in order, without the white space around them.

    Everything but white space lies in exactly one span. Abbreviations, initials and decimals do not end a sentence; blank
    lines, list items and doctest prompts do.
    """
    spans: list[Span] = []
    start = 0
    for match in _BREAK.finditer(text):
        if match.lastgroup == "stop" and not _ends_sentence(text, start, match):
            continue
        _append(spans, text, start, match.end())
        start = match.end()
    _append(spans, text, start, len(text))
    return spans


def chunk(document: Document, config: ChunkingConfig) -> list[Passage]:
    """Passages of at most `max_chars` characters, in order, each a run of whole sentences.

    A sentence longer than that is cut between words, and a word longer than that between characters. Neighbours share the
    whole sentences that fit `overlap_chars`.
    """
    spans = [piece for span in sentences(document.text) for piece in _pieces(document.text, span, config.max_chars)]
    return [
        Passage(
            document_id=document.id,
            ordinal=ordinal,
            text=document.text[start:end],
            start=start,
            end=end,
            title=document.title,
            source=document.source,
        )
        for ordinal, (start, end) in enumerate(_pack(spans, config))
    ]


def _pack(spans: list[Span], config: ChunkingConfig) -> Iterator[Span]:
    first = 0  # spans[first:after] make the passage
    while first < len(spans):
        after = first + 1
        while after < len(spans) and spans[after][1] - spans[first][0] <= config.max_chars:
            after += 1
        yield spans[first][0], spans[after - 1][1]
        if after == len(spans):
            return
        first = _overlap_start(spans, first, after, config)


def _overlap_start(spans: list[Span], first: int, after: int, config: ChunkingConfig) -> int:
    """The earliest span to repeat, such that the next passage still gains at least one new span."""
    start, overlap_end, new_end = after, spans[after - 1][1], spans[after][1]
    while (
        start - 1 > first
        and overlap_end - spans[start - 1][0] <= config.overlap_chars
        and new_end - spans[start - 1][0] <= config.max_chars
    ):
        start -= 1
    return start


def _pieces(text: str, span: Span, max_chars: int) -> Iterator[Span]:
    start, end = span
    while end - start > max_chars:
        cut = _cut(text, start, start + max_chars)
        yield start, _rstrip(text, start, cut)
        start = _lstrip(text, cut, end)
    yield start, end


def _cut(text: str, start: int, limit: int) -> int:
    """Where to cut `text[start:limit + ...]`: after the last white space, else between two whole characters."""
    if text[limit].isspace():
        return limit
    for position in range(limit - 1, start, -1):
        if text[position].isspace():
            return position
    position = limit
    while position > start + 1 and (_continues(text[position]) or text[position - 1] == "\u200d"):
        position -= 1
    return position if position > start + 1 else limit


def _continues(character: str) -> bool:
    """Whether the character belongs to the one before it (combining marks, joiners, low surrogates)."""
    return character in _JOINERS or "\u0300" <= character <= "\u036f" or "\udc00" <= character <= "\udfff"


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    following = _lstrip(text, match.end(), len(text))
    if following == len(text) or text.count("\n", match.end(), following) > 1:
        return True
    head = text[following]
    if head.islower():
        return False
    if match.group() != ".":
        return True
    return not _abbreviates(text, start, match.start(), head)


def _abbreviates(text: str, start: int, stop: int, head: str) -> bool:
    """Whether the word before the full stop at `stop` is an abbreviation or an initial."""
    found = _LAST_WORD.search(text, max(start, stop - _LONGEST_ABBREVIATION), stop)
    word = found.group() if found else ""
    if not word:
        return False
    if _INITIALS.fullmatch(word) and (word[0].isupper() or "." in word):
        return word != "I"
    return word.lower() in _ABBREVIATIONS or (word.lower() in _BEFORE_NUMBERS and head.isdigit())


def _append(spans: list[Span], text: str, start: int, end: int) -> None:
    start = _lstrip(text, start, end)
    end = _rstrip(text, start, end)
    if start < end:
        spans.append((start, end))


def _lstrip(text: str, start: int, end: int) -> int:
    while start < end and text[start].isspace():
        start += 1
    return start


def _rstrip(text: str, start: int, end: int) -> int:
    while end > start and text[end - 1].isspace():
        end -= 1
    return end
