"""Which spans of a passage may be quoted, by the structure of its document.

A quote is one or more neighbouring sentences, list items, table rows or lines of code. A heading is never part of a quote. A
sentence that ends in a colon, a question, and a term before its definition are quoted only with the text behind them. A passage
without blocks counts as one paragraph, in which a line that repeats a title or a heading is a heading.

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
_MAX_TERM_CHARS = 60
_BULLET = re.compile(r"(?:(?:[-*•+]|\d{1,3}(?:\.\d{1,3})*[.)])[ \t]+)+")
_TABLE_RULE = re.compile(r"[\s|:+=-]*")
_LINE = re.compile(r"[^\s\n](?:[^\n]*\S)?")
_NO_TERM = re.compile(r"^(?:\||[-*•+][ \t])|[.!?…:;。！？][\"'”’»)\]*`]*$")
"""Rows and items of a passage without blocks, and ends of sentences."""
_ANNOUNCING_END = re.compile(r"[:?：？][\"'”’»)\]*`]*$")
_IN_ROWS = frozenset({BlockKind.LIST_ITEM, BlockKind.TABLE, BlockKind.CODE})


class _Unit(NamedTuple):
    """[start, end) of the passage. `announces`: its meaning is in the text behind it. `is_term`: a line that is no sentence."""

    start: int
    end: int
    kind: BlockKind
    announces: bool = False
    is_term: bool = False


def quotable_runs(passage: Passage, left_out: Collection[str] = ()) -> list[list[Span]]:
    """Runs of neighbouring spans: a quote is one or more neighbours of one run. `left_out`: texts of which no part is quoted."""
    runs: list[list[Span]] = []
    for section in _sections(passage, left_out):
        run: list[Span] = []
        at = 0
        while at < len(section):
            first = next((n for n in range(at, len(section)) if not section[n].announces), None)
            if first is None:
                break  # nothing is left that it announces
            while at < first - 1 and section[first].start - section[at].start > _MAX_ANNOUNCED_CHARS:
                at += 1
            last = _last_announced(section, first) if first > at else first
            run.append((section[at].start, section[last].end))
            if first > at and not section[first].is_term:  # a value of one word says nothing without its name
                runs.append([(unit.start, unit.end) for unit in section[first : last + 1]])
            at = last + 1
        runs.append(run)
    return [run for run in runs if run]


def _last_announced(section: list[_Unit], first: int) -> int:
    last, kind = first, section[first].kind
    if kind in _IN_ROWS:
        while last + 1 < len(section) and section[last + 1].kind is kind and not section[last + 1].announces:
            if section[last + 1].end - section[first].start > _MAX_ANNOUNCED_CHARS:
                break
            last += 1
    return last


def _sections(passage: Passage, left_out: Collection[str]) -> Iterator[list[_Unit]]:
    """The units between headings and texts that are left out."""
    section: list[_Unit] = []
    for unit in _units(passage):
        text = passage.text[unit.start : unit.end]
        if unit.kind is BlockKind.HEADING or any(text in each for each in left_out):
            yield section
            section = []
        elif re.search(r"\w", text):
            if section and _is_next_question(passage.text, section[-1], unit):
                section.pop()
            is_value = unit.is_term and bool(section) and section[-1].announces
            section.append(unit._replace(announces=False) if is_value else unit)
        elif section and "|" in text and _TABLE_RULE.fullmatch(text):
            section.pop()  # the header above the rule
    yield section


def _is_next_question(text: str, before: _Unit, unit: _Unit) -> bool:
    """Whether a question is followed by another item of its list, as in a table of contents: no answer of it stands there."""
    is_question = text[before.start : before.end].endswith(("?", "？"))
    return is_question and before.kind is unit.kind is BlockKind.LIST_ITEM and "\n" in text[before.end : unit.start]


def _units(passage: Passage) -> Iterator[_Unit]:
    text = passage.text
    titles = {line.strip() for line in (passage.title, *passage.headings, *passage.heading.split(SEPARATOR)) if line}
    for block in passage.blocks or (Block(0, len(text), BlockKind.PARAGRAPH),):
        start, end, kind = block[:3]
        if kind is BlockKind.HEADING:
            yield _Unit(start, end, kind)
        elif kind in (BlockKind.TABLE, BlockKind.CODE):
            yield from (_Unit(*line.span(), kind) for line in _LINE.finditer(text, start, end))
        else:
            if bullet := _BULLET.match(text, start, end):
                start = bullet.end()
            for first, last in sentences(text, start, end):
                yield _sentence(text, first, last, kind, titles)


def _sentence(text: str, start: int, end: int, kind: BlockKind, titles: Collection[str]) -> _Unit:
    said = text[start:end]
    if said in titles:
        return _Unit(start, end, BlockKind.HEADING)
    is_line = kind is BlockKind.PARAGRAPH and len(said) <= _MAX_TERM_CHARS and not _NO_TERM.search(said)
    is_term = is_line and text[end : end + 1] in ("\n", "")
    return _Unit(start, end, kind, is_term or bool(_ANNOUNCING_END.search(said)), is_term)
