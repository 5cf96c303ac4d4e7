"""Search through FAISS: approximate candidates from HNSW or IVF on a CPU, and exact or IVF search on a GPU.

FAISS chooses candidates; they are scored and ordered as in exact search. Defaults by the rows of a segment: below `MIN_ROWS` no
FAISS index, since an exact scan is as fast; `hnsw` is HNSW32 (efConstruction 200, efSearch 128); `ivf` has 4 sqrt(rows) lists,
rounded to a power of two, of 8-bit vectors, and searches one list in 16, at least eight. Memory per row: 4 E + 272 bytes for
HNSW32, E + 8 for IVF with SQ8. One thread searches each query alone, so its candidates do not depend on other queries. One thread
builds an index, so the same rows give the same index.

A GPU gives the hits and scores of the CPU, except that IVF may differ where only rounding tells rows apart. `GpuIndex` works
around the limits of FAISS on GPUs. Its indexes ignore id selectors, so allowed rows are chosen from extra hits. They are not safe
even for two readers, so one thread owns them all. They copy a whole matrix twice, so rows go up in blocks. They return 2,048 hits
at most, so a search for more scans on the CPU. An IVF search with a filter, or for more hits, uses the index on the CPU. A GPU
may round a query's scores otherwise in a batch of another size, and IVF then searches other lists: its batches have one size.

    >>> ApproximateIndex.open(folder, segment.vectors, DenseConfig(kind="hnsw")).search(queries, k=10)
    >>> GpuIndex.flat(segment.vectors).search(queries, k=10)
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from weakref import WeakSet

import numpy as np

from ragspec.config import DenseConfig
from ragspec.errors import ConfigError, StoreCorrupt
from ragspec.numerics.threads import run_in_thread
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.manifest import DENSE, VECTORS
from ragspec.retrieval.index.segment_files import mapped_array
from ragspec.retrieval.search.dense import (
    FEW_ROWS_SHARE,
    DenseIndex,
    Mask,
    Rows,
    ScoredRows,
    canonical_scores,
    float32_error_bound,
    rescoring_depth,
    search_rows,
    top_k,
)

MIN_ROWS = 20_000
EF_CONSTRUCTION = 200
EF_SEARCH = 128
_TRAINING_ROWS_PER_LIST = 64
_ROWS_AT_ONCE = 65_536


def load_faiss() -> Any:
    """The module, imported when an index needs it. Raises: ConfigError if it is not installed."""
    try:
        import faiss
    except ImportError as cause:
        raise ConfigError("this index needs FAISS: install ragspec[cpu] or ragspec[gpu]") from cause
    return faiss


def build_faiss_index(folder: Path, config: DenseConfig) -> None:
    """Write the FAISS index of a segment's vectors beside them, unless search is exact or the segment is small.

    Raises: ConfigError if FAISS does not know the factory string, OSError.
    """
    vectors: FloatArray = mapped_array(folder / VECTORS)
    if config.kind == "exact" or len(vectors) < MIN_ROWS:
        return
    raw = run_in_thread(lambda: load_faiss().serialize_index(_build(vectors, config)), 1)
    (folder / DENSE).write_bytes(raw.data)


class ApproximateIndex:
    """A FAISS index over a segment's rows. FAISS chooses the candidates; their scores and order are canonical."""

    def __init__(self, index: Any, vectors: FloatArray, config: DenseConfig) -> None:
        self._index = index
        self._vectors = vectors
        self._width = config.search_width or default_search_width(config.kind, len(vectors))
        self._is_hnsw = config.kind == "hnsw"

    @classmethod
    def open(cls, folder: Path, vectors: FloatArray, config: DenseConfig) -> ApproximateIndex:
        """Raises: StoreCorrupt if the file is no index of these vectors. Its hash must have been compared."""
        try:
            index = load_faiss().read_index(str(folder / DENSE))
        except RuntimeError as cause:
            raise StoreCorrupt(f"{folder / DENSE} cannot be read: {str(cause).splitlines()[0]}") from cause
        if (index.ntotal, index.d) != vectors.shape:
            raise StoreCorrupt(f"{folder / DENSE} holds {index.ntotal} rows of {index.d}, not {vectors.shape}")
        return cls(index, vectors, config)

    def on_gpu(self) -> GpuIndex:
        """A copy of an IVF index on the GPU."""
        return GpuIndex.ivf(self._index, self._vectors, self._width, self)

    def search(self, queries: FloatArray, k: int, allowed: Mask | None = None) -> list[ScoredRows]:
        rows = None if allowed is None else np.flatnonzero(allowed)
        if rows is not None and len(rows) <= max(k, FEW_ROWS_SHARE * len(self._vectors)):
            return search_rows(self._vectors, rows, queries, k)
        load_faiss().omp_set_num_threads(1)  # of this thread, in FAISS's own OpenMP
        return [self._one(query, k, allowed, rows) for query in queries]

    def _one(self, query: FloatArray, k: int, allowed: Mask | None, rows: Rows | None) -> ScoredRows:
        num_wanted = min(rescoring_depth(k), len(self._vectors) if rows is None else len(rows))
        found = self._candidates(query, num_wanted, allowed)
        if len(found) < min(k, num_wanted):  # the searched lists hold too few allowed rows
            every = np.arange(len(self._vectors)) if rows is None else rows
            return search_rows(self._vectors, every, query[None], k)[0]
        return top_k(ScoredRows(found, canonical_scores(query, self._vectors[found])), k)

    def _candidates(self, query: FloatArray, num_wanted: int, allowed: Mask | None) -> Rows:
        faiss = load_faiss()
        options: dict[str, Any] = {}
        if allowed is not None:
            bits = np.packbits(allowed, bitorder="little")
            options["sel"] = faiss.IDSelectorBitmap(bits)
        if self._is_hnsw:
            params = faiss.SearchParametersHNSW(efSearch=max(self._width, num_wanted), **options)
        else:
            params = faiss.SearchParametersIVF(nprobe=self._width, **options)
        _, rows = self._index.search(np.ascontiguousarray(query[None]), num_wanted, params=params)
        return np.sort(rows[0][rows[0] >= 0])


def _build(vectors: FloatArray, config: DenseConfig) -> Any:
    faiss = load_faiss()
    faiss.omp_set_num_threads(1)
    factory = config.factory or ("HNSW32" if config.kind == "hnsw" else f"IVF{_num_lists(len(vectors))},SQ8")
    try:
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as cause:
        reason = str(cause).splitlines()[0]
        raise ConfigError(f"FAISS does not know the factory string {factory!r}: {reason}") from cause
    if not isinstance(index, faiss.IndexHNSW if config.kind == "hnsw" else faiss.IndexIVF):
        raise ConfigError(f"the factory string {factory!r} is no index of the kind {config.kind!r}")
    if config.kind == "hnsw":
        index.hnsw.efConstruction = EF_CONSTRUCTION
    if not index.is_trained:
        rows = min(len(vectors), _TRAINING_ROWS_PER_LIST * _num_lists(len(vectors)))
        step = len(vectors) // rows
        index.train(np.ascontiguousarray(vectors[: rows * step : step]))
    for first in range(0, len(vectors), _ROWS_AT_ONCE):
        index.add(np.ascontiguousarray(vectors[first : first + _ROWS_AT_ONCE]))
    return index


def _num_lists(num_rows: int) -> int:
    return int(2 ** round(math.log2(4 * math.sqrt(num_rows))))


def default_search_width(kind: str, num_rows: int) -> int:
    """The default efSearch, or number of lists to search."""
    return EF_SEARCH if kind == "hnsw" else max(8, _num_lists(num_rows) // 16)


_MAX_HITS = 2048
_MARGIN = 1.5
"""Extra hits beyond the share of allowed rows, which need not be spread evenly."""

_IVF_QUERIES = 4
"""Queries of every IVF search on a GPU. More: batches take fewer searches, a query alone takes longer."""

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
        self.num_bytes = vectors.nbytes  # of a GPU, at most
        _living.add(self)
        self._on_cpu = on_cpu
        self._max_error = float32_error_bound(vectors.shape[1]) if on_cpu is None else None

    @classmethod
    def flat(cls, vectors: FloatArray) -> Self:
        """An exact index over all rows."""
        return cls(_owner.submit(_flat_on_gpu, vectors).result(), vectors)

    @classmethod
    def ivf(cls, index: Any, vectors: FloatArray, num_probes: int, on_cpu: DenseIndex) -> GpuIndex:
        """A copy of `index`, an IVF index that `on_cpu` searches."""
        return cls(_owner.submit(_copied_to_gpu, index, num_probes).result(), vectors, on_cpu)

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
        size = len(queries) if self._on_cpu is None else _IVF_QUERIES
        padded = np.pad(queries, ((0, -len(queries) % size), (0, 0)), "edge")
        blocks = [np.ascontiguousarray(padded[first : first + size]) for first in range(0, len(padded), size)]
        found = _owner.submit(lambda: [self._index.search(block, num_hits) for block in blocks]).result()
        return tuple(np.concatenate(part)[: len(queries)] for part in zip(*found, strict=True))

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


def _flat_on_gpu(vectors: FloatArray) -> Any:
    faiss = load_faiss()
    index = faiss.GpuIndexFlatIP(_resources(), vectors.shape[1])
    for first in range(0, len(vectors), _ROWS_AT_ONCE):
        index.add(np.ascontiguousarray(vectors[first : first + _ROWS_AT_ONCE]))
    return index


def _copied_to_gpu(index: Any, num_probes: int) -> Any:
    faiss = load_faiss()
    copy = faiss.index_cpu_to_gpu(_resources(), 0, index)
    faiss.GpuParameterSpace().set_index_parameter(copy, "nprobe", num_probes)
    return copy
