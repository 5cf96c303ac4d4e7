"""The records of searches, for callers that speculate on the next results.

Searches nothing.

    >>> pinned = index.pinned()
    >>> result = pinned.search(pinned.encode(["When did it rain?"]), k=1, prefetch_k=20)
    >>> result.passages[0], result.candidates
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ragspec.core import Passage
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search.bm25 import TermStatistics

RetrievalMode = Literal["dense", "sparse", "hybrid"]

PassageKey = tuple[str, int]
"""(document id, ordinal), which names a passage in any generation."""


@dataclass(frozen=True, slots=True)
class Query:
    """An encoded query. The same record serves a guess and its verification.

    `terms` hold repetitions, and are empty in mode dense. Queries of one index are equal if their texts are.
    Shapes: vector [E] float32, L2-normalised; None in mode sparse.
    """

    text: str
    vector: FloatArray | None = field(compare=False)
    terms: tuple[str, ...]


class ScorablePassage(NamedTuple):
    """A passage with all that scoring it needs. It belongs to no query: the passage's score is 0.

    `term_counts` count the terms of `ragspec.retrieval.chunking.embedded_text`; empty in mode dense.
    Shapes: vector [E] float32, as stored; None in mode sparse.
    """

    passage: Passage
    vector: FloatArray | None
    term_counts: Mapping[str, int]


class SearchResult(NamedTuple):
    """The result of a search for some queries.

    `passages`: the best k of each query, best first, with scores. `candidates`: the best max(k, prefetch_k) of each query, query
    by query, without known passages; empty for a prefetch_k of 0. `statistics` count the passages that the scope's tenant may
    read, their lengths, and the frequency of every term of `candidates`; empty in mode dense and for a prefetch_k of 0. `missing`
    names segments that could not be searched; the other fields are then the answer without them, which no cache may keep. Empty
    unless `RetrieverConfig.fail_closed` is off. `closeness`: the calibrated score of each query's best passage, which is the
    probability that the index holds an answer; empty but in mode hybrid, and with `prefetch_k`.
    """

    passages: list[list[Passage]]
    candidates: dict[PassageKey, ScorablePassage]
    statistics: TermStatistics
    generation: str
    missing: tuple[str, ...] = ()
    closeness: tuple[float, ...] = ()
