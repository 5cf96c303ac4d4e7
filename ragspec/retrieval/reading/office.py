"""The common part of the readers of Word files and OpenDocument texts: a body is read once, from its beginning to its end.

>>> class WordReader(OfficeReader): ...
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from ragspec.core import BlockKind
from ragspec.retrieval.reading.inline import list_number, scripted
from ragspec.retrieval.reading.parsed_file import TextBuilder, one_line


class OfficeReader(ABC):
    """`left_out`: tags of elements without text of the document. `boxes`: of the paragraph that is being read."""

    left_out: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.builder = TextBuilder()
        self.boxes: list[Any] = []
        self.is_flat = False  # whether the text becomes one line: of a cell, or of a note
        self._notes: list[Any] = []

    @abstractmethod
    def read_element(self, element: Any) -> bool:
        """Read a paragraph, a table or a list. Returns whether the element was one of them."""

    @abstractmethod
    def pieces(self, parent: Any, script: str = "") -> Iterator[tuple[str, str]]:
        """(text, "superscript", "subscript" or empty) of a paragraph. Collects its boxes."""

    def read(self, body: Any) -> None:
        self.read_blocks(body)
        for number, note in enumerate(self._notes, 1):
            self.builder.add(f"[{number}] {self.flat_text(note)}")

    def read_blocks(self, parent: Any) -> None:
        """Also inside sections, content controls and tracked insertions."""
        for element in parent:
            if element.tag not in self.left_out and not self.read_element(element):
                self.read_blocks(element)

    def add_paragraph(self, text: str, level: int, marker: str) -> None:
        """`level`: of a heading, or 0. `marker`: of a list's item, or empty."""
        gap = "\n" if marker and not level else "\n\n"
        self.builder.add(marker + text.strip(), level, gap, BlockKind.LIST_ITEM if marker else BlockKind.PARAGRAPH)

    def read_boxes(self) -> None:
        boxes, self.boxes = self.boxes, []
        for box in boxes:
            self.read_blocks(box)

    def text(self, paragraph: Any) -> str:
        found = ""
        for script, pieces in itertools.groupby(self.pieces(paragraph), key=itemgetter(1)):
            found += scripted("".join(text for text, _ in pieces), found, script)
        return found

    def flat_text(self, element: Any) -> str:
        """The paragraphs of a cell or note on one line."""
        outer = self.builder, self.is_flat, self.boxes
        self.builder, self.is_flat, self.boxes = TextBuilder(), True, []
        self.read_blocks(element)
        found = one_line(self.builder.build().text)
        self.builder, self.is_flat, self.boxes = outer
        return found

    def note_mark(self, note: Any) -> str:
        self._notes.append(note)
        return f"[{len(self._notes)}]"


class ListLevel(NamedTuple):
    """One level of a list. `style`: as `list_number` takes, "bullet" or "none". `pattern`: of the number, such as "%1.%2"."""

    style: str
    pattern: str
    start: int


class ListCounter:
    """The numbers of a list's items. `levels`: from 0 on."""

    def __init__(self, levels: dict[int, ListLevel]) -> None:
        self.levels = levels
        self._counts: dict[int, int] = {}

    def marker(self, level: int, start: int | None = None) -> str:
        """The number or dash of the next item, with a space. `start`: its number, if it is set."""
        own = self.levels.get(level)
        if own is None:
            return "- "
        if start is None:
            start = self._counts[level] + 1 if level in self._counts else own.start
        self._counts = {each: count for each, count in self._counts.items() if each < level} | {level: start}
        if own.style in ("bullet", "none"):
            return "- " if own.style == "bullet" else ""
        number = own.pattern
        for other, each in self.levels.items():
            number = number.replace(f"%{other + 1}", list_number(self._counts.get(other, each.start), each.style))
        return f"{number} " if number.strip() else ""
