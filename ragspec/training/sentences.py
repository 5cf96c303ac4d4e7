"""Sentences of training texts, and the one that answers; the parts of a passage that may answer.

Every sentence is a substring of its paragraph. A part of a passage is a span that an answer may quote (`rag.quotable`): a
sentence, a list item or a table row, or a sentence with the block that it announces. Code alone is no part.

>>> split_sentences("Dr. Fox ran. It rained.")
['Dr. Fox ran.', 'It rained.']
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ragspec.core import Block, BlockKind, Passage, blocks_reaching
from ragspec.rag.quotable import quotable_runs

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
_WHOLE = re.compile(r"[\"'“‘(`*\[]*[A-Z0-9$/.~<-].*[.!?:][\"'”’)`*\]]*", re.DOTALL)
"""Of the texts that stand as paragraphs the sentences: no term or line of navigation."""


class Part(NamedTuple):
    """The span `text[start:end]` of a document. `kind`: of the block that it begins in. `block_start`: where the block that it
    announces begins; `end` if it announces none."""

    start: int
    end: int
    kind: BlockKind
    block_start: int

    @property
    def announces(self) -> bool:
        return self.block_start < self.end

    def num_words(self, text: str) -> int:
        return len(text[self.start : self.end].split())


def quotable_parts(passage: Passage) -> Iterator[Part]:
    """Its parts by their places in the document, in order; a part that holds another one comes before it."""
    whole = (Block(0, len(passage.text), BlockKind.PARAGRAPH),)
    spans = {span for run in quotable_runs(passage) for span in run}
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        block, *others = blocks_reaching(passage.blocks or whole, start, end)
        is_paragraph, announced = block.kind in (BlockKind.PARAGRAPH, BlockKind.TERM), end
        if others and passage.text[: block.end].endswith(":") and others[0].kind is not BlockKind.PARAGRAPH:
            announced = others[0].start
        num_words = len(passage.text[start:end].split())
        is_whole = not is_paragraph or _WHOLE.fullmatch(passage.text, start, block.end if announced < end else end)
        if (
            is_whole
            and block.kind is not BlockKind.CODE
            and num_words in (QUOTE_WORDS if announced == end else BLOCK_WORDS)
        ):
            yield Part(passage.start + start, passage.start + end, block.kind, passage.start + announced)


def is_quotable(passage: Passage, start: int, end: int) -> bool:
    """Whether an answer may quote `document.text[start:end]`: one or more neighbours of one run."""
    first, last = start - passage.start, end - passage.start
    runs = quotable_runs(passage)
    return any(first in (a for a, _ in run) and last in (b for _, b in run) for run in runs)
