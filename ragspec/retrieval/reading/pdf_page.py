"""Draws pages of a PDF, and finds the places of a quote on them.

>>> draw_page(Path("manual.pdf"), 3, letters_of("The mill opens at nine."), "", Path("page.png")).boxes
"""

import ctypes
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

_SCALE = 1.6
_MAX_PIXELS = 2400.0
_LEAST_PART = 8
"""Letters of a part of a quote that ends on the page; fewer may stand there by chance."""


class DrawnPage(NamedTuple):
    """`num_found`: letters of the quote on the page. `size`: width and height of the picture. `boxes`: left, top, width and
    height of the quote's parts in the picture. Units: pixels."""

    num_found: int
    size: tuple[int, int]
    boxes: list[tuple[int, int, int, int]]


class _Letters(NamedTuple):
    """Letters and digits of a page, and the number of each one's character on it."""

    text: str
    places: list[int]


def letters_of(text: str) -> str:
    """Letters and digits alone: hyphens, spaces and ligatures differ between a page and its text."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text)))


def draw_page(path: Path, number: int, quote: str, before: str, output: Path) -> DrawnPage:
    """Draws page `number`, from 1 on, as PNG. Finds the whole quote on it, or the beginning of one that goes on behind the page.

    `quote`, `before`: letters of the quote and of the text before it, which tells equal words apart.
    """
    with pypdfium2.PdfDocument(path) as document:
        if document.get_formtype():
            document.init_forms()
        page = document[number - 1]
        text = page.get_textpage()
        letters = _page_letters(text)
        start, num_found = _find(letters.text, quote, before)
        image = page.render(scale=min(_SCALE, _MAX_PIXELS / max(page.get_size()))).to_pil()
        image.save(output, "PNG")
        boxes = []
        if num_found:
            first, last = letters.places[start], letters.places[start + num_found - 1]
            for n in range(text.count_rects(first, last + 1 - first)):
                boxes.append(_on_picture(page, text.get_rect(n), image.size))
        return DrawnPage(num_found, image.size, boxes)


def _page_letters(text: pypdfium2.PdfTextPage) -> _Letters:
    found, places = "", list[int]()
    for place in range(text.count_chars()):
        letters = letters_of(chr(pdfium.FPDFText_GetUnicode(text, place)))
        found += letters
        places += [place] * len(letters)
    return _Letters(found, places)


def _find(page: str, quote: str, before: str) -> tuple[int, int]:
    """Where the quote begins, and how many of its letters stand there: all of them, or the most with which the page ends."""
    found, at = list[int](), page.find(quote)
    while quote and at >= 0:
        found.append(at)
        at = page.find(quote, at + 1)
    if found:
        return max(found, key=lambda at: _num_equal(page[:at], before)), len(quote)
    low, high = 0, len(quote)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if quote[:middle] in page else (low, middle - 1)
    return (page.rfind(quote[:low]), low) if low >= _LEAST_PART else (0, 0)


def _num_equal(one: str, other: str) -> int:
    """Letters that both texts end with."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _on_picture(
    page: pypdfium2.PdfPage, box: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[int, int, int, int]:
    """A box of the page, in points, as left, top, width and height in pixels."""
    corners = []
    for x, y in (box[:2], box[2:]):
        column, row = ctypes.c_int(), ctypes.c_int()
        pdfium.FPDF_PageToDevice(page, 0, 0, *size, 0, x, y, column, row)
        corners.append((column.value, row.value))
    (a, b), (c, d) = corners
    return min(a, c), min(b, d), abs(a - c), abs(b - d)
