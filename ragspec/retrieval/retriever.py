"""The retriever: encodes queries and searches the current generation of an index. Also builds an index.

Owns the generation that queries see; `ragspec.retrieval.search.index_searcher` searches it.

    >>> build_index(documents, Path("index"), encoder)
    >>> retriever = Retriever.from_config(RetrieverConfig(index_dir="index"), EncoderConfig())
    >>> retriever.retrieve(["When did it rain?"], k=3).passages
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from ragspec.config import EncoderConfig, IndexConfig, RetrieverConfig
from ragspec.core import Document, Passage
from ragspec.errors import InputError, StoreError
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.manifest import Manifest, read_current
from ragspec.retrieval.index.pointer import configured_index_dir
from ragspec.retrieval.index.store import Store, check_encoder
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.rerank import Reranker, score_in_turn
from ragspec.retrieval.search.index_searcher import IndexSearcher, TermFunction, encode_queries
from ragspec.retrieval.search.relevance import Relevance
from ragspec.retrieval.search.segment_search import (
    PUBLIC_SCOPE,
    Lookup,
    PassageKey,
    Query,
    RetrievalMode,
    SearchResult,
    SearchScope,
    SplitShard,
)

ProgressCallback = Callable[[int, int], None]
"""Called with (documents read, passages encoded) so far."""


@dataclass(frozen=True, slots=True)
class RetrievalTimes:
    """Seconds of a retrieval, wall clock; 0 if it was answered from memory. Times never make two results unequal."""

    encode_s: float = field(default=0.0, compare=False)
    search_s: float = field(default=0.0, compare=False)


FROM_MEMORY = RetrievalTimes()


class RetrievalResult(NamedTuple):
    """The passages of each query, best first, and the generation of the index that they come from.

    `missing` names segments that could not be searched, as in `SearchResult`. Empty unless `RetrieverConfig.fail_closed` is off.
    `closeness` as in `SearchResult`.
    """

    passages: list[list[Passage]]
    generation: str
    missing: tuple[str, ...] = ()
    closeness: tuple[float, ...] = ()
    times: RetrievalTimes = FROM_MEMORY

    @classmethod
    def of(cls, found: SearchResult, begin_s: float, encoded_s: float) -> RetrievalResult:
        """A search that ends now. `begin_s`, `encoded_s`: when it began, and had its vectors, of `time.perf_counter`."""
        times = RetrievalTimes(encoded_s - begin_s, time.perf_counter() - encoded_s)
        return cls(found.passages, found.generation, found.missing, found.closeness, times)


class GenerationView(Protocol):
    """Searches one generation: an `IndexSearcher`, or the shards of a cluster. Safe to call from several threads."""

    @property
    def store(self) -> Store: ...

    @property
    def terms(self) -> TermFunction: ...

    def search(self, lookup: Lookup) -> SearchResult:
        """`passages` are bitwise the same for every `prefetch_k`, and a query's do not depend on the other queries.

        Raises: StoreError if the generation cannot be read, RetrievalError if the index or a part of it does not answer.
        """
        ...


class Retriever:
    """Searches the generation that is current when a query arrives. Safe to call from several threads."""

    is_elsewhere = False
    """Whether searches run outside this process."""

    def __init__(
        self,
        encoder: TextEncoder,
        store: Store,
        config: RetrieverConfig | None = None,
        *,
        reranker: Reranker | None = None,
        shard: Callable[[Store], SplitShard] | None = None,
        follow: bool = True,
    ) -> None:
        """`shard` opens the segments of a generation; None: in this process. `follow` False: keep the generation of `store`.

        Raises: EncoderMismatch, ConfigError, StoreCorrupt.
        """
        self.encoder = encoder
        self._config = config or RetrieverConfig()
        self.mode: RetrievalMode = self._config.mode
        """How the index ranks. A cache of its candidates must rank the same way."""
        self._reranker = reranker
        self._shard = shard
        self._follow = follow
        self._lock = threading.Lock()
        self._view: GenerationView = self._opened(store)

    @classmethod
    def from_config(cls, config: RetrieverConfig, encoder: EncoderConfig | TextEncoder) -> Retriever:
        """Raises: ConfigError without an index folder, StoreError or ModelError if index or models cannot be used."""
        read_current(configured_index_dir(config))  # Why first: a missing index fails before a model loads for seconds
        loaded = Encoder.load(encoder) if isinstance(encoder, EncoderConfig) else encoder
        reranker = Reranker.load(config.reranker) if config.reranker else None
        store = Store.open(config.index_dir, loaded.identity, pointer=config.pointer)
        return cls(loaded, store, config, reranker=reranker, follow=not config.pointer)

    @property
    def generation(self) -> str:
        """Names the current generation and its content; equal generations give equal passages."""
        return self._current().store.generation

    @property
    def store(self) -> Store:
        """The current generation; without segments if they are searched elsewhere. Raises: StoreError."""
        return self._current().store

    @property
    def relevance(self) -> Relevance | None:
        """Orders the best passages; None: by their ranks alone."""
        is_learned = self.mode == "hybrid" and self._config.fusion == "learned"
        return Relevance(self._current().terms) if is_learned else None

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Raises: InputError if a text is empty or not text, or if its vector is not finite."""
        return encode_queries(texts, self.mode, self.encoder, self._current().terms)

    def search(
        self,
        queries: Sequence[Query],
        k: int,
        scope: SearchScope = PUBLIC_SCOPE,
        *,
        prefetch_k: int = 0,
        known: frozenset[PassageKey] = frozenset(),
    ) -> SearchResult:
        """As `GenerationView.search`. With a reranker, passages and candidates come in its order.

        Raises: StoreError if the current generation cannot be read; InputError for a query without a vector.
        """
        view, lookup = self._current(), Lookup(queries, k, scope, prefetch_k, known)
        try:
            return view.search(lookup)
        except StoreError:  # a remote shard opened its segments again, and the generation is gone
            newer = self._current()
            if newer is view:
                raise
            return newer.search(lookup)

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope = PUBLIC_SCOPE) -> RetrievalResult:
        """The `k` best passages of each query, best first, with their scores.

        Fewer only if the scope has fewer passages or, in mode sparse, fewer passages hold a term of the query. All queries see
        one generation, and a query's result does not depend on the other queries. Scores are cosines, BM25, sums of reciprocal
        ranks or the scores of the reranker. Equal scores are ordered by (document id, ordinal).
        Raises: InputError if a query is empty or not text; StoreError if the current generation cannot be read.
        """
        begin_s, encoded = time.perf_counter(), self.encode(queries)
        encoded_s = time.perf_counter()
        return RetrievalResult.of(self.search(encoded, k, scope), begin_s, encoded_s)

    def pinned(self) -> Retriever:
        """A retriever that stays with the current generation. Shares all open files with this retriever."""
        view = self._current()
        pinned = copy.copy(self)
        pinned._view, pinned._follow = view, False
        return pinned

    def _current(self) -> GenerationView:
        """The current generation, opened if it is a new one."""
        with self._lock:
            store = self._view.store.refreshed() if self._follow else self._view.store
            if store is not self._view.store:
                self._view = self._opened(store)
            return self._view

    def _opened(self, store: Store) -> GenerationView:
        """Opens the generation of `store`, or a newer generation if remote shards find it removed."""
        while True:
            check_encoder(store.manifest, self.encoder.identity)
            try:
                return self._view_of(store)
            except StoreError:
                newer = store.refreshed() if self._follow else store
                if newer is store:
                    raise
                store = newer

    def _view_of(self, store: Store) -> GenerationView:
        shard = self._shard(store) if self._shard else None
        return IndexSearcher(store, self._config, scoring=score_in_turn(self._reranker), shard=shard)


def build_index(
    documents: Iterable[Document],
    index_dir: str | Path,
    encoder: TextEncoder,
    config: IndexConfig | None = None,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Make an index of exactly these documents, as the next generation of the index in the folder.

    Unchanged documents are not encoded again. Streams: a few thousand passages are in memory at a time.
    Raises: InputError for a document that cannot be indexed or an id that comes twice, SaveError if writing fails; then the
    index is as it was.
    """
    seen: set[str] = set()
    with IndexWriter(index_dir, encoder, config or IndexConfig(), replace=True) as writer:
        for document in documents:
            writer.upsert(document)
            if document.id in seen:
                raise InputError(f"two documents have the id {document.id!r}")
            seen.add(document.id)
            if progress is not None:
                progress(len(seen), writer.changes.encoded)
        if writer.is_empty():
            raise InputError("there is nothing to index: no document holds any text")
        writer.delete_unseen()
        return writer.commit()
