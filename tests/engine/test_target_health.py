"""A step that fails ends its own requests; a target that computes nothing any more ends the engine.

An engine's thread beats while it has nothing else to do.
"""

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from stand_ins import Heard
from tiny_target import Tiny, tiny_engine

from ragspec.core import FinishReason, Request, SamplingParams
from ragspec.drafting.planner import Planner
from ragspec.engine import sequence
from ragspec.engine.client import CommandQueue, completion_of
from ragspec.engine.scheduler import Scheduler
from ragspec.errors import EngineClosed, EngineError, RankLost
from ragspec.numerics import health
from ragspec.numerics.kv_cache import SequenceSlots


def ask(name: str) -> Request:
    return Request(name, (3, 4, 5), SamplingParams(max_tokens=4, seed=1, ignore_eos=True))


def broken(*_: Any) -> Any:
    raise RuntimeError("could not create a primitive")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass only while `why_lost` waits."""
    passed = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: passed[0])
    monkeypatch.setattr(health.time, "sleep", lambda seconds: passed.__setitem__(0, passed[0] + seconds))
    return passed


def test_a_target_that_computes_nothing_any_more_ends_the_engine(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory for a moment, oneDNN never computed again, and every request ended with an error until somebody looked."""
    target = tiny()
    monkeypatch.setattr(health, "_LOST_S", 0.0)
    with tiny_engine(target) as engine:
        monkeypatch.setattr(target, "forward_tapped", broken)
        with pytest.raises(EngineError, match="the target is lost"):
            engine.generate([ask("a")])
        assert "could not create a primitive" in engine.lost
        with pytest.raises(EngineClosed, match="the target is lost"):
            engine.generate([ask("b")])


def test_a_step_that_fails_alone_ends_only_its_requests(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's requests that find a fault, sent again and again, end the engine for all."""
    target = tiny()
    monkeypatch.setattr(health, "_LOST_S", 0.0)
    with tiny_engine(target) as engine:
        before, free = engine.generate([ask("a")])[0].token_ids, target.pool.num_free_pages
        for number in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(Planner, "plan", broken)
                with pytest.raises(EngineError, match="could not create"):
                    engine.generate([ask(f"b{number}")])
        assert engine.generate([ask("c")])[0].token_ids == before and not engine.lost
        assert target.pool.num_free_pages == free


def test_requests_end_when_scheduling_fails_while_others_wait(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the step before ended; the others waited for ever while every step failed."""
    heard = Heard(2)
    with tiny_engine(tiny(), max_num_seqs=1) as engine:
        schedule, num_steps = Scheduler.schedule, 0

        def failing(scheduler: Scheduler) -> Any:
            nonlocal num_steps
            num_steps += 1
            return schedule(scheduler) if num_steps < 3 else broken()

        monkeypatch.setattr(Scheduler, "schedule", failing)
        engine.submit_all([ask("a"), ask("b")], heard)
        ends = [delta.finish_reason for delta in heard.wait() if delta.finish_reason]
        assert ends == [FinishReason.ERROR] * 2 and num_steps < 6


def test_an_answer_that_is_complete_stays_so_when_another_of_its_step_fails(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last tokens were decided, and it ended with the other's error; or the other ended as if it had all of its own."""
    first, second = Heard(), Heard()
    with tiny_engine(tiny()) as engine:
        expected = engine.generate([ask("c")])[0].token_ids
        monkeypatch.setattr(sequence, "log_probs", lambda *_: [] if len(second.deltas) < 3 else broken())
        with_logprobs = replace(ask("b"), params=replace(ask("b").params, logprobs=0))
        engine.between_steps(lambda: (engine.submit(ask("a"), first), engine.submit(with_logprobs, second)))
        assert completion_of(first.wait()).token_ids == expected and not first.deltas[-1].error
    assert first.deltas[-1].finish_reason is FinishReason.LENGTH
    assert second.wait()[-1].finish_reason is FinishReason.ERROR and "primitive" in second.deltas[-1].error


@pytest.mark.parametrize("size", [(1, 1), (5, 1), (7, 7), (9, 0), (64, 64)])
def test_what_failed_is_tried_until_it_computes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, now: list[float], size: tuple[int, int]
) -> None:
    """Memory that was short for some seconds was the end; or a forward of another size hid that this one never computes again."""
    target = tiny()
    forward, tried, back_s = target.forward_tapped, list[tuple[int, int]](), [9.0]

    def failing(token_ids: Any, metadata: Any, logit_rows: Any, taps: Any) -> Any:
        tried.append((len(token_ids), len(logit_rows)))
        return broken() if now[0] < back_s[0] else forward(token_ids, metadata, logit_rows, taps)

    monkeypatch.setattr(target, "forward_tapped", failing)
    free = target.pool.num_free_pages
    target.check_health(*size)
    assert now[0] == 9.0 and set(tried) == {size}
    back_s[0] = 99.0
    with pytest.raises(RankLost, match="RuntimeError: could not create a primitive"):
        target.check_health(*size)
    assert now[0] == 19.0 and target.pool.num_free_pages == free


def test_without_room_nothing_is_known(tiny: Tiny, now: list[float]) -> None:
    """A full pool was a lost target."""
    target = tiny()
    held = SequenceSlots(target.pool)
    held.reserve(target.pool.num_slots)
    target.check_health(5, 1)
    assert now[0] == 0.0
    held.release()


def test_an_idle_engine_beats_however_often_it_is_asked_something() -> None:
    """A host that asks four times a second kept the engine from ever looking after its ranks."""
    beats: list[float] = []
    commands = CommandQueue(lambda: beats.append(time.monotonic()), 0.1)
    asking = threading.Event()

    def ask() -> None:
        for _ in range(50):
            commands.put(lambda: None)
            time.sleep(0.02)
        asking.set()
        commands.end()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not commands.run(lambda: True)
    thread.join()
    assert asking.is_set() and len(beats) >= 3
    assert min(later - earlier for earlier, later in itertools.pairwise(beats)) >= 0.1


def test_an_engine_without_other_ranks_sleeps_until_it_is_asked() -> None:
    """Every idle engine woke up each second for nothing."""
    commands = CommandQueue(lambda: pytest.fail("there is nobody to beat for"), None)
    threading.Timer(0.2, commands.end).start()
    assert not commands.run(lambda: True)


def test_a_busy_engine_runs_what_it_was_asked_and_goes_on() -> None:
    """A step waited for a command, or for a beat that a step is itself."""
    commands, done = CommandQueue(lambda: pytest.fail("steps are beats"), 0.0), []
    for number in range(3):
        commands.put(lambda number=number: done.append(number))
    assert commands.run(lambda: False)
    assert done == [0, 1, 2]


def test_a_failing_command_is_not_the_end_and_a_failing_beat_is(caplog: pytest.LogCaptureFixture) -> None:
    """One bad call ended the engine's thread; a lost rank was logged and forgotten."""

    def lose() -> None:
        raise RankLost("gone")

    commands, done = CommandQueue(lose, 0.1), []
    commands.put(lambda: 1 // 0)
    commands.put(lambda: done.append(1))
    assert commands.run(lambda: False) and done == [1]
    assert "a command to the engine failed" in caplog.text
    with pytest.raises(RankLost):
        commands.run(lambda: True)
