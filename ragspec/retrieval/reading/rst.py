"""Titles of reStructuredText: underlined or framed lines, whose levels follow the order in which their styles first appear."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragspec.core import Heading
from ragspec.retrieval.reading.parsed_file import ParsedFile, first_title, heading, numbered_lines

_RULE = re.compile(r"([!-/:-@\[-`{-~])\1*")
_ROLE = re.compile(r"(?::[\w.+-]+)*:(?=`)")
_MARKS = re.compile(r"\*\*|`+|[ \t]<[^<>]*>(?=`)")
_SURE_RULE = 4
"""An underline of this length makes a title even if it is too short for it."""


def readable(text: str) -> ParsedFile:
    headings = tuple(_headings(text))
    return ParsedFile(text, headings, first_title(headings))


def _headings(text: str) -> Iterator[Heading]:
    lines = list(numbered_lines(text))
    levels: dict[tuple[str, bool], int] = {}
    last = -1  # the underline of the title before
    for number in range(1, len(lines)):
        rule = _rule(lines[number][1])
        title = lines[number - 1][1].rstrip()
        if not rule or not title or _rule(title) or len(rule) < min(len(title.strip()), _SURE_RULE):
            continue
        above = lines[number - 2][1].rstrip() if number > 1 else ""
        framed = number - 2 > last and above == rule
        if not framed and (above or title[0].isspace() or title.startswith(".. ")):
            continue
        start = lines[number - 2 if framed else number - 1][0]
        yield from heading(start, levels.setdefault((rule[0], framed), len(levels) + 1), _plain(title))
        last = number


def _rule(line: str) -> str:
    line = line.rstrip()
    return line if _RULE.fullmatch(line) else ""


def _plain(title: str) -> str:
    return _MARKS.sub("", _ROLE.sub("", title)) if len(title) < 1000 else title
