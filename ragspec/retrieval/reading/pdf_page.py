"""Draws pages of a PDF, with a quote marked.

>>> draw_page(Path("manual.pdf"), 3, letters_of("The mill opens at nine."), "", Path("page.png"))
"""

from __future__ import annotations

import ctypes
import unicodedata
from pathlib import Path
from typing import NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium
from PIL import ImageDraw

_SCALE = 1.6
_MAX_PIXELS = 2400.0
_MARK = (255, 210, 0, 90)
_LEAST_PART = 8
"""Letters of a part of a quote that ends on the page; fewer may stand there by chance."""


class _Letters(NamedTuple):
    """Letters and digits of a page, and the number of each one's character on it."""

    text: str
    places: list[int]


def letters_of(text: str) -> str:
    """Letters and digits alone: hyphens, spaces and ligatures differ between a page and its text."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", text)))


def draw_page(path: Path, number: int, quote: str, before: str, output: Path) -> int:
    """Draws page `number`, from 1 on, as PNG. Returns how many letters of the quote are marked: all, or those to the page's end.

    `quote`, `before`: letters of the quote and of the text before it, which tells equal words apart.
    """
    with pypdfium2.PdfDocument(path) as document:
        if document.get_formtype():
            document.init_forms()
        page = document[number - 1]
        text = page.get_textpage()
        letters = _page_letters(text)
        start, num_marked = _find(letters.text, quote, before)
        scale = min(_SCALE, _MAX_PIXELS / max(page.get_size()))
        image = page.render(scale=scale).to_pil().convert("RGB")
        if num_marked:
            first, last = letters.places[start], letters.places[start + num_marked - 1]
            drawing = ImageDraw.Draw(image, "RGBA")
            for n in range(text.count_rects(first, last + 1 - first)):
                drawing.rectangle(_on_image(page, text.get_rect(n), image.size), fill=_MARK)
        image.save(output, "PNG")
    return num_marked


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


def _on_image(
    page: pypdfium2.PdfPage, box: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[int, int, int, int]:
    """A box of the page, in points, as left, top, right and bottom in pixels."""
    corners = []
    for x, y in (box[:2], box[2:]):
        column, row = ctypes.c_int(), ctypes.c_int()
        pdfium.FPDF_PageToDevice(page, 0, 0, *size, 0, x, y, column, row)
        corners.append((column.value, row.value))
    (a, b), (c, d) = corners
    return min(a, c), min(b, d), max(a, c), max(b, d)
