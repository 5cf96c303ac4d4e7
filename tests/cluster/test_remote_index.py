"""An index in an actor: the answers of the one in this process, of the generation asked for, or an error in time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letter_encoder import LetterEncoder
from ray import cloudpickle
from shard_parts import delete, die

from pipelines.benchmarks import iterative
from pipelines.benchmarks.iterative import SlowShardActor, remote_index
from ragspec.cluster.actors import ActorPool, Replica
from ragspec.cluster.remote_retrieval import shards
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.remote_retrieval.segment_cache import SegmentSet
from ragspec.cluster.remote_retrieval.shards import ShardActor
from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.errors import (
    ConfigError,
    EncoderMismatch,
    EngineError,
    InputError,
    RetrievalError,
    StoreCorrupt,
    StoreMissing,
)
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.index.pointer import read_pointer
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search import index_searcher
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.index_types import IndexLike, SearchResult
from ragspec.retrieval.search.segment_search import SearchScope

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])

QUERIES = ["fact 3", "told here", "Text of group 2"]
BOUND_S = 600.0


@pytest.fixture
def index_dir(tmp_path: Path) -> Path:
    with IndexWriter(tmp_path / "index", LetterEncoder()) as writer:
        for number in range(30):
            text = f"Fact {number} is told here. Text of group {number % 5}."
            writer.upsert(Document(f"d{number}", text, metadata={"n": number}, owner="ann" if number % 7 == 0 else ""))
            if number % 13 == 0:
                writer.commit()
        writer.commit()
    return tmp_path / "index"


@contextlib.contextmanager
def remote(index_dir: Path, mode: Any = "hybrid", service_s: float = 0.0, **options: Any) -> Iterator[Any]:
    config = RetrieverConfig(index_dir=str(index_dir), mode=mode)
    with remote_index(config, LetterEncoder(), **options) as (index, slow_down):
        slow_down(service_s)
        yield index


def victim(index: ClusterRetriever) -> Replica:
    (worker,) = index._pool.alive()
    return Replica(worker.name, worker.actor)


def local(index_dir: Path, mode: Any = "hybrid") -> Retriever:
    return Retriever(LetterEncoder(), Store.open(index_dir), RetrieverConfig(mode=mode))


def answer(index: IndexLike, scope: SearchScope = SearchScope(), prefetch_k: int = 0) -> tuple[Any, ...]:  # noqa: B008
    """Everything of a look-up, vectors as their bytes."""
    queries = index.encode(QUERIES)
    found: SearchResult = index.search(queries, 4, scope, prefetch_k=prefetch_k, known=frozenset({("d3", 0)}))
    candidates = [
        (key, each.passage, None if each.vector is None else each.vector.tobytes(), dict(each.term_counts))
        for key, each in found.candidates.items()
    ]
    return found.passages, candidates, found.statistics, found.generation, queries


SLOW = pytest.mark.slow  # an actor takes seconds to start


@pytest.mark.parametrize("mode", [pytest.param("dense", marks=SLOW), pytest.param("sparse", marks=SLOW), "hybrid"])
def test_the_actor_answers_as_this_process_does(session: None, index_dir: Path, mode: Any) -> None:
    """A score, vector or frequency that changes on its way; a filter or a known passage that is left behind."""
    here = local(index_dir, mode)
    with remote(index_dir, mode) as index:
        assert (index.mode, index.generation) == (mode, here.generation)
        for scope in (SearchScope(), SearchScope("ann", parse_filter({"type": "gte", "key": "n", "value": 7}))):
            for prefetch_k in (0, 9):
                expected = answer(here, scope, prefetch_k)
                assert answer(index, scope, prefetch_k) == expected and bool(expected[1]) is (prefetch_k > 0)
        (vector,) = (query.vector for query in index.encode(["x"]))
        if vector is not None:
            assert np.array_equal(vector, LetterEncoder().encode(["x"])[0])
        with pytest.raises(InputError, match="the question is empty"):
            index.encode([" "])


@SLOW
def test_several_threads_may_ask_at_once(session: None, index_dir: Path) -> None:
    """Answers of one thread that reach another."""
    here = local(index_dir)
    texts = [f"fact {number}" for number in range(24)]
    expected = [here.retrieve([text], 3).passages for text in texts]
    with remote(index_dir) as index, ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda text: index.search(index.encode([text]), 3).passages, texts))
    assert found == expected


@SLOW
def test_a_call_outlives_its_actor(session: None, index_dir: Path) -> None:
    """A request that fails, or waits for ever, since the actor died while it was looking."""
    expected = answer(local(index_dir), prefetch_k=5)
    with remote(index_dir, service_s=1.5) as index, ThreadPoolExecutor(1) as thread:
        call = thread.submit(answer, index, prefetch_k=5)
        time.sleep(0.5)
        die(victim(index))
        assert call.result(BOUND_S) == expected
        die(victim(index))
        assert answer(index, prefetch_k=5) == expected


@pytest.mark.slow
def test_a_call_to_an_index_that_is_closed_ends_in_an_error(session: None, index_dir: Path) -> None:
    """A thread that hangs in a call nobody will ever answer, so that the service cannot stop."""
    with remote(index_dir, service_s=600.0, timeout_s=500.0) as index, ThreadPoolExecutor(1) as thread:
        call: Future[Any] = thread.submit(answer, index)
        time.sleep(0.5)
        pinned, queries = index.pinned(), index.encode(QUERIES)
        index.close()
        with pytest.raises(RetrievalError, match="was closed"):
            call.result(BOUND_S)
        for closed in (index, pinned):
            with pytest.raises(RetrievalError, match="was closed"):
                closed.search(queries, 1)


def test_a_call_that_takes_too_long_ends_in_an_error(session: None, index_dir: Path) -> None:
    """An index on a machine that hangs takes all who ask with it."""
    with remote(index_dir, service_s=600.0, timeout_s=1.0) as index:
        with pytest.raises(
            RetrievalError, match=r"cannot be searched: a shard of the index did not answer within 1 s$"
        ) as error:
            index.search(index.encode(QUERIES), 1)
        assert isinstance(error.value, EngineError)


@pytest.mark.slow
def test_a_pinned_index_is_answered_from_its_generation(session: None, index_dir: Path) -> None:
    """A guess checked against an index that was changed in between."""
    with remote(index_dir) as index:
        pinned, expected = index.pinned(), answer(index, prefetch_k=9)
        (best, *_) = expected[0][0]
        delete(index_dir, best.document_id)
        assert answer(pinned, prefetch_k=9) == expected
        assert answer(index, prefetch_k=9) == answer(local(index_dir), prefetch_k=9) != expected
        assert answer(pinned, prefetch_k=9) == expected and pinned.generation == expected[3] != index.generation


@SLOW
def test_a_named_generation_is_stayed_with(session: None, index_dir: Path) -> None:
    """A job over one generation that goes on with the next."""
    config = RetrieverConfig(index_dir=str(index_dir), pointer=read_pointer(index_dir))
    expected = answer(local(index_dir))
    with remote_index(config, LetterEncoder()) as (index, _):
        delete(index_dir, "d20")
        assert answer(index) == expected


@SLOW
def test_an_error_of_the_actors_code_is_told_as_such(session: None, index_dir: Path) -> None:
    """An error in our code that is told as a lost machine; an error of the user's that is told as ours."""
    with remote(index_dir, "dense") as index:
        queries = index.encode(QUERIES)
        with pytest.raises(RetrievalError, match=r"cannot be searched: a shard of the index failed: .*NoneType"):
            index.search(queries, 1, None)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="no vector"):
            index.search(local(index_dir, "sparse").encode(QUERIES), 1)
        assert len(index.search(queries, 1).passages) == 3


class Stranger(LetterEncoder):
    identity = EncoderIdentity("another", "e" * 64, 16)


@pytest.mark.slow
def test_an_index_that_cannot_be_used_leaves_no_actor(
    session: None, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a processor and a gigabyte that a failed start keeps until the cluster ends."""
    running: set[ActorPool] = set()

    class Counted(ActorPool):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            running.add(self)

        def close(self) -> None:
            super().close()
            running.discard(self)

    monkeypatch.setattr(iterative, "ActorPool", Counted)
    config = RetrieverConfig(index_dir=str(index_dir))

    def open_index(config: RetrieverConfig, encoder: LetterEncoder, **options: float) -> None:
        with remote_index(config, encoder, **options):
            pass

    with pytest.raises(ConfigError, match="index_dir"):
        open_index(RetrieverConfig(), LetterEncoder())
    for timeout_s in (0.0, float("nan")):
        with pytest.raises(ConfigError, match="finite"):
            open_index(config, LetterEncoder(), timeout_s=timeout_s)
    with pytest.raises(StoreMissing):
        open_index(RetrieverConfig(index_dir=str(index_dir / "none")), LetterEncoder())
    with pytest.raises(EncoderMismatch):
        open_index(config, Stranger())
    path = max(index_dir.rglob("vectors.npy"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreCorrupt, match=r"vectors\.npy"):
        open_index(config, LetterEncoder())
    (index_dir / "CURRENT").write_text("")
    with pytest.raises(StoreCorrupt, match="does not name a generation"):
        open_index(config, LetterEncoder())
    assert running == set()


def whole(index_dir: Path) -> SegmentSet:
    store = Store.open(index_dir, only=frozenset())
    return SegmentSet(str(index_dir), store.pointer, tuple(record.name for record in store.manifest.segments))


def test_the_service_time_is_that_of_a_call(index_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service time for every query of a batch, under which batching a verification could not pay."""
    slept: list[float] = []
    monkeypatch.setattr(iterative.time, "sleep", slept.append)
    actor, config = SlowShardActor(), RetrieverConfig()
    actor.slow_down(0.25)
    queries = local(index_dir).encode(QUERIES)
    for some in (queries, queries[:1]):
        found = actor.look_up(whole(index_dir), config, some, 2, SearchScope(), 0, frozenset())
        assert len(found.passages) == len(some)
    assert slept == [0.25, 0.25]


def test_a_reranker_is_loaded_once(index_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of loading for every generation, or passages that are not reranked where the index is elsewhere."""
    loaded: list[str] = []

    class Backwards:
        def scores(self, query: str, texts: list[str]) -> Any:
            return np.arange(len(texts), dtype=np.float64)

    monkeypatch.setattr(index_searcher, "RERANK_DEPTH", 6)
    monkeypatch.setattr(shards.Reranker, "load", lambda config: loaded.append(config.model) or Backwards())
    actor, config = ShardActor(), RetrieverConfig(reranker="some/model")
    queries, plain = local(index_dir).encode(QUERIES), local(index_dir)
    for number in (20, 21):
        found = actor.look_up(whole(index_dir), config, queries, 3, SearchScope(), 0, frozenset()).passages
        expected = [[p.id for p in some[::-1][:3]] for some in plain.search(queries, 6).passages]
        assert [[p.id for p in some] for some in found] == expected
        delete(index_dir, f"d{number}")
    assert loaded == ["some/model"]
