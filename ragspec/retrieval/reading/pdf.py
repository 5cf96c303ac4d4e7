"""PDF files: the text of their pages, without layout; the outline's titles where they are found in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pypdf import PasswordType, PdfReader

from ragspec.core import Heading
from ragspec.errors import InputError
from ragspec.retrieval.reading.lines import compounds, paragraphs
from ragspec.retrieval.reading.parsed_file import ParsedFile, TextBuilder, check_size, heading, one_line, silence_logger

_NUMBER = r"(?:[\dA-Z][\dA-Z.]{0,9}\s+)?"
_MAX_LEVEL = 9


def read(path: Path) -> ParsedFile:
    check_size(path)
    with open(path, "rb") as file, silence_logger("pypdf"):
        reader = PdfReader(file)
        if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
            raise InputError(f"{path} cannot be read: it is locked by a password")
        pages = [_text(reader, number, path) for number in range(len(reader.pages))]
        title = str(reader.metadata.title or "") if reader.metadata else ""
        composer, starts = TextBuilder(), []
        hyphenated = compounds(pages)
        for page in pages:
            starts.append(composer.num_chars)
            for block in paragraphs(page, hyphenated):
                composer.add(block)
        found = composer.readable(title, {"pages": len(pages)})
        if not found.text:
            raise InputError(f"{path} cannot be read: its {len(pages)} pages hold no text (were they scanned?)")
        return found._replace(headings=_headings(reader, found.text, [*starts, len(found.text)]))


def _text(reader: PdfReader, number: int, path: Path) -> str:
    try:
        return reader.pages[number].extract_text()
    except MemoryError:
        raise
    except Exception as cause:  # Why: pypdf documents that a damaged file may raise anything
        raise InputError(f"{path}, page {number + 1} cannot be read: it is damaged ({cause})") from cause


def _headings(reader: PdfReader, text: str, starts: list[int]) -> tuple[Heading, ...]:
    """Titles of the outline that begin a block of the page they point to; `starts`: where each page begins, and the end."""
    found: dict[int, Heading] = {}
    try:
        for page, level, title in _outline(reader):
            words = r"\s+".join(map(re.escape, title.split()))
            match = re.compile(rf"^{_NUMBER}{words}(?!\w)", re.M | re.I).search(text, starts[page], starts[page + 1])
            if match:
                found |= {match.start(): entry for entry in heading(match.start(), level, title)}
    except MemoryError:
        raise
    except Exception:  # Why: the outline is an extra; a damaged one takes nothing from the text
        return ()
    return tuple(found[start] for start in sorted(found))


def _outline(reader: PdfReader) -> Iterator[tuple[int, int, str]]:
    """(page, level, title) of every entry that points to a page."""
    open_lists: list[Iterator[Any]] = [iter(reader.outline)]
    while open_lists:
        entry = next(open_lists[-1], None)
        if entry is None:
            open_lists.pop()
        elif isinstance(entry, list):
            open_lists.append(iter(entry))
        else:
            page, title = reader.get_destination_page_number(entry), one_line(str(entry.title or ""))
            if page is not None and page >= 0 and title:
                yield page, min(len(open_lists), _MAX_LEVEL), title
