"""Which spans of a passage may be quoted, by the structure of its document, and how likely an answer quotes each.

A quote is one or more neighbouring sentences, list items, table rows or lines of code. A heading is never part of a quote. A
sentence that ends in a colon, a question, and a term before its definition are quoted only with the text behind them. A passage
without blocks counts as one paragraph, in which a line that repeats a title or a heading is a heading.

    >>> [[passage.text[start:end] for start, end in run] for run in quotable_runs(passage)]
    [['Start it with:\n\nmill --start', 'It runs until it is stopped.'], ['mill --start']]

The more of the question's words a span holds, the likelier an answer quotes it. The score is BM25 among the spans of all
passages, over the score of a span that held every word of the question once; common words do not count. The bias makes a tree of
the spans' tokens. Where spans part, each branch gets the score of its best span less that of the best of all branches, times a
weight. The best span so gets no bias at any token. The bias is a sampling parameter, so drafts change no token.
Source: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), for BM25.

    >>> quote_bias("Who built the mill?", passages, prompts.plain_ids, weight=20.0)
    {(18,): {540: -7.3}, (18, 504): {9103: -20.0}}
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from ragspec.core import Block, BlockKind, Passage
from ragspec.retrieval.chunking import Span, sentences
from ragspec.retrieval.chunking.chunker import SEPARATOR
from ragspec.retrieval.search.analysis import COMMON_WORDS, Analyzer
from ragspec.retrieval_config import AnalyzerConfig

_MAX_ANNOUNCED_CHARS = 240
"""Of list items, rows or lines of code that come with the sentence before them, beyond the first; and of such sentences, beyond
the last."""
_MAX_TERM_CHARS = 60
_BULLET = re.compile(r"(?:[-*•+]|\d{1,3}[.)])[ \t]+")
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
            is_value = unit.is_term and bool(section) and section[-1].announces
            section.append(unit._replace(announces=False) if is_value else unit)
        elif section and "|" in text and _TABLE_RULE.fullmatch(text):
            section.pop()  # the header above the rule
    yield section


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


_SATURATION, _LENGTH_WEIGHT = 1.2, 0.3
"""BM25's k1 and b; sentences are short, so their length counts less than a passage's."""
_MAX_TOKENS, _MAX_CHARS = 12, 120
"""Of a span, from its begin on: spans that are equal so far get one bias."""
_LEAST_BIAS = -100.0


def quote_bias(
    question: str,
    passages: Sequence[Passage],
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    weight: float,
) -> dict[tuple[int, ...], dict[int, float]]:
    """Biases of the next token, in logits, by the output tokens before it. `weight`: of the score, in logits.

    Spans that hold no word of the question get `-weight` times the best score.
    """
    spans = {passage.text[start:end] for passage in passages for run in quotable_runs(passage) for start, end in run}
    texts = sorted(spans)
    scores = _scores(question, texts)
    best: dict[tuple[int, ...], float] = defaultdict(float)
    for ids, score in zip(encode([f'"{text[:_MAX_CHARS]}' for text in texts]), scores, strict=True):
        for end in range(min(len(ids), _MAX_TOKENS) + 1):
            begin = tuple(ids[:end])
            best[begin] = max(best[begin], score)
    biases: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for begin, score in best.items():
        if begin and score < best[begin[:-1]]:
            biases[begin[:-1]][begin[-1]] = max(_LEAST_BIAS, weight * (score - best[begin[:-1]]))
    return dict(biases)


def _scores(question: str, texts: Sequence[str]) -> list[float]:
    """BM25 of each text over that of a text of average length that holds each word of the question once."""
    terms = [Counter(_terms(text)) for text in texts]
    holding = Counter(term for own in terms for term in own)
    asked = set(_terms(question)) - _common()
    weights = {term: math.log1p((len(texts) - holding[term] + 0.5) / (holding[term] + 0.5)) for term in sorted(asked)}
    whole, average = sum(weights.values()), sum(map(Counter.total, terms)) / max(1, len(terms))

    def score(own: Mapping[str, int], length: int) -> float:
        damping = _SATURATION * (1.0 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * length / average)
        held = ((weights[term], own[term]) for term in weights if term in own)
        return sum(weight * count * (_SATURATION + 1.0) / (count + damping) for weight, count in held) / whole

    return [score(own, own.total()) if whole and average else 0.0 for own in terms]


@cache
def _analyzer() -> Analyzer:
    return Analyzer(AnalyzerConfig())


@cache
def _common() -> frozenset[str]:
    return frozenset(term for words in COMMON_WORDS.values() for term in _terms(words))


def _terms(text: str) -> list[str]:
    return _analyzer().terms(text, own_only=True)
