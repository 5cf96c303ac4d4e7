"""An index on shards in actors: the answers of one process, from one generation each, whatever dies, hangs or changes."""

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import shard_parts
from letter_encoder import LetterEncoder
from ray import cloudpickle
from shard_parts import QUERIES, SCOPES, delete, die, local, pid_of
from stand_ins import until
from tiny_reranker import save_model

from ragspec.cluster.actors import ORDERED, ActorPool, Replica
from ragspec.cluster.remote_retrieval import cluster_retriever
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.remote_retrieval.shards import ShardActor
from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.errors import ConfigError, EncoderMismatch, InputError, RetrievalError, StoreCorrupt, StoreMissing
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.index.index_directory import locked_generations
from ragspec.retrieval.index.manifest import read_current
from ragspec.retrieval.index.pointer import read_pointer
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.rerank import Reranker
from ragspec.retrieval.retriever import RetrievalResult, Retriever

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(shard_parts)

NUM_SHARDS = 2


class HeldShard(ShardActor):
    """Answers no search while the file `held` exists; pings it answers."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self._held = Path(held)

    def search(self, *arguments: Any) -> Any:
        self._wait()
        return super().search(*arguments)

    def look_up(self, *arguments: Any) -> Any:
        self._wait()
        return super().look_up(*arguments)

    def _wait(self) -> None:
        while self._held.exists():
            time.sleep(0.02)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the shards answer no search."""
    return tmp_path_factory.mktemp("shards") / "held"


@pytest.fixture(scope="module")
def shards(local_ray: None, held: Path) -> Iterator[ActorPool]:
    with ActorPool(HeldShard, (str(held),), NUM_SHARDS, prefix="shard") as pool:
        yield pool


def spread(
    index_dir: Path, replicas: Sequence[Replica], num_replicas: int = 1, **settings: Any
) -> contextlib.closing[ClusterRetriever]:
    times = {name: settings.pop(name) for name in ("timeout_s", "late_s", "hang_s") if name in settings}
    config = RetrieverConfig(index_dir=str(index_dir), **settings)
    return contextlib.closing(ClusterRetriever(config, LetterEncoder(), replicas, shard_replicas=num_replicas, **times))


def looked_up(index: Retriever, scope: Any) -> tuple[Any, ...]:
    """Everything of a look-up, vectors as their bytes."""
    found = index.search(index.encode(QUERIES), 4, scope, prefetch_k=9, known=frozenset({("d3", 0)}))
    candidates = [
        (key, each.passage, None if each.vector is None else each.vector.tobytes(), dict(each.term_counts))
        for key, each in found.candidates.items()
    ]
    return found.passages, candidates, found.statistics, found.generation, found.missing


@pytest.mark.parametrize(
    ("num_shards", "num_replicas", "mode"),
    [(1, 1, "dense"), (2, 1, "hybrid"), pytest.param(2, 2, "sparse", marks=pytest.mark.slow)],
)
def test_shards_answer_as_one_process_does(
    shards: ActorPool, index_dir: Path, num_shards: int, num_replicas: int, mode: str
) -> None:
    """Scores that depend on where a segment lies; a filter, a tenant or a known passage that is left behind."""
    assert len(Store.open(index_dir).segments) == 6
    settings = {"mode": mode, "expand_passages": int(mode == "hybrid")}
    here = local(index_dir, **settings)
    with spread(index_dir, shards.replicas[:num_shards], num_replicas, **settings) as there:
        assert (there.mode, there.generation) == (mode, here.generation)
        for scope in SCOPES:
            expected = here.retrieve(QUERIES, 9, scope)
            for _ in range(num_replicas):  # each turn asks others
                assert there.retrieve(QUERIES, 9, scope) == expected
            assert looked_up(there, scope) == looked_up(here, scope)
        assert there.retrieve(QUERIES[:1], 9).passages == here.retrieve(QUERIES, 9).passages[:1]
        assert there.retrieve([], 3).passages == []
        with pytest.raises(InputError, match="the question is empty"):
            there.retrieve([" "], 3)


@contextlib.contextmanager
def under_load(retriever: ClusterRetriever, num_threads: int = 3) -> Iterator[list[RetrievalResult]]:
    """What queries find that run inside. Raises: the first error of one."""
    found: list[RetrievalResult] = []
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            found.append(retriever.retrieve(QUERIES, 9))

    with ThreadPoolExecutor(num_threads) as threads:
        running = [threads.submit(flood) for _ in range(num_threads)]
        try:
            yield found
        finally:
            stop.set()
        for each in running:
            each.result()


@pytest.mark.parametrize("num_replicas", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_shard_that_is_killed_costs_no_query(shards: ActorPool, index_dir: Path, num_replicas: int) -> None:
    """An error, or a hole in the answers, for every process that dies."""
    expected = local(index_dir).retrieve(QUERIES, 9)
    with spread(index_dir, shards.replicas, num_replicas) as there:
        with under_load(there) as found:
            until(lambda: len(found) > 3)
            old = die(shards.replicas[0])
            assert pid_of(shards.replicas[0]) != old
            num_before = len(found)
            until(lambda: len(found) > num_before + 3)
        assert all(each == expected for each in found)


@pytest.mark.slow
def test_a_shard_that_hangs_costs_seconds_and_is_replaced(shards: ActorPool, index_dir: Path) -> None:
    """A stopped process that takes all who ask with it; a slow one that is killed for being slow."""
    expected = local(index_dir).retrieve(QUERIES, 9)
    with spread(index_dir, shards.replicas, 2, late_s=0.7, hang_s=2.0) as there:
        assert there.retrieve(QUERIES, 9) == expected
        victim = shards.replicas[1]
        old = die(victim, signal.SIGSTOP)
        begin = time.monotonic()
        for _ in range(4):
            assert there.retrieve(QUERIES, 9) == expected
        assert time.monotonic() - begin < shard_parts.BOUND_S
        until(lambda: not Path(f"/proc/{old}").exists())
        assert pid_of(victim) != old
        assert there.retrieve(QUERIES, 9) == expected


@pytest.mark.slow
def test_a_shard_that_hangs_is_replaced_although_nobody_asks(shards: ActorPool, index_dir: Path) -> None:
    """The second copy of a shard, which no query reaches while the first answers, stayed stopped for ever."""
    with spread(index_dir, shards.replicas, 2, late_s=0.7, hang_s=2.0):
        old = die(shards.replicas[1], signal.SIGSTOP)
        until(lambda: not Path(f"/proc/{old}").exists())
        assert pid_of(shards.replicas[1]) != old


def test_a_shard_that_is_slow_is_waited_for_and_not_killed(shards: ActorPool, index_dir: Path, held: Path) -> None:
    """A loaded machine on which the processes are killed that are needed most."""
    pids = [pid_of(replica) for replica in shards.replicas]
    with spread(index_dir, shards.replicas, 1, late_s=0.1, hang_s=60.0) as there, ThreadPoolExecutor(1) as thread:
        held.touch()
        call = thread.submit(there.retrieve, QUERIES, 9)
        time.sleep(0.5)
        held.unlink()
        assert call.result(shard_parts.BOUND_S) == local(index_dir).retrieve(QUERIES, 9)
    assert [pid_of(replica) for replica in shards.replicas] == pids


class Told(ShardActor):
    """Writes down that it was asked for what it had not been told to open."""

    def __init__(self, diary: str) -> None:
        super().__init__()
        self._diary, self._is_told = diary, False

    @ray.method(concurrency_group=ORDERED)
    def open(self, *arguments: Any) -> list[None]:
        time.sleep(0.5)
        opened = super().open(*arguments)
        self._is_told = True
        return opened

    def search(self, *arguments: Any) -> Any:
        if not self._is_told:
            Path(self._diary).touch()
        return super().search(*arguments)


@pytest.mark.slow
def test_a_shard_that_comes_back_opens_its_segments_before_it_is_asked(
    shards: ActorPool, index_dir: Path, tmp_path: Path
) -> None:
    """Queries that wait while gigabytes are hashed, one after the other, for as long as that takes."""
    expected = local(index_dir).retrieve(QUERIES, 9)
    with (
        ActorPool(Told, (str(tmp_path / "diary"),), 2, prefix="shard") as told,
        spread(index_dir, told.replicas, 2) as there,
    ):
        with under_load(there) as found:
            old = die(told.replicas[0])
            assert pid_of(told.replicas[0]) != old
            num_before = len(found)
            until(lambda: len(found) > num_before + 30)
        assert all(each == expected for each in found) and not (tmp_path / "diary").exists()


@pytest.mark.slow
def test_without_any_shard_there_is_one_clear_error(shards: ActorPool, index_dir: Path) -> None:
    """A query that waits for ever, or an empty answer, when the last process is gone."""
    with (
        ActorPool(ShardActor, prefix="shard") as pool,
        spread(index_dir, pool.replicas, timeout_s=2.0, late_s=0.5, fail_closed=False) as there,
    ):
        ray.kill(pool.replicas[0].actor)
        with pytest.raises(RetrievalError, match=r"segment-000001.* cannot be searched: a shard of the index is lost"):
            there.retrieve(QUERIES, 3)


def test_a_part_that_cannot_be_searched_is_an_error_or_marked(
    shards: ActorPool, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an index that answers as if it were the whole; a mark that stays when all is there again."""
    monkeypatch.setattr(cluster_retriever, "_MISSING_KEPT_S", 0.3)
    whole = local(index_dir).retrieve(QUERIES, 9)
    names = {live.segment.name for live in Store.open(index_dir).segments}
    rest = Store.open(index_dir, pointer=read_pointer(index_dir), only=frozenset(names - {"segment-000003"}))
    expected = Retriever(LetterEncoder(), rest, follow=False).retrieve(QUERIES, 9)
    hidden = index_dir / "segment-000003" / "vectors.npy"
    hidden.rename(hidden.with_name("away"))
    for num_replicas in (1, 2):
        with pytest.raises(StoreCorrupt, match=r"^generation .* cannot be read: .*segment-000003/vectors\.npy"):
            spread(index_dir, shards.replicas, num_replicas)
    with spread(index_dir, shards.replicas, 2, fail_closed=False) as there:
        for _ in range(3):
            found = there.retrieve(QUERIES, 9)
            assert found.missing == ("segment-000003",) and found._replace(missing=()) == expected != whole
        hidden.with_name("away").rename(hidden)
        until(lambda: not there.retrieve(QUERIES, 9).missing)
        assert there.retrieve(QUERIES, 9) == whole


def test_what_cannot_be_used_is_told_before_anybody_is_waited_for(shards: ActorPool, index_dir: Path) -> None:
    """Ten minutes of waiting for shards to open a folder that is not there."""

    class Stranger(LetterEncoder):
        identity = EncoderIdentity("another", "e" * 64, 16)

    with pytest.raises(StoreMissing):
        spread(index_dir / "none", shards.replicas)
    with pytest.raises(ConfigError, match="index_dir"):
        ClusterRetriever(RetrieverConfig(), LetterEncoder(), shards.replicas)
    with pytest.raises(EncoderMismatch):
        ClusterRetriever(RetrieverConfig(index_dir=str(index_dir)), Stranger(), shards.replicas)


def change(index_dir: Path, number: int, note: Callable[[], None] = lambda: None) -> None:
    """A commit, a compaction now and then, and all removed from the disk that nobody has on lease. Notes every generation."""
    with IndexWriter(index_dir, LetterEncoder()) as writer:
        writer.upsert(Document(f"new{number % 5}", f"Version {number} of fact {number % 5} is told here."))
        writer.commit()
        note()
        if number % 3 == 0:
            writer.compact()
            note()
        writer.purge()


def test_the_index_changes_under_load_without_a_failed_or_a_mixed_answer(shards: ActorPool, index_dir: Path) -> None:
    """A query that meets a generation half opened, or one whose files a writer has just removed."""
    expected = {}

    def note() -> None:
        store = Store.open(index_dir)
        expected[store.generation] = Retriever(LetterEncoder(), store, follow=False).retrieve(QUERIES, 9).passages

    note()
    with spread(index_dir, shards.replicas, 2) as there:
        with under_load(there) as found:
            for number in range(1000):
                change(index_dir, number, note)
                if len({each.generation for each in list(found)}) > 5:
                    break
        assert len({each.generation for each in found}) > 5
        assert all(each.passages == expected[each.generation] for each in found)
        until(lambda: there.retrieve(QUERIES, 9).generation == list(expected)[-1])


def test_a_named_generation_is_stayed_with(shards: ActorPool, index_dir: Path) -> None:
    """A job over one generation that goes on with the next."""
    expected = local(index_dir).retrieve(QUERIES, 9)
    with spread(index_dir, shards.replicas, pointer=read_pointer(index_dir)) as there:
        delete(index_dir, "d20")
        assert there.retrieve(QUERIES, 9) == expected != local(index_dir).retrieve(QUERIES, 9)


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pinned_generation_stays_on_disk_until_nobody_needs_it(
    shards: ActorPool, index_dir: Path, dies: bool
) -> None:
    """An answer of minutes that loses its generation to two commits and a restart; files that are kept for ever."""
    with spread(index_dir, shards.replicas, 2) as there:
        pinned, expected = there.pinned(), there.retrieve(QUERIES, 9)
        for number in range(5):
            change(index_dir, number)
            there.retrieve(QUERIES, 1)
        assert there.retrieve(QUERIES, 9) != expected
        if dies:
            die(shards.replicas[0])
        assert pinned.retrieve(QUERIES, 9) == expected and pinned.generation == expected.generation
        assert len(set(locked_generations(index_dir))) == 2
        del pinned
        assert gc.collect() >= 0 and list(locked_generations(index_dir)) == [read_pointer(index_dir)]
    del there
    until(lambda: gc.collect() >= 0 and not list(locked_generations(index_dir)))  # a shard may be recovering


def test_a_new_generation_that_takes_long_to_open_keeps_no_query_waiting(
    shards: ActorPool, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that stands still for minutes after every large commit."""
    opened, gate = cluster_retriever.ClusterView.open, threading.Event()

    def open_late(view: Any, timeout_s: float) -> None:
        gate.wait(shard_parts.BOUND_S)
        opened(view, timeout_s)

    monkeypatch.setattr(cluster_retriever, "_SWAP_WAIT_S", 0.2)
    with spread(index_dir, shards.replicas, 2) as there:
        before = there.retrieve(QUERIES, 9)
        monkeypatch.setattr(cluster_retriever.ClusterView, "open", open_late)
        delete(index_dir, "d3")
        assert [there.retrieve(QUERIES, 9) for _ in range(3)] == [before] * 3
        gate.set()
        until(lambda: there.generation == read_current(index_dir)[1].generation_id)
        assert there.retrieve(QUERIES, 9) == local(index_dir).retrieve(QUERIES, 9)


@pytest.mark.slow
def test_reranked_answers_are_those_of_one_process(shards: ActorPool, index_dir: Path, tmp_path: Path) -> None:
    """Passages that are not reranked, or in another order, where the index lies on shards."""
    settings: dict[str, Any] = {"reranker": save_model(tmp_path / "reranker")}
    reranker = Reranker.load(settings["reranker"])
    config = RetrieverConfig(index_dir=str(index_dir), **settings)
    here = Retriever(LetterEncoder(), Store.open(index_dir), config, reranker=reranker)
    for num_replicas in (1, 2):  # scored by many, and by one
        with spread(index_dir, shards.replicas, num_replicas, **settings) as there:
            for scope in SCOPES:
                assert there.retrieve(QUERIES, 5, scope) == here.retrieve(QUERIES, 5, scope)
            assert looked_up(there, SCOPES[1]) == looked_up(here, SCOPES[1])


def test_a_call_that_is_not_answered_ends_in_an_error(shards: ActorPool, index_dir: Path, held: Path) -> None:
    """An index on a machine that hangs takes all who ask with it, or a service cannot stop."""
    held.touch()
    with spread(index_dir, shards.replicas[:1], timeout_s=1.0) as there:
        error = r"cannot be searched: a shard of the index did not answer within 1 s$"
        with pytest.raises(RetrievalError, match=error):
            there.retrieve(QUERIES, 1)
    with spread(index_dir, shards.replicas[1:], timeout_s=500.0) as there, ThreadPoolExecutor(1) as thread:
        pinned, queries = there.pinned(), there.encode(QUERIES)
        call = thread.submit(there.search, queries, 1)
        there.close()
        with pytest.raises(RetrievalError, match="was closed"):
            call.result(shard_parts.BOUND_S)
        for closed in (there, pinned):
            with pytest.raises(RetrievalError, match="was closed"):
                closed.search(queries, 1)
    held.unlink()


def test_an_error_of_the_actors_code_is_told_as_such(shards: ActorPool, index_dir: Path) -> None:
    """An error in our code that is told as a lost machine; an error of the user's that is told as ours."""
    with spread(index_dir, shards.replicas[:1], mode="dense") as there:
        queries = there.encode(QUERIES)
        with pytest.raises(RetrievalError, match=r"cannot be searched: a shard of the index failed: .*NoneType"):
            there.search(queries, 1, None)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="no vector"):
            there.search(local(index_dir, mode="sparse").encode(QUERIES), 1)
        assert len(there.search(queries, 1).passages) == 3
