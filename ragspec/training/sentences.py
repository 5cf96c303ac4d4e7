"""Sentences of training texts, and the one that answers; the parts of a document that may answer, by its structure.

Every sentence is a substring of its paragraph. A part of a document is a sentence, a list item or a table row; a sentence that
ends in a colon reaches to the end of the code, list or table that it announces. Headings, code on its own, and sentences whose
announced block is elsewhere are no parts.

>>> split_sentences("Dr. Fox ran. It rained.")
['Dr. Fox ran.', 'It rained.']
"""

import random
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from ragspec.core import Block, BlockKind, Document
from ragspec.retrieval import chunking
from ragspec.retrieval.chunking import Span

_BOUNDARY = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[A-Z\"'(\[0-9`])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Gen|Col|Lt|Sgt|Rev|vs|etc|e\.g|i\.e|cf|al|No|Vol|Fig|Inc|Ltd|Co|ca|c|v"
    r"|Jan|Feb|Mar|Apr|Aug|Sept|Sep|Oct|Nov|Dec))\.$"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph, stripped; initials and common abbreviations do not end one."""
    sentences, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        end = boundary.end()
        candidate = text[start:end].strip()
        if candidate and not _ABBREVIATION.search(candidate):
            sentences.append(candidate)
            start = end
    rest = text[start:].strip()
    return [*sentences, rest] if rest else sentences


def normalise(text: str) -> str:
    """One line, single spaces."""
    return re.sub(r"\s+", " ", text).strip()


def window_around(sentences: list[str], index: int, max_words: int, rng: random.Random) -> str:
    """Consecutive whole sentences around sentence `index`, extended at random ends up to `max_words` words."""
    first = last = index
    num_words = len(sentences[index].split())
    while True:
        choices = [i for i in (first - 1, last + 1) if 0 <= i < len(sentences)]
        choices = [i for i in choices if num_words + len(sentences[i].split()) <= max_words]
        if not choices:
            return " ".join(sentences[first : last + 1])
        chosen = rng.choice(choices)
        num_words += len(sentences[chosen].split())
        first, last = min(first, chosen), max(last, chosen)


def words_of(text: str) -> list[str]:
    """Words without the punctuation around them, as written."""
    return [word for word in (raw.strip(".,;:!?()[]\"'`*_—–-") for raw in text.split()) if word]


def best_sentence(question: str, answer: str, sentences: list[str]) -> int | None:
    """The sentence that holds the answer, preferring the one that shares most words with the question."""
    asked = set(re.findall(r"\w+", question.lower()))
    holding = [i for i, sentence in enumerate(sentences) if answer in sentence]
    if not holding:
        return None
    return max(holding, key=lambda i: (len(asked & set(re.findall(r"\w+", sentences[i].lower()))), -i))


def common_answer(answers: list[str]) -> str:
    """The answer most annotators gave; among equals the shortest."""
    counts = Counter(answers)
    return max(counts, key=lambda a: (counts[a], -len(a)))


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
        for first, last in chunking.sentences(text, start, end):
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
