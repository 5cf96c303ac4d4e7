"""A rank that dies or hangs ends its group in seconds, an engine that only has nothing to do does not."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rank_process import Followers
from stand_ins import Heard
from tiny_target import save_model, target_config, tiny_engine

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import FinishReason, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.parallel import load_rank
from ragspec.errors import EngineClosed, ModelError, RankLost
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.ranks import HEARTBEAT_S

pytestmark = pytest.mark.slow
ENGINE = EngineConfig(max_kv_tokens=512, num_threads=1)
TIMEOUT_S = 2.0
NOTICED_S = 5.0
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with Followers(1) as followers:
        yield followers


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    return target_config(str(save_model("llama", tmp_path_factory.mktemp("losses") / "model")), "float32")


@pytest.fixture
def engine(followers: Followers, config: TargetConfig) -> Iterator[Engine]:
    """On two ranks; the other one is `followers.processes[0]`."""
    with (
        followers.group(2, config, ENGINE, TIMEOUT_S) as ranks,
        tiny_engine(load_rank(config, ENGINE, ranks), num_kv_slots=512) as engine,
    ):
        yield engine


def lose(followers: Followers, how: int) -> float:
    os.kill(followers.processes[0].pid, how)
    return time.monotonic()


def assert_dead(engine: Engine) -> None:
    """Nothing more is taken, and nobody waits for ever."""
    assert "rank 0 of 2 lost its group" in engine.lost
    with pytest.raises(EngineClosed, match="lost its group"):
        for number in range(100):  # the engine may be on its way to the end
            engine.submit(Request(f"late{number}", (5,), LONG), lambda delta: None)
            time.sleep(0.05)
    with pytest.raises((EngineClosed, RankLost)):
        engine.between_steps(lambda: None)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_an_idle_engine_notices_a_lost_rank(followers: Followers, engine: Engine, how: int) -> None:
    """An idle engine looked alive until somebody asked it, and then waited half an hour for its other half."""
    begin = lose(followers, how)
    while not engine.lost and time.monotonic() < begin + NOTICED_S:
        time.sleep(0.05)
    try:
        assert_dead(engine)
    finally:
        followers.replace(1)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_lost_in_a_step_ends_every_request(followers: Followers, engine: Engine, how: int) -> None:
    """Only what ran in the failed step was told, a queued request waited for ever; half an answer was given as a whole one."""
    requests = [Request(f"r{i}", (5 + i, 6), LONG) for i in range(80)]
    heard = Heard(len(requests))
    engine.submit_all(requests, heard)
    assert heard.began.wait(60)
    lose(followers, how)
    try:
        ends = {(delta.finish_reason, delta.error) for delta in heard.wait(NOTICED_S) if delta.finish_reason}
        assert ends == {(FinishReason.ERROR, engine.lost)}
        assert_dead(engine)
    finally:
        followers.replace(1)


def test_an_idle_engine_outlives_every_timeout(followers: Followers, engine: Engine) -> None:
    """Followers that waited for the next step gave up after the seconds that a collective may take."""
    request = Request("again", (5, 6, 7), SamplingParams(max_tokens=8))
    first = engine.generate([request])[0].token_ids
    time.sleep(TIMEOUT_S + 2 * HEARTBEAT_S)
    assert engine.generate([request])[0].token_ids == first
    engine.between_steps(lambda: time.sleep(TIMEOUT_S + 1))  # nor does it beat while it does something else
    assert engine.generate([request])[0].token_ids == first
    engine.close()
    assert followers.outcomes(2) == ["stopped"]


def test_a_follower_ends_when_rank_0_does(followers: Followers, config: TargetConfig) -> None:
    """Ranks of a dead engine stayed, with their memory, until somebody found them."""
    with followers.group(2, config, ENGINE, TIMEOUT_S) as ranks:
        load_rank(config, ENGINE, ranks)
    begin = time.monotonic()  # the group was closed without a word, as by a process that ends
    assert followers.outcomes(2)[0].startswith("RankLost: rank 1 of 2 lost its group")
    assert time.monotonic() < begin + NOTICED_S


def test_a_step_that_fails_on_rank_0_ends_the_group(followers: Followers, config: TargetConfig) -> None:
    """Rank 0 went on with the next step while the followers waited for the rest of the last one, and read it as this one's."""
    with followers.group(2, config, ENGINE, TIMEOUT_S) as ranks:
        target = load_rank(config, ENGINE, ranks)
        slots = SequenceSlots(target.pool)
        batch = Batch([ScheduledSequence(slots, range(4))])
        target._model.model.layers[1].feed_forward.down = None
        with pytest.raises(RankLost, match="failed inside a step"):
            target.forward(np.arange(4, dtype=np.int32), batch.metadata, np.arange(4, dtype=np.int32))
        with pytest.raises(RankLost, match="closed"):
            target.forward(np.arange(4, dtype=np.int32), batch.metadata, np.arange(4, dtype=np.int32))
    assert followers.outcomes(2)[0].startswith("RankLost")


def test_ranks_of_different_settings_are_refused_on_every_rank(followers: Followers, config: TargetConfig) -> None:
    """One rank computed with int8 weights, or held another model, and the text was wrong without a word."""
    with (
        followers.group(2, config, ENGINE, quantization="int8") as ranks,
        pytest.raises(ModelError, match="differ in dtype"),
    ):
        load_rank(config, ENGINE, ranks)
    assert "ModelError" in followers.outcomes(2)[0]


def test_a_rank_that_cannot_load_is_told_to_the_others_at_once(
    followers: Followers, config: TargetConfig, tmp_path: Path
) -> None:
    """A model missing on one node left the other ranks waiting for it."""
    begin = time.monotonic()
    with followers.group(2, config, ENGINE, model=str(tmp_path)) as ranks, pytest.raises(RankLost):
        load_engine(config, ENGINE, DraftingConfig(), ranks=ranks)
    assert time.monotonic() < begin + 20
    assert followers.outcomes(2) == [f"ModelError: {tmp_path} is not a model directory: it has no config.json"]
