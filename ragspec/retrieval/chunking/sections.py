"""Sections of a document: from one title to the next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ragspec.core import Document
from ragspec.retrieval.chunking.sentence_boundaries import Span, lstrip, sentences

_TITLE_LINES = re.compile(r"(?:([^\w\s])\1{2,}[ \t]*\n)?[^\n]*(?:\n([^\w\s])\2{2,}[ \t]*(?=\n|\Z))?")
"""A title's line, with the lines of signs above and below it."""


class Section(NamedTuple):
    """`path`: titles from the highest level down. `borders`: where a sentence ends whatever stands there; first and last are the
    section's own."""

    path: tuple[str, ...]
    borders: list[int]

    def sentences(self, text: str) -> list[Span]:
        regions = zip(self.borders, self.borders[1:], strict=False)
        return [span for start, end in regions for span in sentences(text, start, end)]


def sections(document: Document) -> Iterator[Section]:
    """In order, covering the whole text. A title right above one of a lower level opens that one's section."""
    text, path, borders = document.text, list[tuple[int, str]](), [0]
    headings = sorted(heading for heading in document.headings if heading.start < len(text))
    starts = [max(0, heading.start) for heading in headings] + [len(text)]
    is_bare = _is_blank(text, 0, starts[0])
    for (_, level, title), start, end in zip(headings, starts, starts[1:], strict=False):
        if is_bare and (not path or level > path[-1][0]):
            borders.append(start)
        else:
            yield Section(tuple(above for _, above in path), [*borders, start])
            borders = [start]
        while path and path[-1][0] >= level:
            path.pop()
        path.append((level, title))
        found = _TITLE_LINES.match(text, start, end)
        borders.append(found.end() if found else start)
        is_bare = _is_blank(text, borders[-1], end)
    yield Section(tuple(above for _, above in path), [*borders, len(text)])


def _is_blank(text: str, start: int, end: int) -> bool:
    return lstrip(text, start, end) == end
