"""The arithmetic of the ratios: which seconds count, over which prompts, and when two outputs are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ragspec.core import GenerationStats
from ragspec.evaluation.timing import (
    GENERATE,
    PLAIN,
    SPECULATIVE,
    Equality,
    TimedGeneration,
    Timings,
    take_turns,
    warm_turns,
)

ABC = (1, 2, 3)


def timings(**runs: list[list[TimedGeneration]]) -> Timings:
    return Timings(runs, [0.5] * len(next(iter(runs.values()))[0]))


def test_ratio_is_of_the_prompts_medians_over_runs() -> None:
    """Bug guarded: a mean of ratios, which one outlier decides; one disturbed prompt that spoils a whole run."""
    plain = [
        [TimedGeneration(ABC, 1.0, s), TimedGeneration(ABC, 1.0, t)] for s, t in ((4.0, 90.0), (6.0, 2.0), (90.0, 2.0))
    ]
    fast = [
        [TimedGeneration(ABC, 1.0, 2.0), TimedGeneration(ABC, 1.0, 1.5, stats=GenerationStats(prompt_draft_s=s))]
        for s in (9.0, 0.5, 0.5)
    ]
    assert timings(plain=plain, speculative=fast).ratio(PLAIN, SPECULATIVE) == 2.0


def test_what_the_draft_adds_to_the_prompt_step_counts() -> None:
    """Bug guarded: an answer accepted whole in the prompt's step counted as taking no time at all."""
    drafted = GenerationStats(prompt_draft_s=0.5)
    pair = timings(
        plain=[[TimedGeneration(ABC, 1.0, 4.0)]], speculative=[[TimedGeneration(ABC, 1.5, 0.0, stats=drafted)]]
    )
    assert pair.ratio(PLAIN, SPECULATIVE) == 8.0
    assert pair.ratio(PLAIN, SPECULATIVE, Timings.first_to_last_s) is None
    assert pair.ratio(PLAIN, SPECULATIVE, Timings.end_to_end_s) == pytest.approx(5.5 / 2.0)


@pytest.mark.parametrize("first_s", [1.0, 3.0])
def test_the_prompts_time_is_no_time_of_decoding(first_s: float) -> None:
    """Bug guarded: noise in the time of a long prompt that makes decoding a short answer look faster, or slower."""
    pair = timings(plain=[[TimedGeneration(ABC, 2.0, 4.0)]], speculative=[[TimedGeneration(ABC, first_s, 2.0)]])
    assert pair.ratio(PLAIN, SPECULATIVE) == 2.0


def test_only_prompts_with_the_same_tokens_are_compared() -> None:
    """Bug guarded: a ratio of times for different amounts of work."""
    generate = [[TimedGeneration(ABC, 1.0, 4.0), TimedGeneration((1,), 1.0, 100.0)]]
    ours = [[TimedGeneration(ABC, 1.0, 1.0), TimedGeneration(ABC, 1.0, 1.0)]]
    both = timings(generate=generate, speculative=ours)
    assert both.ratio(GENERATE, SPECULATIVE) == 4.0
    assert both.agreement(GENERATE, SPECULATIVE) == 0.5


def test_what_did_not_run_has_no_ratio() -> None:
    """Bug guarded: a number for a peer that was left out."""
    alone = timings(plain=[[TimedGeneration(ABC, 1.0, 1.0)]])
    assert alone.ratio(GENERATE, PLAIN) is None
    assert alone.agreement(GENERATE, PLAIN) is None


def test_acceptance_length_counts_every_token_and_step() -> None:
    """Bug guarded: a mean over prompts, in which short answers weigh as much as long ones."""
    runs = [[TimedGeneration((1,) * 9, 1.0, 1.0, num_steps=3), TimedGeneration((1,), 1.0, 1.0, num_steps=1)]]
    assert timings(speculative=runs).acceptance_length(SPECULATIVE) == 2.5


def test_one_different_token_is_not_identical() -> None:
    """The check can fail."""
    equality = Equality()
    assert equality.identical is None
    equality.check("a", [TimedGeneration(ABC, 0, 0)], [TimedGeneration(ABC, 9, 9)])
    assert equality.identical is True
    equality.check("b", [TimedGeneration(ABC, 0, 0)], [TimedGeneration((1, 2, 4), 0, 0)])
    assert equality.identical is False
    assert equality.as_text() == {"a": "1/1", "b": "0/1"}


def test_contenders_take_turns() -> None:
    """Bug guarded: all runs of one contender after all of another, so that a machine's mood decides."""
    calls: list[str] = []

    def contender(name: str) -> Callable[[str], int]:
        def take(unit: str) -> int:
            calls.append(name + unit)
            return len(calls)

        return take

    tick = lambda stage, done, total: calls.append(f"{done}/{total}")  # noqa: E731
    runs = take_turns({"a": contender("a"), "b": contender("b")}, ["1", "2"], 2, tick)
    assert calls == ["a1", "b1", "1/4", "a2", "b2", "2/4", "a1", "b1", "3/4", "a2", "b2", "4/4"]
    assert runs["b"] == [[2, 5], [8, 11]], "by run, then by unit"


def test_the_first_turn_of_each_does_not_count() -> None:
    """The time in which kernels compile in a median; all runs of one after all of another."""
    calls: list[str] = []

    def noted(name: str) -> int:
        calls.append(name)
        return len(calls)

    runs = warm_turns({name: partial(noted, name) for name in "ab"}, num_runs=2)
    assert calls == ["a", "b"] * 3 and runs == {"a": [3, 5], "b": [4, 6]}
