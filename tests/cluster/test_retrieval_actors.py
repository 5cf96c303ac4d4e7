"""Encoders and shards in actors: the same vectors and no segment opened twice, also when an actor dies or hangs."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import letter_encoder
import numpy as np
import pytest
import ray
from letter_encoder import LetterEncoder
from ray import cloudpickle
from shard_parts import delete, die, pid_of, write_index

from ragspec.cluster.actors import ActorPool
from ragspec.cluster.remote_retrieval import encoders
from ragspec.cluster.remote_retrieval.encoders import EncoderActor, EncoderPool, RemoteEncoder
from ragspec.cluster.remote_retrieval.hedged_call import RetryPolicy
from ragspec.cluster.remote_retrieval.segment_cache import SegmentCache, SegmentSet
from ragspec.config import EncoderConfig
from ragspec.errors import EncoderMismatch, ModelError, RetrievalError, StoreCorrupt
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray, TextKind
from ragspec.retrieval.index.store import Store

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(letter_encoder)

POLICY = RetryPolicy(60.0, 0.7)
TEXTS = [f"{'word ' * (number % 9)}number {number}." for number in range(37)]


@pytest.fixture
def index_dir(tmp_path: Path) -> Path:
    return write_index(tmp_path / "index")


def segments_of(store: Store) -> SegmentSet:
    return SegmentSet(str(store.index_dir), store.pointer, tuple(live.segment.name for live in store.segments))


def test_a_shard_keeps_three_generations_and_opens_no_segment_twice(index_dir: Path) -> None:
    """A gigabyte hashed and packed again for every deleted document; generations that are kept until the memory is full."""
    opened, seen = SegmentCache(), []
    for number in range(5):
        store = Store.open(index_dir)
        opened.get(segments_of(store))
        seen.append({live.segment.name: live.segment for live in opened.stores[-1].segments})
        delete(index_dir, f"d{number + 20}")
    assert all(each == seen[0] for each in seen) and len(opened.generations) == 3


def test_segments_are_opened_as_they_are_asked_for(index_dir: Path) -> None:
    """Every shard holds the whole index in memory, or opens all of it again for one more segment."""
    opened, (pointer, names) = SegmentCache(), segments_of(Store.open(index_dir))[1:3]
    parts = [SegmentSet(str(index_dir), pointer, some) for some in (names[:2], names[1:3], names[:1])]
    for part, expected in zip(parts, (2, 3, 3), strict=True):
        assert opened.get(part).shard(part.names).segment_names == frozenset(part.names)
        assert sum(len(store.segments) for store in opened.stores) == expected
    with ThreadPoolExecutor(8) as threads:  # whole, at once
        shards = list(threads.map(lambda _: opened.get(parts[0]._replace(names=names)), range(8)))
    assert all(each is shards[0] for each in shards)
    assert sum(len(store.segments) for store in opened.stores) == len(names)


def test_a_generation_in_use_stays_open_while_others_come_and_go(index_dir: Path) -> None:
    """A reader that loses its generation, of which the files are gone, to one that another reader asked for before it."""
    opened, first = SegmentCache(), segments_of(Store.open(index_dir))
    latest = []
    for number in range(5):
        latest.append(segments_of(Store.open(index_dir)))
        opened.get(latest[-1])
        assert opened.get(first).shard(first.names).segment_names == frozenset(first.names)
        delete(index_dir, f"d{number + 20}")
    assert [pointer for _, pointer, _ in opened.generations] == [latest[3].pointer, latest[4].pointer, first.pointer]
    with pytest.raises(StoreCorrupt):
        opened.get(latest[1])
    assert len(opened.generations) == 3


def letters(config: EncoderConfig) -> LetterEncoder:
    if config.model == "broken":
        raise ModelError("the weights of broken are missing")
    return LetterEncoder()


@pytest.mark.slow
def test_encoders_elsewhere_outlive_each_other(session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors in the order in which actors finish; queries that wait for an encoder that is dead or stopped."""
    monkeypatch.setattr(encoders, "_TEXTS_PER_CALL", 5)
    here, expected = LetterEncoder(), LetterEncoder().encode(TEXTS)
    with (
        ActorPool(EncoderActor, (EncoderConfig(), letters), 2, prefix="encoder") as own,
        contextlib.closing(RemoteEncoder(own.replicas, POLICY, hang_s=2.0)) as there,
    ):
        assert np.array_equal(there.encode(TEXTS), expected) and there.encode([]).shape == (0, 16)
        found = there.identity, there.max_tokens, there.count_tokens(TEXTS)
        assert found == (here.identity, here.max_tokens, here.count_tokens(TEXTS))
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(there.encode, TEXTS[number:], "query") for number in range(20)]
            die(own.replicas[0])
            for number, call in enumerate(calls):
                assert np.array_equal(call.result(), expected[number:])
        old = die(own.replicas[1], signal.SIGSTOP)
        for _ in range(3):
            assert np.array_equal(there.encode(TEXTS), expected)
        assert pid_of(own.replicas[1]) != old


class Failing(LetterEncoder):
    """Computes nothing more after a text that says so."""

    lost = ""

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        if any("fail" in text for text in texts):
            self.lost = "the encoder is lost"
        if self.lost:
            raise MemoryError
        return super().encode(texts, kind)


def test_a_lost_encoder_s_process_ends(session: None) -> None:
    """It failed every call for ever, and answered its health checks."""
    with (
        ActorPool(EncoderActor, (EncoderConfig(), lambda _: Failing()), prefix="encoder") as own,
        contextlib.closing(RemoteEncoder(own.replicas, POLICY)) as there,
    ):
        assert np.array_equal(there.encode(TEXTS), LetterEncoder().encode(TEXTS))
        old = pid_of(own.replicas[0])
        there._policy = POLICY._replace(timeout_s=2.0)
        with pytest.raises(RetrievalError):
            there.encode(["fail"])
        there._policy = POLICY
        assert np.array_equal(there.encode(TEXTS), LetterEncoder().encode(TEXTS))
        assert pid_of(own.replicas[0]) != old


@pytest.mark.slow
def test_without_a_fitting_encoder_there_is_one_clear_error(session: None) -> None:
    """Queries encoded by another model than the index, or a wait for an encoder that nobody starts."""
    with (
        ActorPool(EncoderActor, (EncoderConfig(), letters), prefix="encoder") as own,
        contextlib.closing(RemoteEncoder(own.replicas, POLICY)) as there,
    ):
        meant = there.identity
        there.identity = EncoderIdentity("another", "e" * 64, 16)
        with pytest.raises(EncoderMismatch, match=r"not EncoderIdentity.*another"):
            there.encode(TEXTS)
        there.identity = meant
        there._policy = POLICY._replace(timeout_s=3.0)
        ray.kill(own.replicas[0].actor)
        with pytest.raises(RetrievalError, match="an encoder is lost"):
            there.encode(TEXTS)
    with (
        ActorPool(EncoderActor, (EncoderConfig(model="broken"), letters), prefix="encoder") as broken,
        pytest.raises(ModelError, match="weights of broken"),
    ):
        RemoteEncoder(broken.replicas)


@pytest.mark.slow
def test_a_pool_of_encoders_encodes_as_one_does(session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that depend on the process which encodes."""
    monkeypatch.setattr(encoders, "_TEXTS_PER_CALL", 5)
    with contextlib.closing(EncoderPool(EncoderConfig(), num_workers=2)) as pool:
        one = Encoder.load(EncoderConfig())
        assert np.array_equal(pool.encode(TEXTS), one.encode(TEXTS)) and pool.encode([]).shape == (0, 384)
        assert (pool.identity, pool.max_tokens, pool.count_tokens(TEXTS)) == (
            one.identity,
            256,
            one.count_tokens(TEXTS),
        )
