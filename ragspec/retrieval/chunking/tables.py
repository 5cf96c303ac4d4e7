"""Tables in a text: where they stand, and the names of their columns. Knows no document and no passage.

Reads tables of Markdown, which web pages and Word files become too, and the two kinds of reStructuredText.

    >>> list(tables("| Part | Weight |\\n|---|---|\\n| Disk | 5 kg |\\n"))
    [(0, 43, 'Part | Weight')]
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Why possessive: a file may be made to stall its reader, and no run of signs is then read in two ways.
_BAR_ROW = r"[^\n|]*+\|[^\n]*+\n"
_MARKDOWN = re.compile(
    rf"^(?P<header>{_BAR_ROW})[ \t]*+\|?[ \t]*+:?-{{2,}}+:?[ \t]*+(?:\|[ \t]*+(?::?-{{2,}}+:?[ \t]*+)?)++\n"
    rf"(?:{_BAR_ROW})*+(?:[ \t]*+\|[^\n]*+\Z)?",
    re.MULTILINE,
)
_GRID = re.compile(
    r"^[ \t]*+\+(?:-++\+)++[ \t]*+\n(?P<header>(?:[ \t]*+\|[^\n]*+\n){1,4}+)[ \t]*+\+(?:=++\+)++[ \t]*+\n"
    r"(?:[ \t]*+[|+][^\n]*+(?:\n|\Z))*+",
    re.MULTILINE,
)
# A table that nothing closes ends at the next rule, whichever that is.
_SIMPLE = re.compile(
    r"^(?P<rule>[ \t]*+=++(?: ++=++)++)[ \t]*+\n(?P<header>(?:[^\n=][^\n]*+\n){1,4}?)(?P=rule)[ \t]*+\n"
    r"(?:(?![ \t]*+=++ ++=)[^\n]*+\n)*+(?P=rule)[ \t]*+(?:\n|\Z)",
    re.MULTILINE,
)
_MARKUP = re.compile(r"\*\*|`+")


def tables(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, str]]:
    """Start, end and header of every table with a header, in order; of overlapping ones the first."""
    end = len(text) if end is None else end
    found = [match for kind in (_MARKDOWN, _GRID, _SIMPLE) for match in kind.finditer(text, start, end)]
    for match in sorted(found, key=lambda each: each.start()):
        if match.start() < start:
            continue
        start = match.end()
        yield match.start(), start, _header(match)


def _header(match: re.Match[str]) -> str:
    """The names of the columns, on one line."""
    lines = match["header"].splitlines()
    if match.re is _SIMPLE:
        columns = [found.span() for found in re.finditer("=+", match["rule"])]
        columns[-1] = (columns[-1][0], max(map(len, lines)))
        cells = [[line[first:last] for first, last in columns] for line in lines]
    else:
        cells = [line.strip().removeprefix("|").removesuffix("|").split("|") for line in lines]
    names = [" ".join(" ".join(column).split()) for column in zip(*cells, strict=False)]
    return _MARKUP.sub("", " | ".join(filter(None, names)))
