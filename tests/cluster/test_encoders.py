"""Encoders in actors: the vectors of one process, also when an actor dies or hangs."""

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
from shard_parts import die, pid_of
from stand_ins import until

from ragspec.cluster import actors
from ragspec.cluster.actors import ActorPool
from ragspec.cluster.remote_retrieval import encoders
from ragspec.cluster.remote_retrieval.encoders import EncoderActor, EncoderPool, RemoteEncoder
from ragspec.cluster.remote_retrieval.worker_pool import RetryPolicy
from ragspec.config import EncoderConfig
from ragspec.errors import EncoderMismatch, ModelError, RetrievalError
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray, TextKind

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(letter_encoder)

POLICY = RetryPolicy(60.0, 0.7)
TEXTS = [f"{'word ' * (number % 9)}number {number}." for number in range(37)]


def letters(config: EncoderConfig) -> LetterEncoder:
    if config.model == "broken":
        raise ModelError("the weights of broken are missing")
    return LetterEncoder()


@pytest.mark.ray
@pytest.mark.slow
def test_encoders_elsewhere_outlive_each_other(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("lost", ["", "the encoder is lost"])
def test_a_lost_encoder_ends_its_process(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """A lost encoder failed every call for ever, and answered its health checks."""
    ended: list[str] = []
    monkeypatch.setattr(actors, "end_process", ended.append)
    actor = EncoderActor(EncoderConfig(), lambda _: Failing())
    identity = LetterEncoder().identity
    with pytest.raises(MemoryError) if lost else contextlib.nullcontext():
        actor.encode(identity, ["fail" if lost else "good"], "document")
    assert ended == ([lost] if lost else [])


@pytest.mark.ray
@pytest.mark.slow
def test_without_a_fitting_encoder_there_is_one_clear_error(local_ray: None) -> None:
    """Queries encoded by another model than the index, or a wait for an encoder that nobody starts."""
    with (
        ActorPool(EncoderActor, (EncoderConfig(), letters), prefix="encoder") as own,
        contextlib.closing(RemoteEncoder(own.replicas, POLICY._replace(timeout_s=5.0))) as there,
    ):
        meant = there.identity
        there.identity = EncoderIdentity("another", "e" * 64, 16)
        with pytest.raises(EncoderMismatch, match=r"not EncoderIdentity.*another"):
            there.encode(TEXTS)
        there.identity = meant
        old = pid_of(own.replicas[0])
        ray.kill(own.replicas[0].actor)
        until(lambda: not Path(f"/proc/{old}").exists())
        with pytest.raises(RetrievalError, match="an encoder is lost"):
            there.encode(TEXTS)
    with (
        ActorPool(EncoderActor, (EncoderConfig(model="broken"), letters), prefix="encoder") as broken,
        pytest.raises(ModelError, match="weights of broken"),
    ):
        RemoteEncoder(broken.replicas)


@pytest.mark.ray
@pytest.mark.slow
def test_a_pool_of_encoders_encodes_as_one_does(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that depend on the process which encodes."""
    monkeypatch.setattr(encoders, "_TEXTS_PER_CALL", 5)
    with contextlib.closing(EncoderPool(EncoderConfig(), num_workers=2)) as pool:
        one = Encoder.load(EncoderConfig())
        assert np.array_equal(pool.encode(TEXTS), one.encode(TEXTS)) and pool.encode([]).shape == (0, 384)
        found = pool.identity, pool.max_tokens, pool.count_tokens(TEXTS)
        assert found == (one.identity, 256, one.count_tokens(TEXTS))
