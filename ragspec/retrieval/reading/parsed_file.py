"""What every reader of one document gives, and what most of them share."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.core import Heading
from ragspec.errors import InputError

MAX_BYTES = 512 * 1024**2
"""Of a file that is taken apart in memory (PDF, Word, web page), on disk or unpacked."""

_MAX_HEADING_CHARS = 200  # Why: every passage of its section carries it; what is longer is a paragraph
_MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_UNWRITABLE = {0: " ", 0xAD: "", 0xFEFF: "", **dict.fromkeys(range(0xD800, 0xE000), "\ufffd")}


class ParsedFile(NamedTuple):
    """The text of one file. An empty `title` means: call it by the file's name."""

    text: str
    headings: tuple[Heading, ...] = ()
    title: str = ""
    metadata: Mapping[str, Any] = {}


class TextBuilder:
    """Puts blocks one after the other and remembers where those stand that are titles."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._headings: list[Heading] = []
        self.num_chars = 0

    def add(self, block: str, level: int = 0, gap: str = "\n\n") -> None:
        """`level` 0 is no title. `gap` stands between this block and the one before."""
        block = block.translate(_UNWRITABLE)
        if not block.strip():
            return
        if self._parts:
            self._put(gap)
        if level:
            self._headings += heading(self.num_chars, level, block)
        self._put(block)

    def readable(self, title: str = "", metadata: Mapping[str, Any] | None = None) -> ParsedFile:
        return ParsedFile("".join(self._parts), tuple(self._headings), one_line(title), metadata or {})

    def _put(self, part: str) -> None:
        self._parts.append(part)
        self.num_chars += len(part)


def heading(start: int, level: int, text: str) -> list[Heading]:
    """One heading, or none where the text is empty or too long for one."""
    text = one_line(text)
    return [Heading(start, level, text)] if 0 < len(text) <= _MAX_HEADING_CHARS else []


def first_title(headings: tuple[Heading, ...]) -> str:
    """The first heading of the highest level, 1."""
    return next((heading.text for heading in headings if heading.level == 1), "")


def one_line(text: str) -> str:
    return " ".join(text.translate(_UNWRITABLE).split())


def numbered_lines(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Every line from `start` on, after the character it begins with."""
    for line in text[start:].split("\n"):
        yield start, line
        start += len(line) + 1


def encoding_of(path: Path) -> str:
    """By the byte order mark; UTF-8 without one."""
    with open(path, "rb") as file:
        head = file.read(4)
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), "utf-8-sig")


def read_text(path: Path) -> str:
    """The whole file; every kind of line end becomes "\\n"."""
    try:
        return path.read_text(encoding=encoding_of(path))
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
    """Keeps a library's remarks about odd files from the terminal; what matters arrives as an exception.

    Logs and warnings belong to the process: those of other threads are kept back as well while it lasts.
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
