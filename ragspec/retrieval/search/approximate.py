"""Approximate search through FAISS: candidates from HNSW or IVF, scored and ordered as in exact search.

Defaults by the rows of a segment: below `MIN_ROWS` no FAISS index, since an exact scan is as fast; `hnsw` is HNSW32
(efConstruction 200, efSearch 128); `ivf` has 4 sqrt(rows) lists, rounded to a power of two, of 8-bit vectors, and searches one
list in 16, at least eight. Memory per row: 4 E + 272 bytes for HNSW32, E + 8 for IVF with SQ8.

One thread searches each query alone, so its candidates do not depend on other queries. One thread builds an index, so the same
rows give the same index.

    >>> ApproximateIndex.open(folder, segment.vectors, DenseConfig(kind="hnsw")).search(queries, k=10)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.config import DenseConfig
from ragspec.errors import ConfigError, StoreCorrupt
from ragspec.numerics.threads import run_in_thread
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.manifest import DENSE, VECTORS
from ragspec.retrieval.index.segment_files import mapped_array
from ragspec.retrieval.search.dense import (
    FEW_ROWS_SHARE,
    Mask,
    Rows,
    ScoredRows,
    canonical_scores,
    load_faiss,
    rescoring_depth,
    search_rows,
    top_k,
)
from ragspec.retrieval.search.gpu import GpuIndex

MIN_ROWS = 20_000
EF_CONSTRUCTION = 200
EF_SEARCH = 128
_TRAINING_ROWS_PER_LIST = 64
_ROWS_AT_ONCE = 65_536


def build_faiss_index(folder: Path, config: DenseConfig) -> None:
    """Write the FAISS index of a segment's vectors beside them, unless search is exact or the segment is small.

    Raises: ConfigError if FAISS does not know the factory string, OSError.
    """
    vectors: FloatArray = mapped_array(folder / VECTORS)
    if config.kind == "exact" or len(vectors) < MIN_ROWS:
        return
    raw = run_in_thread(lambda: load_faiss().serialize_index(_build(vectors, config)), 1)
    (folder / DENSE).write_bytes(raw.data)


def default_faiss_factory(kind: str, num_rows: int) -> str:
    """The default FAISS factory string."""
    return "HNSW32" if kind == "hnsw" else f"IVF{_num_lists(num_rows)},SQ8"


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
    factory = config.factory or default_faiss_factory(config.kind, len(vectors))
    try:
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as cause:
        raise ConfigError(
            f"FAISS does not know the factory string {factory!r}: {str(cause).splitlines()[0]}"
        ) from cause
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
