"""Filtered search on a GPU, whose indexes ignore filters: how many extra hits a filter costs, and whether results are exact.

Without a GPU, FAISS's index on the CPU stands for the GPU's: the hits, and so the counts, are the same.

    >>> filtered_searches(num_rows=50_000)["filters"]["a tenth, in clusters"]["searches a query"]
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.evaluation.report import Result
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search.dense import ExactIndex, Mask, ScoredRows, load_faiss
from ragspec.retrieval.search.gpu import GpuIndex, num_gpus

_DIMENSION, _NUM_CLUSTERS, _NUM_QUERIES, _K = 384, 100, 32, 10
_SHARES = {"6 in 100": 0.06, "a tenth": 0.1, "a quarter": 0.25, "half": 0.5}


class CountedIndex(GpuIndex):
    """Counts queries that the device searched for, the hits that it gave, and queries that were scanned on the CPU."""

    num_searches = num_hits = num_scans = 0

    @classmethod
    def over(cls, vectors: FloatArray) -> CountedIndex:
        """On a GPU if FAISS finds one."""
        if num_gpus():
            return cls.flat(vectors)
        flat = load_faiss().IndexFlatIP(vectors.shape[1])
        flat.add(vectors)
        return cls(flat, vectors)

    def _hits(self, queries: FloatArray, num_hits: int) -> Any:
        self.num_searches += len(queries)
        self.num_hits += len(queries) * num_hits
        return super()._hits(queries, num_hits)

    def _scan(self, query: FloatArray, k: int, allowed: Mask | None) -> ScoredRows:
        self.num_scans += 1
        return super()._scan(query, k, allowed)


def filtered_searches(num_rows: int) -> Result:
    """For filters that leave a share of the rows: searches, hits and scans a query, and milliseconds. Raises: ConfigError."""
    rng = np.random.default_rng(0)
    centres = _unit(rng.standard_normal((_NUM_CLUSTERS, _DIMENSION)))
    clusters = rng.integers(0, _NUM_CLUSTERS, num_rows)
    vectors, queries = (
        _unit(centres[own] + 0.05 * rng.standard_normal((len(own), _DIMENSION)))
        for own in (clusters, rng.integers(0, _NUM_CLUSTERS, _NUM_QUERIES))
    )
    exact, table, is_exact = ExactIndex(vectors), dict[str, Result](), True
    for name, share in _SHARES.items():
        # a tenant's documents are about a few subjects: queries may lie far from all of them
        for kind, allowed in (("", rng.random(num_rows) < share), (", in clusters", clusters < share * _NUM_CLUSTERS)):
            index = CountedIndex.over(vectors)
            index.search(queries[:1], _K)  # the first search loads kernels
            index.num_searches = index.num_hits = index.num_scans = 0
            begin = time.perf_counter()
            found = index.search(queries, _K, allowed)
            elapsed = time.perf_counter() - begin
            wanted = exact.search(queries, _K, allowed)
            is_exact &= all(_best(ours) == _best(theirs) for ours, theirs in zip(found, wanted, strict=True))
            table[f"{name}{kind}"] = {
                "searches a query": index.num_searches / _NUM_QUERIES,
                "hits a query": index.num_hits / _NUM_QUERIES,
                "scanned": index.num_scans / _NUM_QUERIES,
                "ms a query": 1e3 * elapsed / _NUM_QUERIES,
            }
    return {"filters": table, "filters_exact": is_exact}


def _best(hits: ScoredRows) -> list[tuple[float, int]]:
    return sorted(zip((-hits.scores).tolist(), hits.rows.tolist(), strict=True))[:_K]


def _unit(vectors: NDArray[np.floating[Any]]) -> FloatArray:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)
