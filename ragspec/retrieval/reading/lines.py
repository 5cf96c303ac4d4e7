"""Paragraphs from the lines of a printed page: words parted at a line's end and sentences over several lines are whole again."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Set

_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})
_ITEM = re.compile(
    r"[-*•‣▪–—] |\(?\d{1,3}[.)] |\(?[a-z]\) |\d{1,3}(?:\.\d{1,3})+\.? (?=[^\W\d_a-z])"
)  # or a numbered title
_COMPOUND = re.compile(r"[^\W\d_]+-[^\W\d_]+")
_PARTED = re.compile(r"([^\W\d_]+)[-\u00ad\u2010]\Z")
_WORD = re.compile(r"[^\W\d_]+")
_FULL_LINE = 0.6
"""Of the page's long lines: a shorter one ends its paragraph."""


def compounds(pages: Iterable[str]) -> Set[str]:
    """Words that are written with a hyphen inside a line, in lower case."""
    return {found.group().lower() for page in pages for found in _COMPOUND.finditer(page)}


def paragraphs(page: str, hyphenated: Set[str]) -> list[str]:
    """`hyphenated`: words that keep their hyphen where a line ends in it."""
    lines = [" ".join(line.translate(_LIGATURES).split()) for line in page.splitlines()]
    lengths = sorted(len(line) for line in lines if line)
    long_chars = lengths[len(lengths) * 4 // 5] if lengths else 0
    found: list[str] = []
    before = ""  # the line above, if the next one may go on with it
    for line in lines:
        if before and line and _goes_on(before, line, long_chars):
            found[-1] = _joined(found[-1], line, hyphenated)
        elif line:
            found.append(line)
        before = line
    return found


def _goes_on(before: str, line: str, long_chars: int) -> bool:
    if _ITEM.match(line):
        return False
    return line[0].islower() or _PARTED.search(before) is not None or len(before) >= _FULL_LINE * long_chars


def _joined(block: str, line: str, hyphenated: Set[str]) -> str:
    parted, rest = _PARTED.search(block[-80:]), _WORD.match(line)
    if parted and rest and line[0].islower():
        keeps = f"{parted[1]}-{rest.group()}".lower() in hyphenated
        return block + line if keeps else block[:-1] + line
    if _is_wide(block[-1]) and _is_wide(line[0]):
        return block + line
    return f"{block} {line}"


def _is_wide(character: str) -> bool:
    """Chinese and Japanese put no space between words."""
    return unicodedata.east_asian_width(character) in "WF" and not "가" <= character <= "힣"
