"""PDF files: the paragraphs of their pages, without layout, page numbers and running titles; and their headings.

Headings are the titles of the outline that the text holds; without an outline, the short lines in larger letters.

>>> read_pdf(Path("manual.pdf")).headings
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
_LARGER = 1.12
"""A heading's letters, over those of most of the text."""
_TITLE_CHARS, _TITLE_LINES = 200, 4
"""More is no title, neither a heading nor a running one."""
_RUNNING_PAGES, _RUNNING_LINES = 3, 2
"""A running title is among that many first or last lines of that many pages, and of more than half of them."""
_PAGE_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")


_Form: TypeAlias = tuple[bool, str, int | None]
"""Whether at the end of a page, the text, and how far the number in it is from the page's."""


class _Line(NamedTuple):
    """`size`: of most of its letters, in points."""

    text: str
    size: float
    page: int


class _Block(NamedTuple):
    """A paragraph or a title. `size`: of a title's letters; 0.0 for a paragraph. `page`: where it begins."""

    text: str
    page: int
    size: float = 0.0
    num_lines: int = 1


def read_pdf(path: Path) -> ParsedFile:
    check_size(path)
    with open(path, "rb") as file, silence_logger("pypdf"):
        reader = PdfReader(file)
        if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
            raise InputError(f"{path} cannot be read: it is locked by a password")
        lines = [_lines(reader, number, path) for number in range(len(reader.pages))]
        title = str(reader.metadata.title or "") if reader.metadata else ""
        builder, starts = TextBuilder(), list[int]()
        sizes = Counter[float]()
        for line in itertools.chain.from_iterable(lines):
            sizes[line.size] += len(line.text)
        blocks = _blocks(_without_running_lines(lines), _LARGER * max(sizes, key=sizes.__getitem__, default=0.0))
        levels = {size: n for n, size in enumerate(sorted({each.size for each in blocks} - {0.0}, reverse=True), 1)}
        for block in blocks:
            starts += [builder.num_chars] * (block.page + 1 - len(starts))
            builder.add(block.text, min(levels.get(block.size, 0), _MAX_LEVEL))
        found = builder.build(title, {"pages": len(lines)})
        if not found.text:
            raise InputError(f"{path} cannot be read: its {len(lines)} pages hold no text (were they scanned?)")
        starts += [len(found.text)] * (len(lines) + 1 - len(starts))
        return found._replace(headings=_headings(reader, found.text, starts) or found.headings)


def _lines(reader: PdfReader, number: int, path: Path) -> list[_Line]:
    parts: list[tuple[str, float]] = []

    def visit(text: str, page: Sequence[float], place: Sequence[float], _: Any, size: float) -> None:
        a, b = place[2:4]  # where one unit up leads, in the text's space and then on the page
        parts.append((text, round(size * math.hypot(a * page[0] + b * page[2], a * page[1] + b * page[3]), 1)))

    try:
        reader.pages[number].extract_text(visitor_text=visit)
    except MemoryError:
        raise
    except Exception as cause:  # Why: pypdf documents that a damaged file may raise anything
        raise InputError(f"{path}, page {number + 1} cannot be read: it is damaged ({cause})") from cause
    found, line, sizes = list[_Line](), "", Counter[float]()
    for text, size in [*parts, ("\n", 0.0)]:
        for part in re.split(r"(?<=[\n\r\f\v])", text):
            line += part
            sizes[size] += len(part.strip())
            if part[-1:] in tuple("\n\r\f\v"):
                found.append(
                    _Line(" ".join(line.translate(_LIGATURES).split()), max(sizes, key=sizes.__getitem__), number)
                )
                line, sizes = "", Counter()
    while found and not found[-1].text:
        found.pop()
    return found


def _without_running_lines(pages: Sequence[Sequence[_Line]]) -> list[list[_Line]]:
    """The pages without their numbers, headers and footers. A page that holds nothing else keeps them."""
    edges = [_edges([line for line in page if line.text]) for page in pages]
    counts = Counter(form for page in edges for form in {form for _, forms in page for form in forms})
    least = max(_RUNNING_PAGES, sum(map(bool, edges)) // 2 + 1)
    found = list[list[_Line]]()
    for page, edge in zip(pages, edges, strict=True):
        running = {id(line) for line, forms in edge if any(counts[form] >= least for form in forms)}
        rest = [line for line in page if id(line) not in running]
        found.append(rest if any(line.text for line in rest) else list(page))
    return found


def _edges(page: Sequence[_Line]) -> list[tuple[_Line, set[_Form]]]:
    """The first and last lines of a page, each as it is and without each of its numbers: other pages repeat one of these
    forms if the line is a running title."""
    edges = [(False, line) for line in page[:_RUNNING_LINES]] + [(True, line) for line in page[-_RUNNING_LINES:]]
    found = list[tuple[_Line, set[_Form]]]()
    for is_last, line in edges:
        if len(line.text) <= _TITLE_CHARS:
            numbers = [(*number.span(), int(number.group())) for number in _PAGE_NUMBER.finditer(line.text)]
            numbered = {(is_last, f"{line.text[:a]}#{line.text[b:]}", value - line.page) for a, b, value in numbers}
            found.append((line, {(is_last, line.text, None), *numbered}))
    return found


def _blocks(pages: Sequence[Sequence[_Line]], least_title: float) -> list[_Block]:
    """Paragraphs and titles. A sentence may go on on the next page."""
    hyphenated = _hyphenated_words(line.text for page in pages for line in page)
    found, before = list[_Block](), None  # the line above; None if the paragraph has ended
    for page in pages:
        lengths = sorted(len(line.text) for line in page if line.text)
        long_chars = lengths[len(lengths) * 4 // 5] if lengths else 0
        for line in page:
            if not line.text:
                before = before if before and before.page < line.page else None
                continue
            title_size = line.size if line.size >= least_title > 0 else 0.0
            if before and found[-1].size == title_size and _continues_paragraph(before, line, long_chars):
                text = _joined(found[-1].text, line.text, hyphenated)
                found[-1] = found[-1]._replace(text=text, num_lines=found[-1].num_lines + 1)
            else:
                found.append(_Block(line.text, line.page, title_size))
            before = line
    return [block if _is_short(block) else block._replace(size=0.0) for block in found]


def _is_short(block: _Block) -> bool:
    return len(block.text) <= _TITLE_CHARS and block.num_lines <= _TITLE_LINES


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


def _hyphenated_words(lines: Iterable[str]) -> Set[str]:
    """Words with a hyphen inside a line, in lower case."""
    return {found.group().lower() for line in lines for found in _COMPOUND.finditer(line)}


def _continues_paragraph(before: _Line, line: _Line, long_chars: int) -> bool:
    if _ITEM.match(line.text):
        return False
    goes_on = line.text[0].islower() or _PARTED.search(before.text) is not None
    if before.page < line.page:
        return goes_on and before.text[-1] not in ".!?:;"
    return goes_on or len(before.text) >= _FULL_LINE * long_chars


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
