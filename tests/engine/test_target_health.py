"""A step that fails ends its own requests; a target that computes nothing new any more ends the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_target import tiny_engine

from ragspec.core import Request, SamplingParams
from ragspec.engine.target import Target
from ragspec.engine.target_health import TargetHealth
from ragspec.errors import EngineClosed, EngineError, RankLost
from ragspec.numerics import health

Tiny = Callable[..., Target]


def ask(name: str) -> Request:
    return Request(name, (3, 4, 5), SamplingParams(max_tokens=4, seed=1, ignore_eos=True))


def broken(*_: Any) -> Any:
    raise RuntimeError("could not create a primitive")


def test_a_target_that_computes_nothing_any_more_ends_the_engine(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory for a moment, oneDNN never computed again, and every request ended with an error until somebody looked."""
    target = tiny()
    with tiny_engine(target) as engine:
        monkeypatch.setattr(target, "forward_tapped", broken)
        with pytest.raises(EngineError, match="RuntimeError: could not create"):
            engine.generate([ask("a")])
        assert not engine.lost  # memory may come back
        monkeypatch.setattr(health, "_LOST_S", -1.0)
        with pytest.raises(EngineError, match="computes nothing new any more"):
            engine.generate([ask("b")])
        assert "could not create a primitive" in engine.lost
        with pytest.raises(EngineClosed, match="computes nothing new any more"):
            engine.generate([ask("c")])


def test_a_step_that_fails_alone_ends_only_its_requests(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's requests that find a fault, sent again and again, end the engine for all."""
    target = tiny()
    monkeypatch.setattr(health, "_LOST_S", -1.0)
    with tiny_engine(target) as engine:
        before, free = engine.generate([ask("a")])[0].token_ids, target.pool.num_free_pages
        for number in range(4):
            with monkeypatch.context() as patch:
                patch.setattr(engine._planner, "plan", broken)
                with pytest.raises(EngineError, match="could not create"):
                    engine.generate([ask(f"b{number}")])
        assert engine.generate([ask("c")])[0].token_ids == before and not engine.lost
        assert target.pool.num_free_pages == free


def test_failures_that_lie_apart_are_no_lost_target(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short failures an hour apart were a dead engine; or a known shape, which computes, hid that no other does."""
    target, now, largest = tiny(), [0.0], [1]
    forward = target.forward_tapped

    def failing(token_ids: Any, *rest: Any) -> Any:
        return broken() if len(token_ids) > largest[0] else forward(token_ids, *rest)

    monkeypatch.setattr(target, "forward_tapped", failing)
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    of_target, free = TargetHealth(target), target.pool.num_free_pages
    of_target.step_failed(5)
    for now[0] in (3600.0, 3609.0):
        of_target.step_failed(5)
    largest[0], now[0] = 5, 3611.0
    of_target.step_failed(5)  # it computes again
    largest[0] = 1
    for now[0] in (3612.0, 3621.0):
        of_target.step_failed(5)
    now[0] = 3623.0
    with pytest.raises(RankLost, match="RuntimeError: could not create a primitive"):
        of_target.step_failed(5)
    assert target.pool.num_free_pages == free
