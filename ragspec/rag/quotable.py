"""What may be quoted of a passage.

A quote is one or more neighbouring sentences, list items, table rows or lines of code, inside or outside of a table. A heading is
never part of a quote. A sentence that ends in a colon, a question, and a term before its definition are quoted only with the text
behind them. A passage without blocks counts as one paragraph, in which a line that repeats a title or a heading is a heading.

    >>> [[passage.text[start:end] for start, end in run] for run in quotable_runs(passage)]
    [['Start it with:\n\nmill --start', 'It runs until it is stopped.'], ['mill --start']]
"""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ragspec.core import Block, BlockKind, Passage
from ragspec.retrieval.chunking import Span, sentences
from ragspec.retrieval.chunking.chunker import SEPARATOR

_MAX_ANNOUNCED_CHARS = 240
"""Of list items, rows or lines of code that come with the sentence before them, beyond the first; and of such sentences, beyond
the last."""
_MAX_TERM_CHARS, _MAX_ABOVE_CHARS = 60, 2000
_BULLET = re.compile(r"(?:(?:[-*•+]|\d{1,3}(?:\.\d{1,3})*[.)])[ \t]+)+")
_TABLE_RULE = re.compile(r"[\s|:+=-]*")
_LINE = re.compile(r"[^\s\n](?:[^\n]*\S)?")
_NO_TERM = re.compile(r"^(?:\||[-*•+][ \t])|[.!?…:;。！？][\"'”’»)\]*`]*$")
"""Rows and items of a passage without blocks, and ends of sentences."""
_ANNOUNCING_END = re.compile(r"[:?：？][\"'”’»)\]*`]*$")
_SECTION = re.compile(r"\[{1,2}[A-Za-z_\"'][^\[\]\n]{0,60}\]{1,2}")
_SETTING = re.compile(r"(?:[\w. -]+(?:=|:[ \t])|[#;]|//)[ \t]*\S[^\n]*")
"""With its value, or a comment."""

_IN_ROWS = frozenset({BlockKind.LIST_ITEM, BlockKind.TABLE, BlockKind.CODE})


class _Unit(NamedTuple):
    """[start, end) of the passage. `announces`: its meaning is in the text behind it, up to `until` if that is known. `is_term`:
    a line that is no sentence."""

    start: int
    end: int
    kind: BlockKind
    announces: bool = False
    is_term: bool = False
    until: int = 0


def quotable_runs(passage: Passage, left_out: Collection[str] = (), *, by_blocks: bool = True) -> list[list[Span]]:
    """Runs of neighbouring spans: a quote is one or more neighbours of one run. `left_out`: texts of which no part is quoted.

    `by_blocks`: a run ends at the border of a table and before a term. A line of code that ends in a colon announces its
    nested lines.
    """
    sections = _sections(passage, left_out, by_blocks)
    return [run for section in sections for run in _runs(section, by_blocks) if run]


def _runs(section: list[_Unit], by_blocks: bool) -> Iterator[list[Span]]:
    run: list[Span] = []
    at, before = 0, None
    while at < len(section):
        first = next((n for n in range(at, len(section)) if not section[n].announces), None)
        if first is None:
            break  # nothing is left that it announces
        while at < first - 1 and section[first].start - section[at].start > _MAX_ANNOUNCED_CHARS:
            at += 1
        last = _last_announced(section, at, first) if first > at else first
        if by_blocks and before and _is_border(before, section[at]):
            yield run
            run = []
        run.append((section[at].start, section[last].end))
        if first > at and not section[first].is_term:  # a value of one word says nothing without its name
            inner = section[at + 1 if by_blocks else first : last + 1]
            yield from _runs(inner, by_blocks) if by_blocks else [[(unit.start, unit.end) for unit in inner]]
        at, before = last + 1, section[last]
    yield run


def _is_border(before: _Unit, unit: _Unit) -> bool:
    return unit.is_term or (before.kind is BlockKind.TABLE) != (unit.kind is BlockKind.TABLE)


def _last_announced(section: list[_Unit], at: int, first: int) -> int:
    """Of the units that section[at] announces, of which `first` is the first that announces nothing."""
    last, kind, until = first, section[first].kind, section[at].until
    if kind in _IN_ROWS:
        end = section[first].start + _MAX_ANNOUNCED_CHARS
        for n in range(first + 1, len(section)):
            unit = section[n]
            if unit.kind is not kind or (unit.announces and not until) or unit.end > min(end, until or end):
                break
            last += 1
        while section[last].announces:
            last -= 1
    return last


def _sections(passage: Passage, left_out: Collection[str], by_blocks: bool) -> Iterator[list[_Unit]]:
    """The units between headings and texts that are left out."""
    section: list[_Unit] = []
    for unit in _units(passage, by_blocks):
        text = passage.text[unit.start : unit.end]
        if unit.kind is BlockKind.HEADING or any(text in each for each in left_out):
            yield section
            section = []
        elif re.search(r"\w", text):
            if section and _is_next_question(passage.text, section[-1], unit):
                section.pop()
            # Why no value by blocks: a section of settings stands behind an empty setting
            is_value = unit.is_term and not (by_blocks and unit.kind is BlockKind.TERM)
            is_announced = bool(section) and section[-1].announces
            section.append(unit._replace(announces=False) if is_value and is_announced else unit)
        elif section and "|" in text and _TABLE_RULE.fullmatch(text):
            section.pop()  # the header above the rule
    yield section


def _is_next_question(text: str, before: _Unit, unit: _Unit) -> bool:
    """Whether a question is followed by another item of its list, as in a table of contents: no answer of it stands there."""
    is_question = text[before.start : before.end].endswith(("?", "？"))
    return is_question and before.kind is unit.kind is BlockKind.LIST_ITEM and "\n" in text[before.end : unit.start]


def _units(passage: Passage, by_blocks: bool) -> Iterator[_Unit]:
    text = passage.text
    titles = {line.strip() for line in (passage.title, *passage.headings, *passage.heading.split(SEPARATOR)) if line}
    for block in passage.blocks or (Block(0, len(text), BlockKind.PARAGRAPH),):
        start, end, kind = block[:3]
        if kind is BlockKind.HEADING:
            yield _Unit(start, end, kind)
        elif kind is BlockKind.TERM:
            yield _Unit(start, end, kind, announces=True, is_term=True)
        elif kind in (BlockKind.TABLE, BlockKind.CODE):
            for line in _LINE.finditer(text, start, end):
                is_section = by_blocks and _SECTION.fullmatch(line[0]) is not None
                is_head = by_blocks and kind is BlockKind.CODE and line[0][-1] == ":"
                until = _end_of_nested(text, *line.span()) if is_head else 0
                if until or not is_head:
                    yield _Unit(*line.span(), kind, is_section or is_head, is_section, until)
        else:
            if bullet := _BULLET.match(text, start, end):
                start = bullet.end()
            for first, last in sentences(text, start, end):
                yield _sentence(text, first, last, kind, titles, by_blocks)


def _sentence(text: str, start: int, end: int, kind: BlockKind, titles: Collection[str], by_blocks: bool) -> _Unit:
    said = text[start:end]
    if said in titles:
        return _Unit(start, end, BlockKind.HEADING)
    is_line = kind is BlockKind.PARAGRAPH and len(said) <= _MAX_TERM_CHARS and not _NO_TERM.search(said)
    is_term = is_line and text[end : end + 1] in ("\n", "") and not (by_blocks and _SETTING.fullmatch(said))
    return _Unit(start, end, kind, is_term or bool(_ANNOUNCING_END.search(said)), is_term)


def _end_of_nested(text: str, start: int, end: int) -> int:
    """Of the lines with a larger indent behind the line [start, end), or of its list; 0 if there are none, or too many."""
    indent, last = start - text.rfind("\n", 0, start), 0
    for line in _LINE.finditer(text, end):
        further = line.start() - text.rfind("\n", 0, line.start()) - indent
        is_item = further == 0 and line[0].startswith("- ") and not text.startswith("- ", start)
        if further <= 0 and not is_item:
            break
        last = line.end()
        if last > end + _MAX_ANNOUNCED_CHARS:
            return 0
    return last


def lines_above(text: str, start: int) -> Iterator[str]:
    """The lines that a line is nested in, the nearest first: lines with a smaller indent that end in a colon."""
    begin = text.rfind("\n", 0, start) + 1
    indent, least = start - begin, max(0, start - _MAX_ABOVE_CHARS)
    while indent and begin > least:
        end, begin = begin - 1, text.rfind("\n", 0, begin - 1) + 1
        line = text[begin:end]
        own = len(line) - len(line.lstrip())
        if line.strip() and own < indent:
            indent = own
            if line.rstrip().endswith(":"):
                yield line.strip()
