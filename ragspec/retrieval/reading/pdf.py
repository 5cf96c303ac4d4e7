"""PDF files: the paragraphs of their pages, without layout, page numbers and running titles; and their headings.

PDFium reads the pages, values of forms included; pypdf tries a page again whose text is garbage. Headings are the titles of the
outline that the text holds; without an outline, the short lines in larger letters.

>>> read_pdf(Path("manual.pdf")).headings
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pypdfium2
from pypdf import PdfReader
from pypdfium2 import raw as pdfium

from ragspec.core import BlockKind, Heading
from ragspec.errors import InputError
from ragspec.retrieval.reading.inline import scripted
from ragspec.retrieval.reading.parsed_file import (
    MOST_GARBAGE,
    ParsedFile,
    TextBuilder,
    Unread,
    check_size,
    garbage_share,
    heading,
    one_line,
    silence_logger,
)

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
_SCRIPT_SIZE, _FAR_SCRIPT_SIZE = 0.85, 0.95
"""Superscripts and subscripts are smaller than that share of the letters to their left; those far off the line, than that."""
_SCRIPT_SIGNS = frozenset("0123456789+-−–")
_WORD_GAP = 0.15
"""Between words, in heights of the line."""
_SAME_LINE, _OFF_LINE, _FAR_OFF_LINE = 0.5, 0.08, 0.25
"""Distances of baselines, in sizes of letters."""
_PARAGRAPH_GAP = 1.4
"""Usual distances of lines on the page. A paragraph ends before a larger gap."""

_FEW_LINES, _FAR = 3, 3.0
"""On a page of so few lines, a paragraph ends before a gap of more sizes of letters."""
_MOST_UNMAPPED = 0.2
_MOST_GARBAGE_UNMAPPED = 0.1
"""Of a page whose fonts do not name most characters: TeX's old fonts number them as ASCII does, other fonts do not."""

_OT1 = dict(enumerate(("ff", "fi", "fl", "ffi", "ffl"), 11))
_T1 = dict(enumerate(_OT1.values(), 27)) | {16: "“", 17: "”", 18: "„", 21: "–", 22: "—", 127: "-", 255: "ß"}
"""Characters of TeX's encodings by their numbers, in fonts that do not name them."""

_SAMPLED_CHARS = 200
_NO_TITLE = re.compile(r"\W*(?:untitled(?: document)?|no title)\W*", re.IGNORECASE)
_HINT = "`ocrmypdf` reads it (`index add --ocr`)"
_LINE_HYPHENS = (2, 0xFFFE)  # PDFium's signs for a hyphen at the end of a line
_PAGE_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")


_Form: TypeAlias = tuple[bool, str, int | None]
"""Whether at the end of a page, the text, and how far the number in it is from the page's."""


class _Line(NamedTuple):
    """A line, or a paragraph or title of `num_lines` lines that begins on `page`.

    `size`: of most of its letters, in points; 0.0 for a paragraph.
    """

    text: str
    size: float
    page: int
    num_lines: int = 1


class _PlacedLine(NamedTuple):
    """A line on its page. `x`, `y`: where it begins; `size`: of most of its letters; in points.

    `turn`: 1.0 if it runs up the page, -1.0 if it runs down, else 0.0. `last`: the place of its last visible character.
    """

    text: str
    size: float
    x: float
    y: float
    turn: float
    last: int


def read_pdf(path: Path) -> ParsedFile:
    check_size(path)
    with _opened(path) as document:
        if document.get_formtype():
            document.init_forms()
        unread: list[Unread] = []
        second = _SecondReader(path)
        lines = [_readable_lines(document, number, second, unread) for number in range(len(document))]
        builder, starts = TextBuilder(), list[int]()
        sizes = Counter[float]()
        for line in itertools.chain.from_iterable(lines):
            sizes[line.size] += len(line.text)
        blocks = _blocks(_without_running_lines(lines), _LARGER * max(sizes, key=sizes.__getitem__, default=0.0))
        levels = {size: n for n, size in enumerate(sorted({each.size for each in blocks} - {0.0}, reverse=True), 1)}
        for block in blocks:
            starts += [builder.num_chars] * (block.page + 1 - len(starts))
            kind = BlockKind.LIST_ITEM if _ITEM.match(block.text) else BlockKind.PARAGRAPH
            builder.add(block.text, min(levels.get(block.size, 0), _MAX_LEVEL), kind=kind, page=block.page + 1)
        title = document.get_metadata_value("Title")
        title = "" if _NO_TITLE.fullmatch(title) else title
        if not builder.num_chars:
            unread.insert(0, Unread("", f"its {len(lines)} pages hold no text"))
        found = builder.build(title, {"pages": len(lines)}, unread)
        starts += [len(found.text)] * (len(lines) + 1 - len(starts))
        headings = _headings(document, found.text, starts) or found.headings
        return found._replace(headings=headings, title=one_line(title))


def _opened(path: Path) -> pypdfium2.PdfDocument:
    try:
        return pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as cause:
        if "password" in str(cause).lower():
            raise InputError(f"{path} cannot be read: it is locked by a password") from cause
        raise


def _readable_lines(
    document: pypdfium2.PdfDocument, number: int, second: _SecondReader, unread: list[Unread]
) -> list[_Line]:
    """The lines of a page. A page without them, or whose lines are garbage in both readers, is named in `unread`."""
    page = _upright_page(document, number)
    if pdfium.FPDFPage_GetAnnotCount(page):  # values of forms, and notes, become text of the page
        num_chars = page.get_textpage().count_chars()
        pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY)
        page = _upright_page(document, number)
        lines, is_mapped = _lines(page, number, num_chars)
    else:
        lines, is_mapped = _lines(page, number)
    place = f"page {number + 1}"
    if not lines:
        if any(each.type == pdfium.FPDF_PAGEOBJ_IMAGE for each in page.get_objects(max_depth=2)):
            unread.append(Unread(place, f"it is an image without text, as of a scan; {_HINT}", number + 1))
        return []
    if garbage_share(_text(lines)) <= (MOST_GARBAGE if is_mapped else _MOST_GARBAGE_UNMAPPED):
        return lines
    again = second.lines(number)
    if again and garbage_share(_text(again)) <= MOST_GARBAGE / 2:
        return again
    unread.append(Unread(place, f"its text is garbage, as its fonts do not name their letters; {_HINT}", number + 1))
    return []


def _upright_page(document: pypdfium2.PdfDocument, number: int) -> pypdfium2.PdfPage:
    """Why: PDFium gives the lines of some turned pages from below."""
    page = document[number]
    page.set_rotation(0)
    return page


def _text(lines: Sequence[_Line]) -> str:
    return "\n".join(line.text for line in lines)


class _SecondReader:
    """pypdf, opened for the first page that PDFium does not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: PdfReader | None = None

    def lines(self, number: int) -> list[_Line]:
        with silence_logger("pypdf"):
            try:
                if self._reader is None:
                    self._reader = PdfReader(io.BytesIO(self._path.read_bytes()))
                text = self._reader.pages[number].extract_text()
            except MemoryError:
                raise
            except Exception:  # Why: pypdf documents that a damaged file may raise anything
                return []
        return [_Line(" ".join(line.split()), 0.0, number) for line in text.strip().splitlines()]


class _PageText:
    """The characters of a page, with the sizes of their letters and their places."""

    def __init__(self, page: pypdfium2.PdfPage) -> None:
        self._page = page.get_textpage()
        self.num_chars = self._page.count_chars()
        codes = [pdfium.FPDFText_GetUnicode(self._page, place) for place in range(self.num_chars)]
        self.characters = ["-" if code in _LINE_HYPHENS else chr(code) for code in codes]
        unnamed = [place for place, code in enumerate(codes) if code in _OT1 or code in _T1]
        unnamed = [place for place in unnamed if pdfium.FPDFText_HasUnicodeMapError(self._page, place) == 1]
        encoding = _OT1 if any(codes[place] in _OT1 for place in unnamed) else _T1
        for place in unnamed:
            self.characters[place] = encoding.get(codes[place], self.characters[place])
        self._word_starts = self._far_characters()
        self.line_ends = [place for place, code in enumerate(codes) if code in _LINE_HYPHENS or code == ord("\n")]

    def _far_characters(self) -> frozenset[int]:
        """Characters that begin a word without a space before them. Why: PDFium takes kerned spaces for none."""
        found, box, right, bottom = set[int](), pdfium.FS_RECTF(), math.inf, 0.0
        for place, character in enumerate(self.characters):
            if character.isspace():
                right = math.inf
                continue
            pdfium.FPDFText_GetLooseCharBox(self._page, place, box)
            height = box.top - box.bottom
            if box.left - right > _WORD_GAP * height and abs(box.bottom - bottom) < height / 2:
                found.add(place)
            right, bottom = box.right, box.bottom
        return frozenset(place for place in found if found.isdisjoint((place - 1, place + 1)))  # others: spaced letters

    def unmapped_share(self) -> float:
        """Share of characters that their fonts do not name, in a sample."""
        sample = range(0, self.num_chars, self.num_chars // _SAMPLED_CHARS + 1)
        num_unmapped: int = sum(pdfium.FPDFText_HasUnicodeMapError(self._page, place) == 1 for place in sample)
        return num_unmapped / max(1, len(sample))

    def size(self, place: int) -> float:
        """In points."""
        matrix = self._matrix(place)
        size: float = pdfium.FPDFText_GetFontSize(self._page, place)
        scale: float = math.hypot(matrix.c, matrix.d) or 1.0
        return size * scale

    def turn(self, place: int) -> float:
        matrix = self._matrix(place)
        return 0.0 if abs(matrix.b) <= abs(matrix.a) else math.copysign(1.0, matrix.b)

    def _matrix(self, place: int) -> Any:
        matrix = pdfium.FS_MATRIX()
        pdfium.FPDFText_GetMatrix(self._page, place, matrix)
        return matrix

    def origin(self, place: int) -> tuple[float, float]:
        """On the page, in points from the left and from below."""
        x, y = ctypes.c_double(), ctypes.c_double()
        pdfium.FPDFText_GetCharOrigin(self._page, place, x, y)
        return x.value, y.value

    def is_apart(self, place: int, before: int) -> bool:
        """Whether a character begins a word, though no space stands between it and the one `before` it."""
        box = pdfium.FS_RECTF()
        pdfium.FPDFText_GetLooseCharBox(self._page, before, box)
        right: float = box.right
        return abs(self.origin(place)[0] - right) > _WORD_GAP * self.size(before)

    def lines_of_values(self, first: int) -> list[int]:
        """Places from `first` on after which the next visible character stands in another line."""
        visible = [place for place in range(first, self.num_chars) if not self.characters[place].isspace()]
        pairs = itertools.pairwise(visible)
        return [a for a, b in pairs if abs(self.origin(a)[1] - self.origin(b)[1]) > self.size(a)]

    def written(self, start: int, end: int, left: str = "", before: int = -1) -> str:
        """The characters `[start, end)`, with superscripts and subscripts as signs.

        `left`: the text that they continue; `before`: the place of its last character, or -1.
        """
        found, place = "", start
        while place < end:
            found += " " * (place in self._word_starts and place > start)
            script_end, before = place, place - 1 if place > start else before
            while script_end < end and before >= 0 and self._is_script(script_end, before):
                script_end += 1
            if script_end > place:
                text = "".join(self.characters[place:script_end])
                is_raised = self.origin(place)[1] > self.origin(before)[1]
                found += scripted(text, left + found, "superscript" if is_raised else "subscript")
            else:
                found += self.characters[place]
            place = max(script_end, place + 1)
        return found

    def _is_script(self, place: int, before: int) -> bool:
        """Whether a digit or sign is smaller than the character `before` it and off its line."""
        if self.characters[place] not in _SCRIPT_SIGNS or self.characters[before].isspace():
            return False
        size = self.size(before)
        off_line = abs(self.origin(place)[1] - self.origin(before)[1])
        is_far = off_line > _FAR_OFF_LINE * size
        return off_line > _OFF_LINE * size and self.size(place) < (_FAR_SCRIPT_SIZE if is_far else _SCRIPT_SIZE) * size


def _lines(page: pypdfium2.PdfPage, number: int, num_page_chars: int | None = None) -> tuple[list[_Line], bool]:
    """The lines, and whether the fonts name their characters. From `num_page_chars` on, characters are values of a form."""
    text = _PageText(page)
    lines: list[_PlacedLine] = []
    start = 0
    ends = {*text.line_ends, text.num_chars - 1}
    if num_page_chars is not None:
        ends.update(text.lines_of_values(num_page_chars))
    for place in sorted(ends):
        _add_line(lines, text, start, place + 1, num_page_chars is not None and start >= num_page_chars)
        start = place + 1
    if not any(line.turn == 0.0 for line in lines):  # Why: PDFium gives the lines of some turned pages from below
        lines.sort(key=lambda line: line.x * line.turn)
    found: list[_Line] = []
    leading = statistics.median(_gaps(lines)) if len(lines) > 1 else 0.0
    for gap, line in zip([0.0, *_gaps(lines)], lines, strict=False):
        if gap > (_PARAGRAPH_GAP * leading if len(lines) > _FEW_LINES else _FAR * line.size):
            found.append(_Line("", 0.0, number))
        found.append(_Line(" ".join(_whole_characters(line.text).translate(_LIGATURES).split()), line.size, number))
    return found, text.unmapped_share() <= _MOST_UNMAPPED


def _add_line(lines: list[_PlacedLine], text: _PageText, start: int, end: int, is_value: bool) -> None:
    """Append a line, or its text to the line that it continues at the same height; a form's value, to its label."""
    characters = text.characters[start:end]
    visible = [start + offset for offset, character in enumerate(characters) if not character.isspace()]
    if not visible:
        return
    x, y = text.origin(visible[0])
    size = round(text.size(visible[len(visible) // 2]), 1)
    line = _PlacedLine(text.written(start, end), size, x, y, text.turn(visible[0]), visible[-1])
    for place in range(len(lines) - 1, -1 if is_value else max(-1, len(lines) - 2), -1):
        before = lines[place]
        is_level = abs(y - before.y) <= _SAME_LINE * max(size, before.size)
        if line.turn == before.turn == 0.0 and x > before.x and is_level:
            left = before.text.rstrip()
            if text.is_apart(visible[0], before.last):
                joined = f"{left} {line.text}"
            else:
                joined = left + text.written(visible[0], end, left, before.last)
            lines[place] = before._replace(text=joined, last=line.last)
            return
    lines.append(line)


def _gaps(lines: Sequence[_PlacedLine]) -> list[float]:
    return [abs(a.x - b.x if a.turn else a.y - b.y) for a, b in itertools.pairwise(lines)]


def _whole_characters(text: str) -> str:
    """Joins the halves of characters beyond the basic plane."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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


def _blocks(pages: Sequence[Sequence[_Line]], least_title: float) -> list[_Line]:
    """Paragraphs and titles. A sentence may go on on the next page."""
    hyphenated = _hyphenated_words(line.text for page in pages for line in page)
    found, before = list[_Line](), None  # the line above; None if the paragraph has ended
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
                found.append(line._replace(size=title_size))
            before = line
    return [block if _is_short(block) else block._replace(size=0.0) for block in found]


def _is_short(block: _Line) -> bool:
    return len(block.text) <= _TITLE_CHARS and block.num_lines <= _TITLE_LINES


def _headings(document: pypdfium2.PdfDocument, text: str, starts: list[int]) -> tuple[Heading, ...]:
    """Titles of the outline that begin a block of their page. `starts`: where each page begins, then the end of the text."""
    found: dict[int, Heading] = {}
    for bookmark in document.get_toc():
        page = destination.get_index() if (destination := bookmark.get_dest()) else None
        title = one_line(bookmark.get_title())
        if title and page is not None and 0 <= page < len(starts) - 1:
            words = r"\s+".join(map(re.escape, title.split()))
            match = re.compile(rf"^{_NUMBER}{words}(?!\w)", re.M | re.I).search(text, starts[page], starts[page + 1])
            if match:
                level = min(bookmark.level + 1, _MAX_LEVEL)
                found |= {match.start(): entry for entry in heading(match.start(), level, title)}
    return tuple(found[start] for start in sorted(found))


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
