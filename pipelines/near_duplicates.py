"""Finds files that say what another file says in another format: `page.html` and `_sources/page.rst.txt`, a PDF of a Word file.

Compares files of one name, apart from the endings; `index.html` also has the name of its folder. A document is left out only if
the other document has most of its runs of three words and each of its numbers, so that no year and no price is lost.

    >>> NearDuplicates(["docs/page.html", "docs/_sources/page.rst.txt"]).original(document, "docs/_sources/page.rst.txt")
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from ragspec.core import Document
from ragspec.retrieval.reading.formats import ReaderInput, format_of, has_rows

_LEAST_SHARED = 0.7
"""Of 351 pages of three manuals and their reStructuredText, 323 share so much; most others are lists of links."""

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*\d(?!\w)")
_MARKUP = re.compile(r"<[^<>\n]*>|\w+://\S+|^[ \t]*(?:\.\. .*|:[\w-]+:.*)", re.MULTILINE)
"""Targets of links and the settings of directives, whose numbers a reader does not see."""


class _Content(NamedTuple):
    id: str
    suffix: str
    runs: frozenset[tuple[str, str, str]]
    numbers: frozenset[str]


class NearDuplicates:
    """The documents of one run that may have near-duplicates. Of two of them, the first stays."""

    def __init__(self, names: Iterable[str]) -> None:
        self._suffixes: dict[str, set[str]] = {}
        self._known: dict[str, list[_Content]] = {}
        for name in names:
            for key in _keys(name):
                self._suffixes.setdefault(key, set()).add(_suffix(name))

    def compares(self, name: str) -> bool:
        """Whether there is a file of that name in another format."""
        return not has_rows(name) and any(len(self._suffixes[key]) > 1 for key in _keys(name))

    def original(self, document: Document, name: str) -> str:
        """The id of an earlier document in another format that says what this one says; empty: there is none.

        Remembers the document. `name`: of its file.
        """
        if not self.compares(name):
            return ""
        keys = _keys(name)
        words = _WORD.findall(document.text.casefold())
        runs = frozenset(zip(words, words[1:], words[2:], strict=False))
        content = _Content(document.id, _suffix(name), runs, frozenset(_NUMBER.findall(document.text)))
        own_numbers = frozenset(_NUMBER.findall(_MARKUP.sub("", document.text)))
        for other in (other for key in keys for other in self._known.get(key, ())):
            shares = len(runs & other.runs) >= max(1, _LEAST_SHARED * len(runs))
            if shares and other.suffix != content.suffix and own_numbers <= other.numbers:
                return other.id
        for key in keys:
            self._known.setdefault(key, []).append(content)
        return ""


def is_source(name: str) -> bool:
    """Whether the file may be the source of a page: of two near-duplicates, the page as it is read is kept."""
    return format_of(name).reader_input is ReaderInput.TEXT


def _keys(name: str) -> set[str]:
    path = PurePosixPath(name.casefold())
    stem = path.name.partition(".")[0]
    return {stem, path.parent.name} if stem == "index" else {stem}


def _suffix(name: str) -> str:
    return PurePosixPath(name.casefold()).suffix
