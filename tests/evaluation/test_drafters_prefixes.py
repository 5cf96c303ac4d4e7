"""Steps counted from given beginnings: the right step, from the right place, with the target's own samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from drafters import Knowing
from oracle import choose, decode, next_logits
from stand_ins import no_tick
from tiny_target import Free, tiny_target

from ragspec.config import EngineConfig
from ragspec.core import SamplingParams
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.overrides import OverruledAnswers
from ragspec.evaluation.suites.drafters.prefixes import Prefix, cut_prefixes, prefix_row, ratio_with_error, step_lengths
from ragspec.tree import Origin, Proposal

PROMPT = tuple(range(20, 40))
GIVEN = (50, 60, 70, 80)


class AfterPrompt(Knowing):
    """As a head: nothing before the prompt's step is over, then the true path of some depth; notes what it stood behind."""

    name = "after"
    depth = 3

    def __init__(self, answers: Mapping[tuple[str, int], Sequence[int]]) -> None:
        super().__init__(answers)
        self.stood: list[list[int]] = []

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        if sequence.num_output < len(GIVEN):
            return []
        self.stood.append(list(sequence.tokens))
        ahead = self.ahead(sequence)[: self.depth]
        return [Proposal(token, i - 1, 0.9, Origin(self.name)) for i, token in enumerate(ahead)]


@pytest.fixture
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target("llama", "float32", tmp_path_factory.mktemp("models"))


def continuation(target: Target, temperature: float, seed: int) -> tuple[int, ...]:
    """What follows the given beginning: output tokens 4 and on, with the noise of their places."""
    tokens = list(GIVEN)
    params = SamplingParams(temperature)
    while len(tokens) < len(GIVEN) + 6:
        logits = next_logits(target, [*PROMPT, *tokens])
        tokens.append(choose(logits, params, seed, 0, len(tokens)))
    return tuple(tokens[len(GIVEN) :])


@pytest.fixture
def given() -> OverruledAnswers:
    return OverruledAnswers(repeats=False)


def engine_with(target: Target, drafters: Sequence[Knowing], given: OverruledAnswers) -> Engine:
    target.reset_pool(2048)
    planner = Planner(drafters, Free(), 12, target.vocab_size)
    config = EngineConfig(max_step_tokens=64, max_kv_tokens=2048)
    return Engine(target, planner, Admission(target, "tiny", given), config)


@pytest.fixture
def plain(target: Target, given: OverruledAnswers) -> Iterator[Engine]:
    with engine_with(target, [], given) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_step_behind_the_beginning_is_the_one_that_counts(
    temperature: float, target: Target, given: OverruledAnswers
) -> None:
    """Bug guarded: the prompt's step counted, a beginning whose last token the target replaced, noise of another place."""
    prefixes = [Prefix(f"p{seed}", PROMPT, GIVEN, seed) for seed in range(3)]
    drafter = AfterPrompt({(p.id, 0): [*GIVEN, *continuation(target, temperature, p.seed)] for p in prefixes})
    with engine_with(target, [drafter], given) as engine:
        assert step_lengths(engine, given, prefixes, temperature, no_tick) == [4, 4, 4]
        assert all(tokens[: len(PROMPT) + len(GIVEN)] == [*PROMPT, *GIVEN] for tokens in drafter.stood)
        drafter.depth = 1
        assert step_lengths(engine, given, prefixes, temperature, no_tick) == [2, 2, 2]
        assert step_lengths(engine, given, prefixes, 1.0 - temperature, no_tick) != [2, 2, 2]


def test_without_a_draft_every_step_is_one_token(plain: Engine, given: OverruledAnswers) -> None:
    """Bug guarded: lengths that have nothing to do with drafts."""
    prefixes = [Prefix("a", PROMPT, GIVEN, 1), Prefix("b", PROMPT, GIVEN[:1], 2)]
    assert step_lengths(plain, given, prefixes, 1.0, no_tick) == [1, 1]


def test_a_given_token_is_used_once(plain: Engine, target: Target, given: OverruledAnswers) -> None:
    """Bug guarded: a request that is forced because an earlier one of that name was."""
    assert step_lengths(plain, given, [Prefix("a", PROMPT, GIVEN, 1)], 0.0, no_tick) == [1]
    case = Case("a", "prose", PROMPT, (), 8)
    (prefix,) = [p for p in cut_prefixes(plain, [case], 0) if p.id == "0-a-4"]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert prefix.output_ids == decode(target, PROMPT, params).token_ids


def test_beginnings_are_the_targets_own_texts_of_both_temperatures(plain: Engine, target: Target) -> None:
    """Bug guarded: beginnings of one temperature alone; two that share the noise behind them."""
    cases = [Case(name, "prose", PROMPT[i:], (), 21) for i, name in enumerate(("a", "b"))]
    prefixes = cut_prefixes(plain, cases, seed=5)
    assert [p.id for p in prefixes[:6]] == ["0-a-4", "0-a-12", "0-a-20", "0-b-4", "0-b-12", "0-b-20"]
    assert len(prefixes) == 12 and len({p.seed for p in prefixes}) == 12
    params = SamplingParams(1.0, max_tokens=20, ignore_eos=True, seed=5)
    assert prefixes[8].output_ids == decode(target, PROMPT, params).token_ids


def test_ratios_are_of_means_with_their_errors() -> None:
    """Bug guarded: the mean of ratios; an error that ignores that both conditions saw the same beginnings."""
    ratio, error = ratio_with_error([1, 2, 3, 2], [2, 4, 6, 4])
    assert ratio == 0.5 and error == pytest.approx(0.0)
    assert ratio_with_error([3, 1], [1, 1]) == (2.0, pytest.approx(1.0))
    assert math.isnan(ratio_with_error([1], [1])[1])
    rng = np.random.default_rng(1)
    means, errors = zip(*(ratio_with_error(*rng.poisson(3.0, (2, 200)).tolist()) for _ in range(300)), strict=True)
    assert np.std(means) == pytest.approx(np.mean(errors), rel=0.2)


def test_a_comparison_names_all_three_conditions() -> None:
    """Bug guarded: coupled and uncoupled exchanged."""
    result = prefix_row([4, 4], [3, 3], [2, 2])
    assert (result["coupled_t1_over_t0"], result["uncoupled_t1_over_t0"]) == (0.75, 0.5)
    assert (result["t0"], result["t1_coupled"], result["t1_uncoupled"], result["num_prefixes"]) == (4, 3, 2, 2)
