"""The arithmetic of the ratios: which seconds count, over which prompts, and when two outputs are the same."""

from collections.abc import Callable

import pytest

from pipelines.benchmarks.cases.timing import GENERATE, PLAIN, SPECULATIVE, TimedGeneration, Timings, take_turns
from ragspec.core import GenerationStats

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


def test_drafting_in_the_prompt_step_counts_and_the_prompt_does_not() -> None:
    """Bug guarded: an answer accepted whole in the prompt's step took no time; noise of a long prompt counted as decoding."""
    drafted = GenerationStats(prompt_draft_s=0.5)
    pair = timings(
        plain=[[TimedGeneration(ABC, 1.0, 4.0)]], speculative=[[TimedGeneration(ABC, 1.5, 0.0, stats=drafted)]]
    )
    assert pair.ratio(PLAIN, SPECULATIVE) == 8.0
    assert pair.ratio(PLAIN, SPECULATIVE, end_to_end=True) == pytest.approx(5.5 / 2.0)


def test_only_prompts_with_the_same_tokens_are_compared() -> None:
    """Bug guarded: a ratio of times for different amounts of work, or a number for a program that did not run."""
    generate = [[TimedGeneration(ABC, 1.0, 4.0), TimedGeneration((1,), 1.0, 100.0)]]
    ours = [[TimedGeneration(ABC, 1.0, 1.0), TimedGeneration(ABC, 1.0, 1.0)]]
    both = timings(generate=generate, speculative=ours)
    assert both.ratio(GENERATE, SPECULATIVE) == 4.0 and both.agreement(GENERATE, SPECULATIVE) == 0.5
    assert both.ratio(PLAIN, SPECULATIVE) is both.agreement(PLAIN, SPECULATIVE) is None
    assert both.rate_ratio(SPECULATIVE, [PLAIN]) is both.first_token_ratio(SPECULATIVE, [PLAIN]) is None


def test_acceptance_length_counts_every_token_and_step() -> None:
    """Bug guarded: a mean over prompts, in which short answers weigh as much as long ones."""
    runs = [[TimedGeneration((1,) * 9, 1.0, 1.0, num_steps=3), TimedGeneration((1,), 1.0, 1.0, num_steps=1)]]
    assert timings(speculative=runs).acceptance_length(SPECULATIVE) == 2.5


def test_one_different_token_in_any_run_is_not_identical() -> None:
    """Bug guarded: only the first run, or only the number of tokens, compared."""
    same, other = TimedGeneration(ABC, 0, 0), TimedGeneration((1, 2, 4), 0, 0)
    assert timings(plain=[[same], [same]], speculative=[[same], [same]]).identical(SPECULATIVE)
    assert not timings(plain=[[same], [same]], speculative=[[same], [other]]).identical(SPECULATIVE)
    assert not timings(plain=[[same], [other]], speculative=[[same], [same]]).identical(PLAIN)


def test_contenders_take_turns() -> None:
    """Bug guarded: all runs of one contender after all of another, so that a machine's mood decides."""
    calls: list[str] = []

    def contender(name: str) -> Callable[[str], int]:
        def take(unit: str) -> int:
            calls.append(name + unit)
            return len(calls)

        return take

    runs = take_turns({"a": contender("a"), "b": contender("b")}, ["1", "2"], 2)
    assert calls == ["a1", "b1", "a2", "b2"] * 2
    assert runs["b"] == [[2, 4], [6, 8]], "by run, then by unit"
