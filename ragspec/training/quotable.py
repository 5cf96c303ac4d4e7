"""The parts of a passage that may answer a question, by the structure of its document.

A part is a sentence, a list item or a table row; a sentence that ends in a colon reaches to the end of the code, list or table
that it announces. Headings, code on its own, and sentences whose announced block is elsewhere are no parts.

    >>> [document.text[part.start : part.end] for part in quotable_parts(document, passage.start, passage.end)]
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from ragspec.core import Block, BlockKind, Document
from ragspec.retrieval.chunking import Span, sentences

QUOTE_WORDS, BLOCK_WORDS = range(4, 56), range(4, 91)
_MARKER = re.compile(r"\s*(?:[-*•+]|\(?\w{1,3}[.)])\s+")
_WHOLE = re.compile(r"[\"'“‘(`*\[]*[A-Z0-9$/.~<-].*[.!?:][\"'”’)`*\]]*", re.DOTALL)
"""Of the texts that stand as paragraphs the sentences: no heading, term or line of navigation."""
_RULE_ROW = re.compile(r"[\s|+:=-]*")
_ANNOUNCED = (BlockKind.CODE, BlockKind.LIST_ITEM, BlockKind.TABLE)


class Part(NamedTuple):
    """The span `text[start:end]` of a document. `kind`: of the block that it begins in. `announces`: it holds an announced
    block, which begins at `block_start`; else that is `end`."""

    start: int
    end: int
    kind: BlockKind
    block_start: int

    @property
    def announces(self) -> bool:
        return self.block_start < self.end

    def is_sentence(self, text: str) -> bool:
        return text[self.end - 1] in ".!)" and text[self.start].isupper()

    def num_words(self, text: str) -> int:
        return len(text[self.start : self.end].split())


def blocks_reaching(document: Document, start: int, end: int) -> Sequence[Block]:
    """The blocks that have a part in `document.text[start:end]`."""
    first = bisect_right(document.blocks, start, key=lambda block: block.end)
    return document.blocks[first : bisect_left(document.blocks, end, key=lambda block: block.start)]


def quotable_parts(document: Document, start: int, end: int) -> Iterator[Part]:
    """The parts that lie in `document.text[start:end]`, in order."""
    blocks = blocks_reaching(document, start, end)
    for number, block in enumerate(blocks):
        for first, last in _spans(document.text, block, max(start, block.start), min(end, block.end)):
            if document.text[last - 1] != ":":
                part = Part(first, last, block.kind, last)
            elif last == block.end and (follows := _announced(blocks[number + 1 :])) and follows[-1].end <= end:
                part = Part(first, follows[-1].end, block.kind, follows[0].start)
            else:
                continue
            if part.num_words(document.text) in (BLOCK_WORDS if part.announces else QUOTE_WORDS):
                yield part


def _spans(text: str, block: Block, start: int, end: int) -> Iterator[Span]:
    if block.kind is BlockKind.PARAGRAPH:
        for first, last in sentences(text, start, end):
            if _WHOLE.fullmatch(text, first, last):
                yield first, last
    elif block.kind is BlockKind.LIST_ITEM and start == block.start:
        marker = _MARKER.match(text, start, end)
        first = marker.end() if marker else start
        if first < end:
            yield first, first + len(text[first:end].rstrip())
    elif block.kind is BlockKind.TABLE:
        for line in re.finditer(r"[^\n]+", text[start:end]):
            if not _RULE_ROW.fullmatch(line[0]):
                lead = len(line[0]) - len(line[0].lstrip("| \t"))
                yield start + line.start() + lead, start + line.start() + len(line[0].rstrip("| \t"))


def _announced(after: Sequence[Block]) -> list[Block]:
    """The first block if a colon may announce it; of a list all items."""
    if not after or after[0].kind not in _ANNOUNCED:
        return []
    if after[0].kind is BlockKind.LIST_ITEM:
        return list(takewhile(lambda block: block.kind is BlockKind.LIST_ITEM, after))
    return list(after[:1])
