"""The records and the protocol of searches, for callers that speculate on the next results.

Searches nothing.

    >>> pinned = index.pinned()
    >>> result = pinned.search(pinned.encode(["When did it rain?"]), k=1, prefetch_k=20)
    >>> result.passages[0], result.candidates
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ragspec.core import Passage
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search.bm25 import TermStatistics
from ragspec.retrieval.search.relevance import Relevance
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, SearchScope

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


class Searchable(Protocol):
    """An index, or one generation of it. Safe to call from several threads."""

    def search(
        self,
        queries: Sequence[Query],
        k: int,
        scope: SearchScope = PUBLIC_SCOPE,
        *,
        prefetch_k: int = 0,
        known: frozenset[PassageKey] = frozenset(),
    ) -> SearchResult:
        """`passages` are bitwise the same for every `prefetch_k`, and a query's do not depend on the other queries.

        Raises: StoreError if the generation cannot be read, RetrievalError if the index or a part of it does not answer.
        """
        ...


class IndexLike(Searchable, Protocol):
    """An index in this process or elsewhere."""

    @property
    def generation(self) -> str:
        """Names the current generation and its content; equal generations give equal passages."""
        ...

    @property
    def mode(self) -> RetrievalMode:
        """How the index ranks. A cache of its candidates must rank the same way."""
        ...

    @property
    def relevance(self) -> Relevance | None:
        """Orders the best passages; None: by their ranks alone."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether searches run outside this process."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Raises: InputError if a text is empty or not text, or if its vector is not finite."""
        ...

    def pinned(self) -> IndexLike:
        """An index that stays with the current generation."""
        ...
