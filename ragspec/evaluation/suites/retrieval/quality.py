"""Ranking quality: recall and nDCG of each mode, of bm25s in the same run, and published figures.

Passages are whole documents (`WholeTexts`), because the known answers are documents.

    >>> Quality(store, encoder).tables(collection, {}, 0, tick)["cranfield"]["BM25"]["nDCG@10"]
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ragspec.config import ChunkingConfig, IndexConfig, RetrieverConfig
from ragspec.errors import ConfigError
from ragspec.evaluation.suites.retrieval.collections import Collection, searched_text
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScorer
from ragspec.retrieval.retriever import Retriever

Mode = Literal["dense", "sparse", "hybrid"]
Rankings = Mapping[str, Sequence[str]]
"""Documents by query, best first."""

Scores = dict[str, float]
Table = dict[str, Scores]

MODES: tuple[Mode, ...] = ("dense", "sparse", "hybrid")
MODE_NAMES: dict[Mode, str] = {"dense": "dense", "sparse": "BM25", "hybrid": "hybrid"}
MEASURES = {f"recall@{k}": f"R@{k}" for k in (1, 5, 10, 20)} | {"nDCG@10": "nDCG@10"}
BM25S = {"bm25s": "en", "bm25s, all words": None}
"""With its default stop words, and without, like our index."""

DEPTH = 20
WHOLE = IndexConfig(chunking=ChunkingConfig(max_chars=10_000_000))

_QUERIES_AT_ONCE = 64
_BM25 = {"k1": 1.2, "b": 0.75, "method": "lucene"}

PUBLISHED: dict[str, dict[str, Scores]] = {
    "squad": {"BM25 *": {"recall@20": 0.711}, "DPR *": {"recall@20": 0.520}, "BM25 + DPR *": {"recall@20": 0.751}},
    "nq": {
        "BM25 *": {"recall@20": 0.629},
        "DPR *": {"recall@20": 0.795},
        "BM25 + DPR *": {"recall@20": 0.826},
        "BM25, BEIR *": {"nDCG@10": 0.3055},
    },
}
PUBLISHED_NOTE = (
    "* published, not directly comparable: other corpora (DPR: 21 million passages of Wikipedia, found if the passage holds the "
    "answer's words, docs/experiments-dpr.md of castorini/pyserini; BEIR: NQ over 2.68 million, castorini/anserini)"
)


class Quality:
    """One index of whole documents, queried in every mode."""

    def __init__(self, store: Store, encoder: TextEncoder, reranker: PairScorer | None = None) -> None:
        self._store = store
        self._encoder = encoder
        self._reranker = reranker

    def tables(
        self, collection: Collection, parts: Mapping[str, Collection], num_reranked: int, tick: Tick
    ) -> dict[str, Table]:
        """A table for the collection and for each of its `parts`, with a column for each mode and for bm25s.

        Reranking is slow: only the first `num_reranked` questions are reranked, beside their hybrid results.
        """
        found = {MODE_NAMES[mode]: self._rankings(collection, mode, tick) for mode in MODES}
        rankings = {label: ranking for label, (ranking, _) in found.items()}
        rankings |= {label: bm25s_rankings(collection, stop_words) for label, stop_words in BM25S.items()}
        tables: dict[str, Table] = {
            name: {label: ranking_scores(ranking, part) for label, ranking in rankings.items()}
            for name, part in {collection.name: collection, **parts}.items()
        }
        whole = tables[collection.name]
        for label, (_, ms_a_query) in found.items():
            whole[label]["ms a query"] = ms_a_query
        if self._reranker is not None:
            some = collection.first(num_reranked)
            for label, reranker in (("hybrid", None), ("hybrid, reranked", self._reranker)):
                ranking, ms_a_query = self._rankings(some, "hybrid", tick, reranker)
                scores = ranking_scores(ranking, some) | {"ms a query": ms_a_query}
                whole[f"{label}, first {len(some.queries)}"] = scores
        whole |= PUBLISHED.get(collection.name, {})
        return tables

    def _rankings(
        self, collection: Collection, mode: Mode, tick: Tick, reranker: PairScorer | None = None
    ) -> tuple[Rankings, float]:
        """Documents found, each at its best passage, and milliseconds a query in batches of 64, encoding included."""
        retriever = Retriever(self._encoder, self._store, RetrieverConfig(mode=mode), reranker=reranker, follow=False)
        ids, texts = list(collection.queries), list(collection.queries.values())
        retriever.retrieve(texts[:1], DEPTH)  # Why: the first one warms up
        found: dict[str, Sequence[str]] = {}
        begin = time.perf_counter()
        for first in range(0, len(ids), _QUERIES_AT_ONCE):
            some = slice(first, first + _QUERIES_AT_ONCE)
            passages = retriever.retrieve(texts[some], DEPTH).passages
            best = [list(dict.fromkeys(passage.document_id for passage in own)) for own in passages]
            found |= dict(zip(ids[some], best, strict=True))
            tick(f"{collection.name}, {'reranked' if reranker else MODE_NAMES[mode]}", len(found), len(ids))
        return found, 1000 * (time.perf_counter() - begin) / len(ids)


def ranking_scores(rankings: Rankings, collection: Collection) -> Scores:
    """Means over the collection's queries. Raises: ConfigError without ir-measures.

    Why ranks in place of scores: ir-measures would order equal scores by document id.
    """
    try:
        import ir_measures
    except ImportError as cause:
        raise ConfigError('this suite needs ir-measures: pip install "ragspec[bench]"') from cause
    run = {i: {document: 1.0 / rank for rank, document in enumerate(rankings[i], 1)} for i in collection.queries}
    relevant = {i: dict(collection.relevant[i]) for i in collection.queries}
    wanted = {name: ir_measures.parse_measure(measure) for name, measure in MEASURES.items()}
    means = ir_measures.calc_aggregate(list(wanted.values()), relevant, run)
    return {name: float(means[measure]) for name, measure in wanted.items()}


def bm25s_rankings(collection: Collection, stop_words: str | None) -> Rankings:
    """bm25s by its own tokenizer with PyStemmer's English stems, over the same texts. Raises: ConfigError without it."""
    try:
        import bm25s
        import Stemmer
    except ImportError as cause:
        raise ConfigError('this suite needs bm25s and PyStemmer: pip install "ragspec[bench]"') from cause
    stemmer = Stemmer.Stemmer("english")

    def tokens(texts: Iterable[str]) -> Any:
        return bm25s.tokenize(list(texts), stopwords=stop_words, stemmer=stemmer, show_progress=False)

    index = bm25s.BM25(**_BM25)
    index.index(tokens(map(searched_text, collection.documents)), show_progress=False)
    depth = min(DEPTH, len(collection.documents))
    rows, _ = index.retrieve(tokens(collection.queries.values()), k=depth, show_progress=False)
    ids = [document.id for document in collection.documents]
    return {i: [ids[row] for row in own] for i, own in zip(collection.queries, rows.tolist(), strict=True)}
