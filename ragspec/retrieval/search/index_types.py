"""What is asked of an index and what it says, for those who guess its next answers from the ones before.

Owns plain records and the protocol; searches nothing.

    >>> pinned = index.pinned()
    >>> lookup = pinned.search(pinned.encode(["When did it rain?"]), k=1, prefetch_k=20)
    >>> lookup.passages[0], lookup.candidates
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ragspec.core import Passage
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search.bm25 import TermStatistics
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, SearchScope

RetrievalMode = Literal["dense", "sparse", "hybrid"]

PassageKey = tuple[str, int]
"""(document id, ordinal): what names a passage in any generation."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question as an index looks for it; the same record serves a guess and its check.

    `terms` are with repetitions, and none in mode dense. Queries of one index are equal if their texts are.
    Shapes: vector [E] float32, L2-normalised; None in mode sparse.
    """

    text: str
    vector: FloatArray | None = field(compare=False)
    terms: tuple[str, ...]


class ScorablePassage(NamedTuple):
    """A passage with what scoring it takes, wherever that happens. No query's: the passage's score is 0.

    `term_counts` are those of the text it is found by (`ragspec.retrieval.chunking.passage_text`), none in mode dense.
    Shapes: vector [E] float32, as stored; None in mode sparse.
    """

    passage: Passage
    vector: FloatArray | None
    term_counts: Mapping[str, int]


class SearchResult(NamedTuple):
    """What the index said about some queries.

    `passages` are the best k of each query, best first, with scores. `candidates` are the best max(k, prefetch_k) of every query,
    in that order and by query, less those that were known already; none for a prefetch_k of 0. `statistics` count what the
    scope's tenant may read: all its passages and their lengths, and the frequency of every term of `candidates`; empty in mode
    dense and for a prefetch_k of 0. `missing` names segments that could not be searched: all else is what an index without them
    says, and nothing to remember. Empty unless `RetrieverConfig.fail_closed` is off.
    """

    passages: list[list[Passage]]
    candidates: dict[PassageKey, ScorablePassage]
    statistics: TermStatistics
    generation: str
    missing: tuple[str, ...] = ()


class IndexLike(Protocol):
    """An index in this process or elsewhere. Safe to call from several threads."""

    @property
    def generation(self) -> str:
        """Names the current generation and its content; equal generations give equal passages."""
        ...

    @property
    def mode(self) -> RetrievalMode:
        """How it ranks, and so how a cache of its candidates must."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether its searches leave this process's processors to others."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Raises: InputError if a text is empty or not text, or if its vector is not finite."""
        ...

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

        Raises: StoreError if the generation cannot be read (any more), RetrievalError if the index, or a part of it, does not
        answer.
        """
        ...

    def pinned(self) -> IndexLike:
        """The generation that is current now, whatever is committed later."""
        ...
