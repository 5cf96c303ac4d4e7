"""A bias on the tokens of a quote: the more of the question's words a span holds, the likelier an answer quotes it.

Owns the score of a span: BM25 among the spans that the passages let an answer quote, over the score of a span that held every
word of the question once; common words do not count. The bias makes a tree of the spans' tokens. Where spans part, each branch
gets the score of its best span less that of the best of all branches, times a weight. The best span so gets no bias at any token,
and whether an answer quotes at all does not change. The bias is a sampling parameter, so drafts change no token.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), for BM25.

    >>> quote_bias("Who built the mill?", passages, prompts.plain_ids, weight=20.0)
    {(18,): {540: -7.3}, (18, 504): {9103: -20.0}}
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from ragspec.core import Passage
from ragspec.rag.quotable import quotable_runs
from ragspec.retrieval.search.analysis import COMMON_WORDS, Analyzer
from ragspec.retrieval_config import AnalyzerConfig

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
