"""Cells of the suite `drafters` over an engine whose times and tokens are made up: ratios, turns, equality."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from stand_ins import no_tick

from ragspec.core import Completion, FinishReason, GenerationStats, Request, Speculation
from ragspec.engine.engine import Engine
from ragspec.evaluation import timing
from ragspec.evaluation.cases import Case
from ragspec.evaluation.suites.drafters.runs import Sampling, alone_rows, together_rows
from ragspec.evaluation.suites.drafters.variants import NONE, Setup

CASES = [Case(f"c{i}", "prose", (1, 2, 3), (), 8) for i in range(4)]
FAST, FALSE = "fast", "false"
SETUP = Setup({FAST: Speculation(("fast",)), FALSE: Speculation(("false",))}, ("fast", "false"))


class MadeUp:
    """Plain: 1 s to the first token, 4 s after it. Drafted: 1.5 s and 0.5 s. The drafter "false" changes a token.

    Drafting is slow in the first six generations, two of each.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[str, ...] | None] = []
        self.params: list[Any] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.now_s += max(sum(self._times(request)) for request in requests)
        return [self._completion(request) for request in requests]

    def _times(self, request: Request) -> tuple[float, float]:
        return (1.5, 0.5) if request.speculation else (1.0, 4.0)

    def _completion(self, request: Request) -> Completion:
        drafters = request.speculation.drafters
        self.asked.append(drafters)
        self.params.append(request.params)
        first_s, decode_s = self._times(request)
        known: dict[str, float] = {"num_output_tokens": 9, "num_first_tokens": 1, "num_steps": 3 if drafters else 9}
        known |= {"draft_s": 0.003 if len(self.asked) > 6 else 3.0, "prompt_draft_s": 0.5 if drafters else 0.0}
        stats = GenerationStats(**known, prefill_s=first_s, decode_s=decode_s)  # type: ignore[arg-type]
        ids = (*range(8), 99 if drafters == ("false",) else 8)
        return Completion(request.id, 0, ids, "", FinishReason.LENGTH, (), stats)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    engine = MadeUp()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: engine.now_s))
    return engine


def by_variant(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({row["variant"] for row in rows}) == len(rows) == 3
    return {row["variant"]: row for row in rows}


def test_speed_counts_what_a_draft_adds_to_the_prompts_step(engine: MadeUp) -> None:
    """Bug guarded: a ratio the wrong way round; a head whose reading of the prompt costs nothing."""
    rows = by_variant(alone_rows(cast(Engine, engine), SETUP, "prose", CASES, Sampling(1.0, num_runs=2), no_tick))
    assert rows[FAST]["speedup"] == pytest.approx(4.0 / (0.5 + 0.5))
    assert rows[FAST]["speedup_end_to_end"] == pytest.approx(5.0 / 2.0)
    assert rows[NONE]["speedup"] == 1.0 and rows[NONE]["tokens_per_s"] == pytest.approx(8 / 4)
    assert rows[FAST]["acceptance_length"] == 4.0 and rows[FAST]["draft_ms"] == pytest.approx(1.0)
    assert rows[FAST]["batch"] == 1 and not rows[FAST]["prompts_included"]


def test_all_take_turns_and_warm_up_does_not_count(engine: MadeUp) -> None:
    """Bug guarded: all runs of one variant after all of another; statistics of the first, slow generations."""
    rows = alone_rows(cast(Engine, engine), SETUP, "prose", CASES, Sampling(1.0, num_runs=2), no_tick)
    assert engine.asked == [(), ("fast",), ("false",)] * (2 + 2 * len(CASES))
    assert rows[0]["num_prompts"] == len(CASES)
    assert all(params.temperature == 1.0 and params.ignore_eos for params in engine.params)
    alone_rows(cast(Engine, engine), SETUP, "chat", CASES, Sampling(0.0), no_tick)
    assert not engine.params[-1].ignore_eos and engine.params[-1].temperature == 0.0


@pytest.mark.parametrize("together", [False, True])
def test_a_variant_that_writes_something_else_is_found_out(together: bool, engine: MadeUp) -> None:
    """Bug guarded: "identical" that compares a variant with itself, or with nothing."""
    sampling = Sampling(0.0, num_runs=2)
    rows = by_variant(
        together_rows(cast(Engine, engine), SETUP, "prose", CASES, 2, sampling)
        if together
        else alone_rows(cast(Engine, engine), SETUP, "prose", CASES, sampling, no_tick)
    )
    assert {name: row["identical"] for name, row in rows.items()} == {NONE: True, FAST: True, FALSE: False}


def test_groups_are_timed_from_start_to_end(engine: MadeUp) -> None:
    """Bug guarded: a ratio the wrong way round; a last group that is too small and counted as a whole one."""
    rows = by_variant(together_rows(cast(Engine, engine), SETUP, "prose", CASES[:3], 2, Sampling(0.0)))
    assert rows[FAST]["speedup"] == pytest.approx(5.0 / 2.0)
    assert rows[FAST]["tokens_per_s"] == pytest.approx(2 * 9 / 2.0) and rows[FAST]["num_prompts"] == 2
    assert rows[FAST]["batch"] == 2 and rows[FAST]["prompts_included"]
    assert engine.asked == [(), (), ("fast",), ("fast",), ("false",), ("false",)]
