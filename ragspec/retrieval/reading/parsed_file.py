"""The result of parsing a file: its text, the blocks of the text, and the parts that were not read.

Decodes text files, and measures whether a text reads as language or as garbage.

>>> builder = TextBuilder()
>>> builder.add("The mill", level=1)
>>> builder.build().blocks
"""

import codecs
import itertools
import logging
import re
import unicodedata
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from ragspec.core import Block, BlockKind, Heading
from ragspec.errors import InputError

MAX_BYTES = 512 * 1024**2
"""Limit for files that are parsed in memory (PDF, Word, web page), on disk or unpacked."""

_MAX_HEADING_CHARS = 200  # Why: every passage of a section carries its heading; longer titles are paragraphs
_RELEASE = re.compile(
    r"(?i)(?:\w+ )?[\[(]?v?\d+(?:\.\d+)+[\w.+-]*[\])]?(?:\s*[-–—:/(,\[][^\n]*\d{2}[^\n]*)?|(?:\w+ )?[\[(]?unreleased[\])]?"
)
"""The heading of a release in a list of changes, "1.11.0 (2022-03-14)"."""
_CONTROL = re.compile(r"[\x01-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_HEAD_CHARS, _MOST_CONTROL = 4096, 0.05

WINDOWS = "cp1252"
_PART_BYTES = 2**20
_LETTER = re.compile(rb"[A-Za-z]")
_ACCENTS = re.compile(rb"[\x8a\x8c\x8e\x9a\x9c\x9e\x9f\xc0-\xff]+")
_UTF8_ACCENT = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}")
_UNDEFINED = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_MOST_ACCENTS = 0.25
"""Largest share of letters beyond ASCII in a text of windows-1252. Texts in Cyrillic or Greek have more."""

_MARKS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_UNWRITABLE = {
    0: " ",
    0xFEFF: "",
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
    **{code: bytes([code]).decode("cp1252", "ignore") for code in range(0x80, 0xA0)},
}
"""Characters that a text cannot hold. Why windows-1252: browsers read `&#128;` as the euro sign."""

MAX_COLUMNS = 1000
"""Browsers have the same limit."""

REPEATED_CHARS = 200
"""A cell over several rows is repeated in each of them, unless it is longer."""

_MOST_FILLED, _MAX_FILLED = 20, 5000
"""Cells that stand for spans: so many for each cell of the table, and so many more."""


MOST_GARBAGE = 0.4
_WORD = re.compile(r"[^\W\d_]{3,}")
_MAX_LETTERS = 24
_LEAST_LETTERS = 60
"""A text of fewer letters counts as one of so many: a single odd word makes no garbage."""

_MOST_UNKNOWN = 0.25
_FOLLOWERS = (
    "abcdefghijklmnopqrstuvwyz abegilorsuy acehijklorstuyz abdefiklnorstuvwyz "
    "abcdefghijklmnoprstuvwxyz adefilorstu adeghilnorstu aeilmnorstuwy abcdefgijklmnopqrstuvwz "
    "acdefkmnosu aeiklnorstuvwy abcdeghijklmnopstuvy abdeilmnopstuy abcdefghiklnoprstuvwyz "
    "abcdefghijklmnopqrstuvwyz aefhiloprstu u abcdefghiklmnoprstuvwyz abcdefghijklmnoprstuvwyz "
    "abceghijklnorstuvwyz abcdefghijklmnoprstuvwz aeilnorsv acehiknosuy aceiopt abcdegjklmnprstwz "
    "abcdegiklmnotuwyz "
).split()
"""For each letter from a to z: the letters that often follow it in the words of one of ten European languages.

Of their words at most 1.1 % have more unknown pairs than a quarter; of the same words with shifted letters 68 % to 87 %.
"""

_KNOWN = frozenset(
    first + second for first, seconds in zip(ascii_lowercase, _FOLLOWERS, strict=True) for second in seconds
)
_UNREADABLE = frozenset({"Cc", "Co", "Cn"})


class Unread(NamedTuple):
    """A part of a file that was not read. `place`: a page, a line, or empty for the whole file. `page`: a page that text
    recognition could read, or 0. `is_doubled`: a row with the id of an earlier one."""

    place: str
    reason: str
    page: int = 0
    is_doubled: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason


class ParsedFile(NamedTuple):
    """The text of one file. An empty `title` stands for the file's name."""

    text: str
    headings: tuple[Heading, ...] = ()
    title: str = ""
    metadata: Mapping[str, Any] = {}
    blocks: tuple[Block, ...] = ()
    unread: tuple[Unread, ...] = ()


class Cell(NamedTuple):
    """A cell of a table, over `columns` columns and `rows` rows."""

    text: str
    columns: int = 1
    rows: int = 1


_NO_CELL = Cell("", rows=0)


class TextBuilder:
    """Joins blocks of text and records their spans and the headings among them."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.headings: list[Heading] = []
        self._blocks: list[Block] = []
        self.num_chars = 0

    def add(
        self,
        text: str,
        level: int = 0,
        gap: str = "\n\n",
        kind: BlockKind = BlockKind.PARAGRAPH,
        page: int = 0,
        joins: bool = False,
        title: str = "",
        anchor: str = "",
    ) -> None:
        """Append a block. `gap` separates it from the previous block; `joins`: it becomes a line of that block.

        `level` 0: no heading. `title`: the heading, if the text holds markup; `anchor`: of the heading.
        """
        if not text.isascii() or "\0" in text:
            text = text.translate(_UNWRITABLE)
        if not text.strip():
            return
        joins = joins and bool(self._blocks)
        self.skip("\n" if joins else gap if self._parts else "")
        found = heading(self.num_chars, level, title or text, anchor) if level else []
        self.headings += found
        start = self.num_chars
        self.skip(text)
        block = Block(start, self.num_chars, BlockKind.HEADING if found else kind, page)
        self._blocks.append(self._blocks.pop()._replace(end=block.end) if joins else block)

    def skip(self, text: str) -> None:
        """Append text that belongs to no block."""
        if text:
            self._parts.append(text)
            self.num_chars += len(text)

    def append(self, parsed: ParsedFile) -> None:
        """Append the blocks of another text."""
        if parsed.text.strip():
            self.skip("\n\n" if self._parts else "")
            start = self.num_chars
            self.headings += [each._replace(start=each.start + start) for each in parsed.headings]
            self._blocks += [each._replace(start=each.start + start, end=each.end + start) for each in parsed.blocks]
            self.skip(parsed.text)

    def build(
        self, title: str = "", metadata: Mapping[str, Any] | None = None, unread: Sequence[Unread] = ()
    ) -> ParsedFile:
        headings = tuple(self.headings)
        title = one_line(title) or first_title(headings)
        return ParsedFile("".join(self._parts), headings, title, metadata or {}, tuple(self._blocks), tuple(unread))


class Table:
    """Writes the rows of one table as lines, each cell in its column. A cell over several rows is repeated in each of them."""

    def __init__(self, builder: TextBuilder) -> None:
        self._builder = builder
        self._above: list[Cell] = []  # for each column: the cell of the row above, and how many more rows it spans
        self._num_cells = self._num_filled = 0
        self._is_first = True

    def add(self, cells: Sequence[Cell], is_header: bool = False) -> None:
        """Append a row. `is_header`: a rule follows the row if it is the first.

        Raises: InputError if most of the table is the repetition of cells.
        """
        columns: list[Cell] = []
        rest = list(reversed(cells))
        num_spanned = max((number for number, cell in enumerate(self._above, 1) if cell.rows), default=0)
        while rest or len(columns) < num_spanned:
            above = self._above[len(columns)] if len(columns) < len(self._above) else _NO_CELL
            if above.rows:
                columns.append(above)
            elif rest:
                cell = rest.pop()
                width = max(1, min(cell.columns, MAX_COLUMNS - len(columns)))
                columns += [cell, *[cell._replace(text="")] * (width - 1)]
            else:
                columns.append(_NO_CELL)
        self._num_cells += len(cells)
        self._num_filled += len(columns) - len(cells)
        if self._num_filled > _MOST_FILLED * self._num_cells + _MAX_FILLED:
            raise InputError("it cannot be read: the cells of a table span too many rows and columns")
        if any(cell.text for cell in cells):
            rule = f"\n|{'---|' * len(columns)}" if is_header and self._is_first else ""
            line = f"| {' | '.join(cell.text for cell in columns)} |{rule}"
            self._builder.add(line, kind=BlockKind.TABLE, joins=not self._is_first)
            self._is_first = False
        self._above = [
            cell._replace(rows=max(0, cell.rows - 1), text=cell.text if len(cell.text) <= REPEATED_CHARS else "")
            for cell in columns
        ]

    def end_spans(self) -> None:
        """No cell of the rows above spans a row from here on."""
        self._above = []


def heading(start: int, level: int, text: str, anchor: str = "") -> list[Heading]:
    """A list of one heading, or an empty list if the text is empty or too long for a heading."""
    text = one_line(text)
    return [Heading(start, level, text, one_line(anchor))] if 0 < len(text) <= _MAX_HEADING_CHARS else []


def first_title(headings: Sequence[Heading]) -> str:
    """The first heading of the highest level, 1; none where it is one of several releases, and would name the changes of all."""
    first = next((heading.text for heading in headings if heading.level == 1), "")
    if _RELEASE.fullmatch(first) and sum(_RELEASE.fullmatch(heading.text) is not None for heading in headings) > 1:
        return ""
    return first


def one_line(text: str) -> str:
    return " ".join(text.split() if text.isascii() and "\0" not in text else text.translate(_UNWRITABLE).split())


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The offset and text of every line."""
    start = 0
    for line in text.split("\n"):
        yield start, line
        start += len(line) + 1


def garbage_share(text: str) -> float:
    """The larger of two shares: of letters in implausible words, and of control, private-use and replacement characters."""
    characters = [character for character in text if not character.isspace()]
    num_unreadable = sum(each == "\ufffd" or unicodedata.category(each) in _UNREADABLE for each in characters)
    words = _WORD.findall(text)
    num_implausible = sum(len(word) for word in words if _is_implausible(word))
    num_letters = max(_LEAST_LETTERS, sum(map(len, words)))
    return max(num_unreadable / max(1, len(characters)), num_implausible / num_letters)


def _is_implausible(word: str) -> bool:
    """Too long, or too many unknown pairs of letters. Words of other scripts than Latin have no pairs."""
    letters = [each for each in unicodedata.normalize("NFKD", word.lower()) if "a" <= each <= "z"]
    if len(letters) < len(word) / 2:
        return False
    pairs = ["".join(pair) for pair in itertools.pairwise(letters)]
    num_unknown = sum(pair not in _KNOWN for pair in pairs)
    return len(letters) > _MAX_LETTERS or num_unknown > _MOST_UNKNOWN * len(pairs)


def encoding_of(path: Path) -> str:
    """The encoding by the byte order mark; without a mark, UTF-8, or windows-1252 if the text is only plausible as such."""
    with open(path, "rb") as file:
        part = file.read(_PART_BYTES)
        marked = encoding_mark(part)
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while part and not marked:
                decoder.decode(part)
                part = file.read(_PART_BYTES)
        except UnicodeDecodeError:
            return WINDOWS if _is_windows_text(part) else "utf-8-sig"
    return marked or "utf-8-sig"


def encoding_mark(raw: bytes) -> str:
    """The encoding that a byte order mark names, or empty."""
    return next((encoding for mark, encoding in _MARKS if raw.startswith(mark)), "")


def python_encoding(name: str) -> str:
    """Python's name of an encoding; empty for an unknown one."""
    try:
        return codecs.lookup(name).name
    except LookupError:
        return ""


def decoded(raw: bytes, encodings: Iterable[str]) -> str:
    """The text by the first of these encodings that fits, or else by windows-1252. An empty name is passed over."""
    for encoding in filter(None, encodings):
        with suppress(UnicodeDecodeError, LookupError):
            return raw.decode(encoding)
    return raw.decode(WINDOWS, "replace")


def _is_windows_text(raw: bytes) -> bool:
    num_accents = sum(map(len, _ACCENTS.findall(raw)))
    num_utf8 = sum(map(len, _UTF8_ACCENT.findall(raw)))
    num_letters = len(_LETTER.findall(raw)) + num_accents
    return not _UNDEFINED.search(raw) and num_accents <= _MOST_ACCENTS * num_letters and num_utf8 <= num_accents / 2


def read_text(path: Path) -> str:
    """The whole file; every kind of line end becomes "\\n". Raises: InputError for a file that holds no text."""
    try:
        text = path.read_text(encoding=encoding_of(path))
    except UnicodeDecodeError as cause:
        raise InputError(f"{path} is not {encoding_name(cause)} text (byte {cause.start})") from cause
    head = text[:_HEAD_CHARS]
    if len(_CONTROL.findall(head)) > _MOST_CONTROL * len(head):
        raise InputError(f"{path} is no text, whatever its name says: it holds control characters")
    return text


def encoding_name(cause: UnicodeDecodeError) -> str:
    return cause.encoding.upper().replace("_", "-")


def check_size(path: Path) -> None:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_BYTES:
        raise InputError(f"{path} has {num_bytes} bytes, more than the {MAX_BYTES} that are read at once")


def check_archive(path: Path, max_xml_bytes: int = 128 * 1024**2) -> None:
    """`max_xml_bytes`: of one XML part; its tree takes about ten times as much memory.

    Raises: InputError if the file is no archive, or too large to unpack in memory.
    """
    check_size(path)
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
    except zipfile.BadZipFile as cause:
        raise InputError(f"{path} is no {path.suffix} file, or it is damaged or locked by a password") from cause
    num_bytes = sum(part.file_size for part in parts)
    largest_xml = max((part.file_size for part in parts if part.filename.endswith((".xml", ".rels"))), default=0)
    if num_bytes > MAX_BYTES or largest_xml > max_xml_bytes:
        raise InputError(f"{path} unpacks to {num_bytes} bytes, more than is read at once")


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
