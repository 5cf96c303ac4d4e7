"""PDF files: the paragraphs of their pages, without layout, and the titles of the outline that the text holds.

>>> read_pdf(Path("manual.pdf")).headings
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from pypdf import PasswordType, PdfReader

from ragspec.core import Heading
from ragspec.errors import InputError
from ragspec.retrieval.reading.parsed_file import ParsedFile, TextBuilder, check_size, heading, one_line, silence_logger

_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})
_ITEM = re.compile(r"[-*•‣▪–—] |\(?\d{1,3}[.)] |\(?[a-z]\) |\d{1,3}(?:\.\d{1,3})+\.? (?=[^\W\d_a-z])")
"""An item of a list, or a numbered title."""

_COMPOUND = re.compile(r"[^\W\d_]+-[^\W\d_]+")
_PARTED = re.compile(r"([^\W\d_]+)[-\u00ad\u2010]\Z")
_WORD = re.compile(r"[^\W\d_]+")
_FULL_LINE = 0.6
"""Share of a long line's characters: a shorter line ends its paragraph."""
_NUMBER = r"(?:[\dA-Z][\dA-Z.]{0,9}\s+)?"
_MAX_LEVEL = 9


def read_pdf(path: Path) -> ParsedFile:
    check_size(path)
    with open(path, "rb") as file, silence_logger("pypdf"):
        reader = PdfReader(file)
        if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
            raise InputError(f"{path} cannot be read: it is locked by a password")
        pages = [_text(reader, number, path) for number in range(len(reader.pages))]
        title = str(reader.metadata.title or "") if reader.metadata else ""
        builder, starts = TextBuilder(), []
        hyphenated = hyphenated_words(pages)
        for page in pages:
            starts.append(builder.num_chars)
            for block in paragraphs_of(page, hyphenated):
                builder.add(block)
        found = builder.build(title, {"pages": len(pages)})
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
    """Titles of the outline that begin a block of their page. `starts`: where each page begins, then the end of the text."""
    found: dict[int, Heading] = {}
    try:
        for page, level, title in _outline(reader):
            words = r"\s+".join(map(re.escape, title.split()))
            match = re.compile(rf"^{_NUMBER}{words}(?!\w)", re.M | re.I).search(text, starts[page], starts[page + 1])
            if match:
                found |= {match.start(): entry for entry in heading(match.start(), level, title)}
    except MemoryError:
        raise
    except Exception:  # Why: a damaged outline leaves the text readable
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


def hyphenated_words(pages: Iterable[str]) -> Set[str]:
    """Words with a hyphen inside a line, in lower case."""
    return {found.group().lower() for page in pages for found in _COMPOUND.finditer(page)}


def paragraphs_of(page: str, hyphenated: Set[str]) -> list[str]:
    """The paragraphs of a page. Words split at a line's end are joined, and keep their hyphen if they are in `hyphenated`."""
    lines = [" ".join(line.translate(_LIGATURES).split()) for line in page.splitlines()]
    lengths = sorted(len(line) for line in lines if line)
    long_chars = lengths[len(lengths) * 4 // 5] if lengths else 0
    found: list[str] = []
    before = ""  # the line above; empty if the paragraph has ended
    for line in lines:
        if before and line and _continues_paragraph(before, line, long_chars):
            found[-1] = _joined(found[-1], line, hyphenated)
        elif line:
            found.append(line)
        before = line
    return found


def _continues_paragraph(before: str, line: str, long_chars: int) -> bool:
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
    """Whether the script puts no space between words: Chinese and Japanese, not Korean."""
    return unicodedata.east_asian_width(character) in "WF" and not "가" <= character <= "힣"
