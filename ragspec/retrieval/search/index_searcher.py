"""Searches one generation of an index: dense, sparse or hybrid, fused, reranked, with prefetched candidates.

Owns the order of these steps. Knows no encoder: queries come encoded.

    >>> searcher = IndexSearcher(Store.open("index"), RetrieverConfig(mode="sparse"))
    >>> queries = encode_queries(["When did it rain?"], "sparse", encoder, searcher.terms)
    >>> searcher.search(Lookup(queries, k=3)).passages
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Protocol

import numpy as np

from ragspec.config import RetrieverConfig
from ragspec.core import Passage, check_text
from ragspec.errors import ConfigError, InputError
from ragspec.retrieval.chunking import embedded_text
from ragspec.retrieval.encoder import FloatArray, TextEncoder
from ragspec.retrieval.index.manifest import DENSE, Manifest
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScoring
from ragspec.retrieval.search.analysis import Analyzer, rules_of
from ragspec.retrieval.search.bm25 import TermStatistics, idf, sparse_query
from ragspec.retrieval.search.relevance import RANK_OFFSET, Features, QueryWeights, ReadHit, Relevance, hits_to_read
from ragspec.retrieval.search.segment_search import (
    PUBLIC_SCOPE,
    Lookup,
    PassageKey,
    Query,
    RetrievalMode,
    ScorablePassage,
    SearchHit,
    SearchResult,
    SearchScope,
    Shard,
    SplitShard,
)


class TermFunction(Protocol):
    def __call__(self, text: str, /, *, own_only: bool = False) -> tuple[str, ...]:
        """As `Analyzer.terms`."""


_TEXTS_KEPT = 4096
FUSION_DEPTH, RERANK_DEPTH = 100, 32
"""The best passages of each list that are fused, and the best that are reranked; as many as are requested if that is more."""
CALIBRATED_THRESHOLD = 0.12
"""For `RetrieverConfig.abstain_below` with the default encoder: 3 in 100 answerable questions were below it."""
_COSINE, _COVERED, _INTERCEPT = 10.5, 8.2, -10.3
_MOST_COMMON = 2.2
"""Weight of a common word at most: that of a word in every tenth passage."""


class IndexSearcher:
    """Searches one generation. Safe to call from several threads."""

    def __init__(
        self,
        store: Store,
        config: RetrieverConfig,
        *,
        scoring: PairScoring | None = None,
        shard: SplitShard | None = None,
    ) -> None:
        """`scoring` reranks; `shard` holds the segments; None: this process does. Raises: ConfigError, StoreCorrupt."""
        self.store = store
        analyzer = analyzer_of(store.manifest, config.mode)
        self.terms, self._common_terms = term_function(analyzer), analyzer.common_terms
        self._passage_terms = lru_cache(_TEXTS_KEPT)(self.terms)
        self.relevance = Relevance(self.terms)
        self._config = config
        self._scoring = scoring
        self._approximate = any(DENSE in record.files for record in store.manifest.segments)
        self._shard = shard or Shard.open(store.segments, config.device, config.gpu_memory_bytes)

    def search(self, lookup: Lookup) -> SearchResult:
        """As `ragspec.retrieval.retriever.GenerationView`.

        Why queries are analysed again: another generation may have analysed them by other rules.
        """
        queries, k, scope, prefetch_k, known = lookup._replace(k=max(lookup.k, 0))
        width = max(k, prefetch_k) if prefetch_k > 0 else 0
        best = self._best(queries, k, width, scope)
        shown = [hit for some in best for hit in some[:k]]
        texts = iter(self._shard.passages(shown, self._config.expand_passages))
        passages = [list(islice(texts, len(some[:k]))) for some in best]
        candidates = self._candidates((hit for some in best for hit in some[:width]), known)
        statistics = self._statistics(candidates.values(), scope) if width else TermStatistics()
        is_calibrated = self._config.mode == "hybrid" and k and not width  # Why not: verified guesses need no score
        closeness = tuple(self._closeness(queries, best, passages, scope)) if is_calibrated else ()
        return SearchResult(passages, candidates, statistics, self.store.generation, closeness=closeness)

    def _closeness(
        self,
        queries: Sequence[Query],
        best: Sequence[Sequence[SearchHit]],
        passages: Sequence[Sequence[Passage]],
        scope: SearchScope,
    ) -> Iterator[float]:
        """A logistic model of the nearest passage's cosine, and of the share of the query's words that one passage holds, rare
        words weighing more. Its weights were fitted on questions of SQuAD with and without their article in the index.

        Why common words have a limit, and none weight where no passage holds them: tables have no "what" and no "does", and few
        documents have each of them.
        """
        terms = [frozenset(self.terms(query.text, own_only=True)) for query in queries]
        counts = self._shard.statistics(sorted(frozenset().union(*terms)), scope.tenant)
        for query, own, hits, found in zip(queries, terms, best, passages, strict=True):
            weights = {term: idf(counts.num_rows, counts.frequencies.get(term, 0)) for term in own}
            for term in own & self._common_terms(query.text):
                weights[term] = min(weights[term], _MOST_COMMON) if counts.frequencies.get(term, 0) else 0.0
            vectors = self._shard.vectors(hits[: len(found)])
            cosine = max((float(vector @ _vector(query)) for vector in vectors), default=0.0)
            held = [own & frozenset(self._passage_terms(embedded_text(passage))) for passage in found]
            covered = max((sum(weights[term] for term in sorted(some)) for some in held), default=0.0)
            share = covered / (sum(weights[term] for term in sorted(own)) or 1.0)
            yield 1.0 / (1.0 + math.exp(-(_COSINE * cosine + _COVERED * share + _INTERCEPT)))

    def _best(self, queries: Sequence[Query], k: int, width: int, scope: SearchScope) -> list[list[SearchHit]]:
        """At least the best max(k, width) of each query, if there are as many; the first k are the same for every width."""
        depth = k if self._scoring is None or not (k or width) else max(k, RERANK_DEPTH)
        hits = self._ranked(queries, max(depth, width), scope)
        finds_others = self._approximate and self._list_depth(depth) < self._list_depth(width)
        if finds_others:  # a wider approximate search finds other passages
            near = self._ranked(queries, depth, scope)
            hits = [_first_then(*each) for each in zip(near, hits, strict=True)]
        if self._scoring is None:
            return hits
        best = self._reranked(self._scoring, queries, [some[:depth] for some in hits])
        return [[*first, *some[depth:]] for first, some in zip(best, hits, strict=True)]

    def _list_depth(self, depth: int) -> int:
        return max(depth, FUSION_DEPTH) if self._config.mode == "hybrid" else depth

    def _ranked(self, queries: Sequence[Query], depth: int, scope: SearchScope) -> list[list[SearchHit]]:
        if not queries or depth < 1:
            return [[] for _ in queries]
        lists = self._lists(queries, self._list_depth(depth), scope)
        if self._config.mode != "hybrid":
            return lists[0]
        fused = self._fused(lists)
        if self._config.fusion == "learned":
            read = self._read_first(queries, lists, fused, scope)
            fused = [self.relevance.ordered(*each, depth) for each in zip(read, fused, strict=True)]
        return [hits[:depth] for hits in fused]

    def _lists(self, queries: Sequence[Query], depth: int, scope: SearchScope) -> list[list[list[SearchHit]]]:
        """The results by meaning, by words, or both."""
        lists = []
        if self._config.mode != "sparse":
            vectors = np.stack([_vector(query) for query in queries])  # [B, E]
            lists.append(self._shard.dense(vectors, depth, scope))
        if self._config.mode != "dense":
            lists.append(self._by_words(queries, depth, scope))
        return lists

    def _fused(self, lists: Sequence[Sequence[list[SearchHit]]]) -> list[list[SearchHit]]:
        return [reciprocal_rank_fusion(each, FUSION_DEPTH) for each in zip(*lists, strict=True)]

    def read_candidates(self, queries: Sequence[Query]) -> list[list[tuple[Passage, Features]]]:
        """The passages that are read of each query, in the order of their fused ranks, for learning the weights."""
        lists = self._lists(queries, FUSION_DEPTH, PUBLIC_SCOPE)
        read = self._read_first(queries, lists, self._fused(lists), PUBLIC_SCOPE)
        return [[(each.passage, each.features) for each in own] for own in read]

    def _read_first(
        self,
        queries: Sequence[Query],
        lists: Sequence[Sequence[list[SearchHit]]],
        fused: Sequence[list[SearchHit]],
        scope: SearchScope,
    ) -> list[list[ReadHit]]:
        depth = FUSION_DEPTH
        first = [hits_to_read(hits, depth) for hits in fused]
        passages = iter(self._shard.passages([hit for hits in first for hit in hits]))
        terms = [self.terms(query.text) for query in queries]
        statistics = self._shard.statistics(sorted({term for own in terms for term in own}), scope.tenant)
        read = []
        for query, own, hits, rankings in zip(queries, terms, first, zip(*lists, strict=True), strict=True):
            weights = QueryWeights.of(query.text, own, statistics)
            shown = list(islice(passages, len(hits)))
            read.append(self.relevance.read(weights, hits, shown, [ranking[:depth] for ranking in rankings]))
        return read

    def _by_words(self, queries: Sequence[Query], k: int, scope: SearchScope) -> list[list[SearchHit]]:
        terms = [self.terms(query.text) for query in queries]
        distinct = sorted({term for some in terms for term in some})
        statistics = self._shard.statistics(distinct, scope.tenant)
        return self._shard.sparse([sparse_query(some, statistics) for some in terms], k, scope)

    def _reranked(
        self, scoring: PairScoring, queries: Sequence[Query], hits: Sequence[Sequence[SearchHit]]
    ) -> list[list[SearchHit]]:
        texts = map(embedded_text, self._shard.passages([hit for some in hits for hit in some]))
        asked = [(query.text, list(islice(texts, len(some)))) for query, some in zip(queries, hits, strict=True)]
        return [
            sorted(hit._replace(negative_score=-float(score)) for hit, score in zip(some, scores, strict=True))
            for some, scores in zip(hits, scoring(asked), strict=True)
        ]

    def _candidates(self, hits: Iterable[SearchHit], known: frozenset[PassageKey]) -> dict[PassageKey, ScorablePassage]:
        fresh = {hit.passage: hit._replace(negative_score=-0.0) for hit in hits if hit.passage not in known}
        found, mode = list(fresh.values()), self._config.mode
        passages = self._shard.passages(found, self._config.expand_passages)
        vectors = [None for _ in found] if mode == "sparse" else self._shard.vectors(found)
        counts = [{} if mode == "dense" else Counter(self._passage_terms(embedded_text(each))) for each in passages]
        return dict(zip(fresh, map(ScorablePassage, passages, vectors, counts), strict=True))

    def _statistics(self, candidates: Iterable[ScorablePassage], scope: SearchScope) -> TermStatistics:
        if self._config.mode == "dense":
            return TermStatistics()
        return self._shard.statistics(sorted({t for each in candidates for t in each.term_counts}), scope.tenant)


def reciprocal_rank_fusion(rankings: Sequence[Sequence[SearchHit]], depth: int) -> list[SearchHit]:
    """Hits among the first `depth` of any ranking, by the sum of 1 / (60 + rank), ranks from 1; then the rest, by 1 / (60 + best
    rank), which is always less. Ties by document id and ordinal. So the first hits do not depend on how many are wanted.

    Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion outperforms Condorcet (SIGIR 2009).
    """
    first, deeper = dict[PassageKey, float](), dict[PassageKey, float]()
    places = dict[PassageKey, SearchHit]()
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            passage, share = hit.passage, 1.0 / (RANK_OFFSET + rank)
            places[passage] = hit
            if rank <= depth:
                first[passage] = first.get(passage, 0.0) + share
            else:
                deeper[passage] = max(deeper.get(passage, 0.0), share)
    return sorted(SearchHit(-score, *places[passage][1:]) for passage, score in (deeper | first).items())


def encode_queries(texts: Sequence[str], mode: RetrievalMode, encoder: TextEncoder, terms: TermFunction) -> list[Query]:
    """The texts as queries of that mode. Mode sparse computes no vectors.

    Raises: InputError if a text is empty or not text, or if its vector is not finite.
    """
    for text in texts:
        check_text(text, "the question")
    words = [() if mode == "dense" else terms(text) for text in texts]
    has_vectors = mode != "sparse" and bool(texts)
    vectors = [*encoder.encode(texts, "query")] if has_vectors else [None for _ in texts]  # [B, E]
    for text, vector in zip(texts, vectors, strict=True):
        if vector is not None and not np.isfinite(vector).all():
            raise InputError(f"the encoder {encoder.identity.id} gave a vector that is not finite for {text[:80]!r}")
    return [Query(*each) for each in zip(texts, vectors, words, strict=True)]


def analyzer_of(manifest: Manifest, mode: RetrievalMode) -> Analyzer:
    """The analyzer that an index was built with.

    Raises: ConfigError if the index was built with other rules; mode dense needs none.
    """
    analyzer = Analyzer(manifest.config.words, rules_of(manifest.analyzer))
    if analyzer.id != manifest.analyzer and mode != "dense":
        raise ConfigError(
            f"the index cuts texts into words by {manifest.analyzer}, here it would be {analyzer.id}: build it again"
        )
    return analyzer


def term_function(analyzer: Analyzer) -> TermFunction:
    """The function that turns texts into the terms of an index. Caches no text, since texts belong to tenants."""
    return lambda text, /, *, own_only=False: tuple(analyzer.terms(text, own_only=own_only))


def _vector(query: Query) -> FloatArray:
    if query.vector is None:
        raise InputError("a query for a search by meaning has no vector: it was encode_queries for word search")
    return query.vector


def _first_then(near: Sequence[SearchHit], others: Iterable[SearchHit]) -> list[SearchHit]:
    """`near`, then the hits of `others` for other passages."""
    passages = {hit.passage for hit in near}
    return [*near, *(hit for hit in others if hit.passage not in passages)]
