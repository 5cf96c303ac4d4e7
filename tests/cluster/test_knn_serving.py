"""A datastore in an actor: the answers of the one in this process, or an error in time."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shard_parts
from ray import cloudpickle
from tiny_target import SENTENCES, save_model

from pipelines.benchmarks.iterative import RemoteDatastore
from ragspec.config import TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine.target import Target
from ragspec.errors import EncoderMismatch, RetrievalError, StoreCorrupt, StoreMissing
from ragspec.rag.knnlm.build import build_datastore
from ragspec.rag.knnlm.generation import KnnGenerator
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.knnlm.datastore import Datastore, DatastoreSource, write_datastore
from ragspec.retrieval.knnlm.neighbours import KnnConfig, Neighbours, PrefetchRequest, unit_rows
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.retrieval.speculative.stride_costs import StridePlan

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("session")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH = 16
BOUND_S = 600.0
NONE_KNOWN = np.empty(0, np.int64)


class FourAtOnce(StrideScheduler):
    """Speculates whatever it costs."""

    def choose(self) -> StridePlan:
        return StridePlan(stride=4)


def write(folder: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    keys = unit_rows(rng.standard_normal((300, WIDTH)).astype(np.float32))
    origin = DatastoreSource(EncoderIdentity("t", "a" * 64, WIDTH), 40, 8)
    write_datastore(folder, [(keys, rng.integers(0, 40, 300).astype(np.int32))], origin)
    return folder


def queries(count: int) -> np.ndarray:
    return unit_rows(np.random.default_rng(7).standard_normal((count, WIDTH)).astype(np.float32))


def same(one: Neighbours, other: Neighbours) -> bool:
    assert one.entries is not None and other.entries is not None
    pairs = zip((*one[:3], *one.entries), (*other[:3], *other.entries), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


@contextlib.contextmanager
def remote(folder: Path, service_s: float = 0.0, **options: Any) -> Iterator[RemoteDatastore]:
    with contextlib.closing(RemoteDatastore(folder, **options)) as store:
        store.slow_down(service_s)
        yield store


def pid_of(store: RemoteDatastore) -> int:
    return shard_parts.pid_of(store.actors.replicas[0])


def test_it_answers_as_the_datastore_in_this_process_does(tmp_path: Path) -> None:
    """Bits lost on the way, entries that were said to be known, threads that get each other's answers; Ray's words at the end."""
    folder = write(tmp_path / "store")
    local = Datastore.open(folder)
    wanted = PrefetchRequest(5, 3, np.arange(0, 300, 2))
    with remote(folder) as store:
        assert store.target == local.target
        for count in (1, 7, 65):
            assert same(store.search(queries(count), 6, wanted), local.search(queries(count), 6, wanted))
        assert store.search(queries(2), 3).entries is None
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: store.search(queries(40)[i : i + 1], 6, wanted), range(40)))
        assert all(same(each, local.search(queries(40)[i : i + 1], 6, wanted)) for i, each in enumerate(found))
    with pytest.raises(RetrievalError, match="closed"):
        store.search(queries(1), 1)


@pytest.mark.slow
def test_a_service_time_is_taken_once_a_call(tmp_path: Path) -> None:
    """A stated time for every query would measure something else."""
    with remote(write(tmp_path / "store"), service_s=0.2) as store:
        begin = time.perf_counter()
        store.search(queries(50), 3)
        assert 0.2 <= time.perf_counter() - begin < 5.0


@pytest.mark.slow  # the same for an index is not
def test_an_actor_killed_in_a_call_answers_after_all(tmp_path: Path) -> None:
    """A generation that hangs or dies with its datastore."""
    folder = write(tmp_path / "store")
    with remote(folder, service_s=1.0) as store, ThreadPoolExecutor(1) as pool:
        wanted = PrefetchRequest(2, 2, NONE_KNOWN)
        pid = pid_of(store)
        running = pool.submit(store.search, queries(3), 4, wanted)
        time.sleep(0.3)
        os.kill(pid, 9)
        assert same(running.result(BOUND_S), Datastore.open(folder).search(queries(3), 4, wanted))


@pytest.mark.slow
def test_a_restarted_actor_never_answers_from_another_datastore(tmp_path: Path) -> None:
    """Half of an output from one corpus, half from another."""
    folder = write(tmp_path / "store")
    with remote(folder) as store:
        before = store.search(queries(3), 4)
        write(folder, seed=1)
        assert np.array_equal(store.search(queries(3), 4).numbers, before.numbers)
        os.kill(pid_of(store), 9)
        with pytest.raises(StoreCorrupt, match="another datastore"):
            store.search(queries(3), 4)


@pytest.mark.slow
def test_an_answer_that_does_not_come_is_an_error_in_time(tmp_path: Path) -> None:
    """A wait without end."""
    with remote(write(tmp_path / "store"), service_s=5.0, timeout_s=0.4) as store:
        begin = time.perf_counter()
        with pytest.raises(RetrievalError, match=r"the datastore did not answer within 0\.4 s"):
            store.search(queries(1), 1)
        assert time.perf_counter() - begin < 4.0


def test_what_cannot_be_opened_is_told_with_its_reason(tmp_path: Path) -> None:
    """A remote error of twenty lines in place of the one that names the file."""
    with pytest.raises(StoreMissing):
        RemoteDatastore(tmp_path / "nowhere")
    folder = write(tmp_path / "store")
    (keys,) = folder.glob("keys-*")
    keys.write_bytes(keys.read_bytes()[:-1])
    with pytest.raises(StoreCorrupt, match="keys-"):
        RemoteDatastore(folder)


@pytest.mark.slow
def test_a_generation_over_it_is_the_one_over_a_local_datastore(tmp_path: Path) -> None:
    """Arrays that cannot be written to, read by a cache that wants to; a foreign datastore noticed too late."""
    target = Target.load(TargetConfig(model=str(save_model("llama", tmp_path / "model"))), num_kv_slots=512)
    build_datastore(SENTENCES, target, tmp_path / "store", 24)
    prompt = tuple(target.tokenizer("The river carries", add_special_tokens=False)["input_ids"])
    request = Request("a", prompt, SamplingParams(max_tokens=24, temperature=1.0, seed=3))
    config = KnnConfig(num_neighbours=4, weight=0.8)
    expected, _ = KnnGenerator(target, Datastore.open(tmp_path / "store"), config).generate(request, speculation=False)
    with remote(tmp_path / "store") as store:
        completion, stats = KnnGenerator(target, store, config, scheduler=FourAtOnce()).generate(request)
    assert completion.token_ids == expected.token_ids
    assert stats.num_verifications < 24 < stats.num_queries
    with remote(write(tmp_path / "foreign")) as foreign, pytest.raises(EncoderMismatch):
        KnnGenerator(target, foreign)
