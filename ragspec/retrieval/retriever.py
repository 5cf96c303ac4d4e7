"""Queries to passages, and documents to an index.

Owns the order of the steps (encode, search, fuse, rerank) and which generation they see; the encoder, the shards and the reranker
each know their own part.

    >>> build_index(documents, Path("index"), encoder)
    >>> retriever = Retriever.from_config(RetrieverConfig(index_dir="index"), EncoderConfig())
    >>> retriever.retrieve(["When did it rain?"], k=3).passages
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ragspec.config import EncoderConfig, IndexConfig, RetrieverConfig
from ragspec.core import Document, Passage, check_text
from ragspec.errors import ConfigError, InputError, StoreError
from ragspec.retrieval.analysis import Analyzer
from ragspec.retrieval.chunking import embedded_text
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.fusion import reciprocal_rank_fusion
from ragspec.retrieval.manifest import Manifest, read_current
from ragspec.retrieval.rerank import Reranker, RerankerConfig
from ragspec.retrieval.search import Hit, Scope, Shard, ShardLike
from ragspec.retrieval.sparse import SparseConfig, sparse_query
from ragspec.retrieval.store import Store, check_encoder
from ragspec.retrieval.writer import IndexWriter

Progress = Callable[[int, int], None]
"""Called with (documents read, passages encoded) so far."""

EVERYTHING = Scope()
"""What belongs to nobody in particular."""


class Retrieval(NamedTuple):
    """The passages of each query, best first, and the generation of the index that gave them."""

    passages: list[list[Passage]]
    generation: str


class PairScorer(Protocol):
    """Scores texts against a query; higher is better, and no pair depends on another."""

    def scores(self, query: str, texts: Sequence[str]) -> NDArray[np.float64]: ...


class View(NamedTuple):
    """One generation and what searches it."""

    store: Store
    shard: ShardLike
    analyzer: Analyzer


class Retriever:
    """Finds passages in the generation of an index that is current when a query comes. Safe to call from several threads."""

    def __init__(
        self,
        encoder: TextEncoder,
        store: Store,
        config: RetrieverConfig | None = None,
        *,
        reranker: PairScorer | None = None,
        shard: Callable[[Store], ShardLike] | None = None,
        follow: bool = True,
    ) -> None:
        """`shard` opens a generation's segments, in this process if None. `follow` False: stay with the generation of `store`.

        Raises: EncoderMismatch, ConfigError, StoreCorrupt.
        """
        check_encoder(store.manifest, encoder.identity)
        self._encoder = encoder
        self._config = config or RetrieverConfig()
        self._reranker = reranker
        self._shard = shard or self._local_shard
        self._follow = follow
        self._lock = threading.Lock()
        self._view = self._opened(store)

    @classmethod
    def from_config(cls, config: RetrieverConfig, encoder: EncoderConfig) -> Retriever:
        """Raises: ConfigError without an index folder, StoreError or ModelError if index or models cannot be used."""
        if not config.index_dir:
            raise ConfigError("retriever.index_dir is not set: build an index first, then name its folder")
        read_current(Path(config.index_dir))  # Why first: a missing index is told before seconds of loading a model
        loaded = Encoder.load(encoder)
        reranker = Reranker.load(RerankerConfig(model=config.reranker)) if config.reranker else None
        store = Store.open(config.index_dir, loaded.identity, pointer=config.pointer)
        return cls(loaded, store, config, reranker=reranker, follow=not config.pointer)

    @property
    def generation(self) -> str:
        """Names the current generation and its content; equal generations give equal passages."""
        return self._current().store.generation

    def retrieve(self, queries: Sequence[str], k: int, scope: Scope = EVERYTHING) -> Retrieval:
        """The `k` best passages of each query, best first, with their scores.

        Fewer only if the scope has fewer or, in a search by words alone, fewer passages hold one of the query's. All queries see
        one generation, and a query's result does not depend on the others. Scores are cosine, BM25, the sum of reciprocal ranks
        or the reranker's; equal ones are ordered by (document id, ordinal).
        Raises: InputError if a query is empty or not text; StoreError if the index was changed into one that cannot be read.
        """
        for query in queries:
            check_text(query, "the question")
        view = self._current()
        try:
            return self._retrieved(view, queries, k, scope)
        except StoreError:  # a shard elsewhere had to open its segments again, and the generation is gone
            newer = self._current()
            if newer is view:
                raise
            return self._retrieved(newer, queries, k, scope)

    def _retrieved(self, view: View, queries: Sequence[str], k: int, scope: Scope) -> Retrieval:
        hits = self._ranked(view, queries, self._depth(k), scope) if queries and k > 0 else [[] for _ in queries]
        if self._reranker is None:
            return Retrieval([view.shard.passages(some[:k]) for some in hits], view.store.generation)
        found = (view.shard.passages(some) for some in hits)
        passages = [self._reranked(self._reranker, *each)[:k] for each in zip(queries, found, strict=True)]
        return Retrieval(passages, view.store.generation)

    def _depth(self, k: int) -> int:
        return k if self._reranker is None else max(k, self._config.rerank_depth)

    def _ranked(self, view: View, queries: Sequence[str], k: int, scope: Scope) -> list[list[Hit]]:
        mode = self._config.mode
        depth = max(k, self._config.fusion_depth) if mode == "hybrid" else k
        lists = []
        if mode != "sparse":
            lists.append(view.shard.dense(self._encoder.encode(queries, "query"), depth, scope))
        if mode != "dense":
            lists.append(self._by_words(view, queries, depth, scope))
        if mode != "hybrid":
            return lists[0]
        fused = (reciprocal_rank_fusion(each, self._config.fusion_depth) for each in zip(*lists, strict=True))
        return [hits[:k] for hits in fused]

    def _by_words(self, view: View, queries: Sequence[str], k: int, scope: Scope) -> list[list[Hit]]:
        terms = [view.analyzer.terms(query) for query in queries]
        distinct = sorted({term for some in terms for term in some})
        statistics = view.shard.statistics(distinct, scope.tenant)
        return view.shard.sparse([sparse_query(some, statistics, SparseConfig()) for some in terms], k, scope)

    def _reranked(self, reranker: PairScorer, query: str, passages: Sequence[Passage]) -> list[Passage]:
        scores = reranker.scores(query, [embedded_text(passage) for passage in passages])
        scored = [replace(passage, score=float(score)) for passage, score in zip(passages, scores, strict=True)]
        return sorted(scored, key=lambda passage: (-passage.score, passage.document_id, passage.ordinal))

    def _current(self) -> View:
        """The current generation, opened if it is a new one."""
        with self._lock:
            store = self._view.store.refreshed() if self._follow else self._view.store
            while store is not self._view.store:
                check_encoder(store.manifest, self._encoder.identity)
                try:
                    self._view = self._opened(store)
                except StoreError:  # a shard elsewhere was too late: the generation is gone, there is a newer one
                    newer = store.refreshed()
                    if newer is store:
                        raise
                    store = newer
            return self._view

    def _local_shard(self, store: Store) -> Shard:
        shard = Shard(store.segments, self._config.device)
        shard.load()
        return shard

    def _opened(self, store: Store) -> View:
        analyzer = Analyzer(store.manifest.config.words)
        if analyzer.id != store.manifest.analyzer and self._config.mode != "dense":
            raise ConfigError(
                f"the index cuts texts into words by {store.manifest.analyzer}, here it would be {analyzer.id}: build it again"
            )
        return View(store, self._shard(store), analyzer)


def build_index(
    documents: Iterable[Document],
    index_dir: str | Path,
    encoder: TextEncoder,
    config: IndexConfig | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Make an index of exactly these documents, the next generation of the one there; the one before stays usable meanwhile.

    Documents that are in it already are not encoded again. Streams: only some thousand passages are in memory at a time.
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
