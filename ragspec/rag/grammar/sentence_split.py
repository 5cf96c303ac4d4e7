"""Splits a text into sentences that the target can correct: none too long, none without letters; with their offsets."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ragspec.rag.grammar.markup import MarkedText, Span
from ragspec.retrieval.chunking import sentences
from ragspec.retrieval.chunking.sentence_boundaries import lstrip

_MAX_CHARS_PER_TOKEN = 16
"""A sentence with more characters per allowed token is split before its tokens are counted."""

_WHITE = re.compile(r"\s+")


EncodeTexts = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Maps texts to token ids, as in a prompt."""


class SentenceSpan(NamedTuple):
    """A span of plain text. `begins`: False for the second and later parts of a sentence that was too long."""

    start: int
    end: int
    begins: bool
    num_tokens: int


def split_sentences(marked: MarkedText, encode: EncodeTexts, max_tokens: int) -> list[SentenceSpan]:
    """Sentences with a letter outside protected spans, in parts of at most `max_tokens` tokens, but at least one character."""
    text, fitting = marked.plain, list[SentenceSpan]()
    whole = [span for span in sentences(text) if _holds_letters(text, *span, marked.protected)]
    begins = {start for start, _ in whole}
    spans = [part for span in whole for part in _pieces(text, *span, max_tokens * _MAX_CHARS_PER_TOKEN)]
    while spans:
        encoded = encode([one_line(text[slice(*span)]) for span in spans])
        too_long = []
        for (start, end), ids in zip(spans, encoded, strict=True):
            if len(ids) <= max_tokens or end - start == 1:
                fitting.append(SentenceSpan(start, end, start in begins, len(ids)))
            else:
                too_long.append((start, end))
        spans = [half for span in too_long for half in _halves(text, *span)]
    return sorted(fitting)


def one_line(sentence: str) -> str:
    """The sentence in one line: line breaks inside it only fit a page."""
    return _WHITE.sub(" ", sentence)


def _holds_letters(text: str, start: int, end: int, protected: Sequence[Span]) -> bool:
    outside, at = list[str](), start
    for left, right in protected[bisect_right(protected, start, key=lambda span: span[1]) :]:
        if left >= end:
            break
        outside.append(text[at : max(at, left)])
        at = max(at, right)
    return any(map(str.isalpha, "".join([*outside, text[at:end]])))


def _pieces(text: str, start: int, end: int, max_chars: int) -> Iterator[Span]:
    """The span in parts of at most `max_chars` characters, split at white space if there is any."""
    while end - start > max_chars:
        breaks = [match.start() for match in _WHITE.finditer(text, start + 1, start + max_chars)]
        stop = breaks[-1] if breaks else start + max_chars
        yield start, stop
        start = lstrip(text, stop, end)
    if start < end:
        yield start, end


def _halves(text: str, start: int, end: int) -> Iterator[Span]:
    """The parts before and after the white space nearest to the middle, or after the middle itself."""
    middle = (start + end) // 2
    breaks = [match.span() for match in _WHITE.finditer(text, start, end)]
    left, right = min(breaks, key=lambda span: abs(span[0] - middle), default=(middle, middle))
    yield start, left
    yield right, end
