"""Search without selectors gives what exact search gives; on a GPU where there is one."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from unit_vectors import unit

from ragspec.config import DenseConfig
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search import faiss_index
from ragspec.retrieval.search.dense import DenseIndex, ExactIndex
from ragspec.retrieval.search.faiss_index import ApproximateIndex, GpuIndex
from ragspec.retrieval.search.segment_search import Shard

faiss = pytest.importorskip("faiss")
needs_gpu = pytest.mark.skipif(not faiss_index.num_gpus(), reason="FAISS sees no GPU")


@pytest.fixture(scope="module")
def vectors() -> FloatArray:
    """With many equal rows, and rows closer than float32 can tell apart."""
    rng = np.random.default_rng(0)
    same = np.repeat(unit(rng, 1, 64), 300, axis=0)
    near = np.repeat(unit(rng, 1, 64), 300, axis=0) + rng.standard_normal((300, 64)).astype(np.float32) * 1e-8
    return np.concatenate([unit(rng, 4000, 64), same, near.astype(np.float32)])


def ivf(vectors: FloatArray) -> Any:
    index = faiss.index_factory(64, "IVF16,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    return index


def masks(rows: int) -> list[NDArray[np.bool_] | None]:
    rng = np.random.default_rng(1)
    return [None, *(rng.random(rows) < share for share in (0.0, 0.002, 0.04, 0.1, 0.5, 0.99)), np.ones(rows, bool)]


def agree(index: DenseIndex, vectors: FloatArray) -> None:
    queries = np.concatenate([unit(np.random.default_rng(2), 6, 64), vectors[4100:4101], vectors[4400:4402]])
    exact = ExactIndex(vectors)
    for allowed in masks(len(vectors)):
        for k in (0, 1, 10, 100, 5000):
            expected = exact.search(queries, k, allowed)
            for found, wanted in zip(index.search(queries, k, allowed), expected, strict=True):
                orders = [sorted(zip(-each.scores, each.rows, strict=True))[:k] for each in (found, wanted)]
                assert orders[0] == orders[1]


def test_hits_without_selectors_are_the_exact_ones(vectors: FloatArray) -> None:
    """A filter that leaves fewer than there are, ties beyond the last hit, more hits than a GPU gives."""
    flat = faiss.IndexFlatIP(64)
    flat.add(vectors)
    agree(GpuIndex(flat, vectors), vectors)


def test_without_faiss_there_is_no_gpu_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact search needs no FAISS, and looking for a GPU must not ask for it."""
    monkeypatch.setattr(faiss_index, "find_spec", lambda name: None)
    monkeypatch.setattr(faiss_index, "load_faiss", lambda: pytest.fail("imported"))
    assert faiss_index.num_gpus() == 0 and Shard.open([], "auto").part_of == {}


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds(vectors: FloatArray) -> None:
    """Scores of another device, selectors that are ignored in silence."""
    agree(GpuIndex.flat(vectors), vectors)


@needs_gpu
@pytest.mark.gpu
def test_ivf_on_a_gpu_finds_nearly_what_it_finds_on_the_cpu(vectors: FloatArray) -> None:
    """A copy that lost its number of probes."""
    index = ivf(vectors)
    cpu = ApproximateIndex(index, vectors, DenseConfig(kind="ivf", search_width=8))
    queries = unit(np.random.default_rng(3), 50, 64)
    pairs = zip(cpu.search(queries, 10), GpuIndex.ivf(index, vectors, 8, cpu).search(queries, 10), strict=True)
    assert np.mean([len(set(a.rows) & set(b.rows)) / len(a.rows) for a, b in pairs]) > 0.99


def test_ivf_with_a_filter_or_many_hits_finds_what_it_finds_on_the_cpu(vectors: FloatArray) -> None:
    """A scope that leaves a tenth of the rows was scanned exactly: another machine, other passages."""
    index = ivf(vectors)
    cpu = ApproximateIndex(index, vectors, DenseConfig(kind="ivf", search_width=2))
    index.nprobe = 2
    gpu_index, queries = GpuIndex(index, vectors, cpu), unit(np.random.default_rng(3), 20, 64)
    for allowed in masks(len(vectors)):
        for k in (10, 100, 1500):
            for found, wanted in zip(
                gpu_index.search(queries, k, allowed), cpu.search(queries, k, allowed), strict=True
            ):
                assert found.rows.tolist() == wanted.rows.tolist()


@dataclass
class RoundsByBatch:
    """Searches as an index whose scores depend on the number of queries, as products on a GPU do."""

    index: Any

    def search(self, queries: FloatArray, k: int) -> Any:
        noise = np.random.default_rng(len(queries)).standard_normal(queries.shape[1]).astype(np.float32)
        return self.index.search(queries + 0.05 * noise, k)


def test_ivf_candidates_do_not_depend_on_the_batch(vectors: FloatArray) -> None:
    """A query near the border of two lists found other passages beside others than alone, and the answer was another."""
    index = ivf(vectors)
    cpu = ApproximateIndex(index, vectors, DenseConfig(kind="ivf", search_width=1))
    gpu_index, queries = GpuIndex(RoundsByBatch(index), vectors, cpu), unit(np.random.default_rng(3), 100, 64)
    found = []
    for size in (1, 7, 16, 100):
        batches = [gpu_index.search(queries[first : first + size], 10) for first in range(0, 100, size)]
        found.append([one.rows.tolist() for batch in batches for one in batch])
    assert found == found[:1] * 4
    plain = [RoundsByBatch(index).search(queries[first:][:7], 10)[1] for first in range(0, 100, 7)]
    assert (np.concatenate(plain) != RoundsByBatch(index).search(queries, 10)[1]).any(), "a test that cannot fail"


def test_segments_beyond_the_budget_stay_on_the_cpu(vectors: FloatArray, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index took the memory that the target's pool was given, or memory of indexes that are gone was never free again."""
    scratch: list[int] = []
    monkeypatch.setattr(faiss_index, "_resources", lambda: SimpleNamespace(setTempMemory=scratch.append))
    limit = vectors.nbytes * 16 // 7  # two of these and an eighth for FAISS
    flat = faiss.IndexFlatIP(64)
    indexes = []
    while faiss_index.fits(vectors, limit):
        indexes.append(GpuIndex(flat, vectors))
    assert len(indexes) == 2 and set(scratch) == {limit // 8}
    assert faiss_index.fits(vectors, None)
    indexes.pop()
    assert faiss_index.fits(vectors, limit)


@needs_gpu
@pytest.mark.gpu
def test_indexes_take_no_more_of_a_gpu_than_the_budget(vectors: FloatArray) -> None:
    """FAISS reserves a gigabyte and a half for each index, which the budget never saw."""
    import torch

    limit, free = 2**28, torch.cuda.mem_get_info()[0]
    indexes = [GpuIndex.flat(vectors) for _ in range(20) if faiss_index.fits(vectors, limit)]
    assert len(indexes) == 20
    assert free - torch.cuda.mem_get_info()[0] <= limit + 2**27  # the CUDA context of FAISS
