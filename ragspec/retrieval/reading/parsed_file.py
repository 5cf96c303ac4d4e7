"""The result of parsing one file, and the functions that parsers share.

>>> builder = TextBuilder()
>>> builder.add("The mill", level=1)
>>> builder.build().headings
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.core import Heading
from ragspec.errors import InputError

MAX_BYTES = 512 * 1024**2
"""Limit for files that are parsed in memory (PDF, Word, web page), on disk or unpacked."""

_MAX_HEADING_CHARS = 200  # Why: every passage of a section carries its heading; longer titles are paragraphs
_CONTROL = re.compile(r"[\x01-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_HEAD_CHARS, _MOST_CONTROL = 4096, 0.05
_MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_UNWRITABLE = {0: " ", 0xAD: "", 0xFEFF: "", **dict.fromkeys(range(0xD800, 0xE000), "\ufffd")}


class ParsedFile(NamedTuple):
    """The text of one file. An empty `title` stands for the file's name."""

    text: str
    headings: tuple[Heading, ...] = ()
    title: str = ""
    metadata: Mapping[str, Any] = {}


class TextBuilder:
    """Joins blocks of text and records the offsets of headings."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._headings: list[Heading] = []
        self.num_chars = 0

    def add(self, block: str, level: int = 0, gap: str = "\n\n") -> None:
        """Append a block. `level` 0: no heading. `gap` separates the block from the previous block."""
        block = block.translate(_UNWRITABLE)
        if not block.strip():
            return
        if self._parts:
            self._put(gap)
        if level:
            self._headings += heading(self.num_chars, level, block)
        self._put(block)

    def build(self, title: str = "", metadata: Mapping[str, Any] | None = None) -> ParsedFile:
        return ParsedFile("".join(self._parts), tuple(self._headings), one_line(title), metadata or {})

    def _put(self, part: str) -> None:
        self._parts.append(part)
        self.num_chars += len(part)


def heading(start: int, level: int, text: str) -> list[Heading]:
    """A list of one heading, or an empty list if the text is empty or too long for a heading."""
    text = one_line(text)
    return [Heading(start, level, text)] if 0 < len(text) <= _MAX_HEADING_CHARS else []


def first_title(headings: tuple[Heading, ...]) -> str:
    """The first heading of the highest level, 1."""
    return next((heading.text for heading in headings if heading.level == 1), "")


def one_line(text: str) -> str:
    return " ".join(text.translate(_UNWRITABLE).split())


def numbered_lines(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """The offset and text of every line from `start` on."""
    for line in text[start:].split("\n"):
        yield start, line
        start += len(line) + 1


def encoding_of(path: Path) -> str:
    """The encoding by the byte order mark; UTF-8 without a mark."""
    with open(path, "rb") as file:
        head = file.read(4)
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), "utf-8-sig")


def read_text(path: Path) -> str:
    """The whole file; every kind of line end becomes "\\n". Raises: InputError for a file that holds no text."""
    try:
        text = path.read_text(encoding=encoding_of(path))
        head = text[:_HEAD_CHARS]
        if len(_CONTROL.findall(head)) > _MOST_CONTROL * len(head):
            raise InputError(f"{path} is no text, whatever its name says: it holds control characters")
        return text
    except UnicodeDecodeError as cause:
        raise InputError(f"{path} is not {encoding_name(cause)} text (byte {cause.start})") from cause


def encoding_name(cause: UnicodeDecodeError) -> str:
    return cause.encoding.upper().replace("_", "-")


def check_size(path: Path) -> None:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_BYTES:
        raise InputError(f"{path} has {num_bytes} bytes, more than the {MAX_BYTES} that are read at once")


@contextmanager
def silence_logger(logger_name: str) -> Iterator[None]:
    """Hides log messages and warnings of a library about malformed files; errors are exceptions.

    Logs and warnings belong to the process, so the block also hides those of other threads.
    """
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
