"""Search by FAISS on a GPU, with the hits and scores of the CPU. IVF may differ where only rounding tells rows apart.

Works around the limits of FAISS on GPUs. Its indexes ignore id selectors, so allowed rows are chosen from extra hits. They are
not safe even for two readers, so one thread owns them all. They copy a whole matrix twice, so rows go up in blocks. They return
2,048 hits at most, so a search for more scans on the CPU. An IVF search with a filter, or for more hits, uses the index on the
CPU.

    >>> GpuIndex.flat(segment.vectors).search(queries, k=10)
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Self
from weakref import WeakSet

import numpy as np

from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search.dense import (
    FEW_ROWS_SHARE,
    DenseIndex,
    Mask,
    ScoredRows,
    canonical_scores,
    float32_error_bound,
    load_faiss,
    rescoring_depth,
    search_rows,
    top_k,
)

_MAX_HITS = 2048
_ROWS_AT_ONCE = 65_536
_MARGIN = 1.5
"""Extra hits beyond the share of allowed rows, which need not be spread evenly."""

_SCRATCH_SHARE = 8
"""FAISS computes in this part of the memory that the index may take."""

_owner = ThreadPoolExecutor(1, thread_name_prefix="ragspec-gpu")
"""The only thread that touches a GPU index."""
_living: WeakSet[GpuIndex] = WeakSet()


def num_gpus() -> int:
    """GPUs that the installed FAISS can use; 0 without FAISS, which exact search on a CPU does not need."""
    if find_spec("faiss") is None:
        return 0
    return int(getattr(load_faiss(), "get_num_gpus", lambda: 0)())


def fits(vectors: FloatArray, limit_bytes: int | None) -> bool:
    """Whether these vectors and those of all living indexes take at most so many bytes of a GPU, FAISS's own included."""
    if limit_bytes is None:
        return True
    scratch = limit_bytes // _SCRATCH_SHARE
    _owner.submit(_resources().setTempMemory, scratch).result()
    return sum(index.num_bytes for index in list(_living)) + vectors.nbytes <= limit_bytes - scratch


class GpuIndex:
    """A FAISS index without selectors over a segment's rows."""

    def __init__(self, index: Any, vectors: FloatArray, on_cpu: DenseIndex | None = None) -> None:
        """`on_cpu`: the CPU index that an approximate `index` copies. None: `index` is exact, so its hits are the best rows by
        float32 score, within a known error."""
        self._index = index
        self._vectors = vectors
        _living.add(self)
        self._on_cpu = on_cpu
        self._max_error = float32_error_bound(vectors.shape[1]) if on_cpu is None else None

    @property
    def num_bytes(self) -> int:
        """Of a GPU, at most."""
        return self._vectors.nbytes

    @classmethod
    def flat(cls, vectors: FloatArray) -> Self:
        """An exact index over all rows."""
        return cls(_owner.submit(_flat, vectors).result(), vectors)

    @classmethod
    def ivf(cls, index: Any, vectors: FloatArray, num_probes: int, on_cpu: DenseIndex) -> GpuIndex:
        """A copy of `index`, an IVF index that `on_cpu` searches."""
        return cls(_owner.submit(_copied, index, num_probes).result(), vectors, on_cpu)

    def search(self, queries: FloatArray, k: int, allowed: Mask | None = None) -> list[ScoredRows]:
        if self._on_cpu is not None and (allowed is not None or rescoring_depth(k) > _MAX_HITS):
            return self._on_cpu.search(queries, k, allowed)
        num_allowed = len(self._vectors) if allowed is None else int(np.count_nonzero(allowed))
        if k < 1 or num_allowed <= max(k, FEW_ROWS_SHARE * len(self._vectors)):
            return [self._scan(query, max(k, 0), allowed) for query in queries]
        num_wanted = min(rescoring_depth(k), num_allowed)
        share = num_allowed / len(self._vectors)
        num_hits = num_wanted if allowed is None else round(_MARGIN * num_wanted / share)
        found: list[ScoredRows | None] = [None] * len(queries)
        missing = np.arange(len(queries))
        while len(missing) and num_hits <= _MAX_HITS:
            scores, rows = self._hits(queries[missing], num_hits)
            for number, own_scores, own_rows in zip(missing.tolist(), scores, rows, strict=True):
                found[number] = self._ranked(queries[number], own_scores, own_rows, k, allowed)
            missing = np.array([number for number in missing.tolist() if found[number] is None], np.int64)
            num_hits *= 2
        return [self._scan(queries[n], k, allowed) if each is None else each for n, each in enumerate(found)]

    def _hits(self, queries: FloatArray, num_hits: int) -> Any:
        """Scores and rows, whatever is allowed. Shapes: [B, E] -> float32 [B, num_hits], int64 [B, num_hits]."""
        return _owner.submit(self._index.search, np.ascontiguousarray(queries), num_hits).result()

    def _ranked(
        self, query: FloatArray, scores: FloatArray, rows: Any, k: int, allowed: Mask | None
    ) -> ScoredRows | None:
        """The best allowed hits, or None if better rows may be missing."""
        is_hit = rows >= 0
        kept = np.sort(rows[is_hit] if allowed is None else rows[is_hit][allowed[rows[is_hit]]])
        if len(kept) < k:
            return None
        best = top_k(ScoredRows(kept, canonical_scores(query, self._vectors[kept])), k)
        if self._max_error is None or len(rows) >= len(self._vectors):
            return best
        return best if float(scores[is_hit].min()) + self._max_error < float(best.scores.min()) else None

    def _scan(self, query: FloatArray, k: int, allowed: Mask | None) -> ScoredRows:
        rows = np.arange(len(self._vectors)) if allowed is None else np.flatnonzero(allowed)
        return search_rows(self._vectors, rows, query[None], k)[0]


@functools.cache
def _resources() -> Any:
    """FAISS's memory on the GPU, for all indexes: each would reserve more than a gigabyte of its own."""
    return load_faiss().StandardGpuResources()


def _flat(vectors: FloatArray) -> Any:
    faiss = load_faiss()
    index = faiss.GpuIndexFlatIP(_resources(), vectors.shape[1])
    for first in range(0, len(vectors), _ROWS_AT_ONCE):
        index.add(np.ascontiguousarray(vectors[first : first + _ROWS_AT_ONCE]))
    return index


def _copied(index: Any, num_probes: int) -> Any:
    faiss = load_faiss()
    copy = faiss.index_cpu_to_gpu(_resources(), 0, index)
    faiss.GpuParameterSpace().set_index_parameter(copy, "nprobe", num_probes)
    return copy
