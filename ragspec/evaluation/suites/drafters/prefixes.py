"""The cost of sampling for drafts: one step from the same prefixes at T = 0 and at T = 1, with coupled and uncoupled
children.

Prefixes are the target's own outputs of both temperatures, cut every few tokens. From each prefix, one tree of 16
nodes is drafted and walked, and the step's tokens are counted. So all conditions see equally easy text. Greedy text
of a small model repeats itself and is easy to draft for, so free-running texts would not compare.

    >>> with load_engine(target, engine_config(), drafting, given := OverruledAnswers(repeats=False)) as engine:
    ...     step_lengths(engine, given, prefixes, 1.0, tick)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from statistics import mean, stdev
from typing import Any

from ragspec.core import Delta, FinishReason, Request, SamplingParams, Segment
from ragspec.engine.engine import Engine
from ragspec.errors import EngineError
from ragspec.evaluation.cases import Case
from ragspec.evaluation.overrides import OverruledAnswers
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick
from ragspec.speculation import OFF

LONGEST_STEP = 17
_EVERY = 8
_FIRST_CUT = 4


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of an output. The seed decides its continuation at T = 1."""

    id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    seed: int


def own_outputs(engine: Engine, cases: Sequence[Case], temperature: float, seed: int) -> list[tuple[int, ...]]:
    """Outputs of the target without a draft, as long as the cases say."""
    requests = []
    for i, case in enumerate(cases):
        params = SamplingParams(temperature, max_tokens=case.max_tokens, ignore_eos=True, seed=seed + i)
        requests.append(Request(f"{temperature:g}-{case.id}", case.prompt_ids, params, speculation=OFF))
    return [completion.token_ids for completion in engine.generate(requests)]


def cut_prefixes(engine: Engine, cases: Sequence[Case], seed: int) -> list[Prefix]:
    """Outputs of both temperatures, cut every eighth token."""
    prefixes: list[Prefix] = []
    for temperature in (0.0, 1.0):
        for case, output in zip(cases, own_outputs(engine, cases, temperature, seed), strict=True):
            for end in range(_FIRST_CUT, len(output), _EVERY):
                name = f"{temperature:g}-{case.id}-{end}"
                prefixes.append(Prefix(name, case.prompt_ids, output[:end], seed + len(prefixes)))
    return prefixes


def step_lengths(
    engine: Engine, given: OverruledAnswers, prefixes: Sequence[Prefix], temperature: float, tick: Tick
) -> list[int]:
    """Tokens of one decode step behind each prefix, the bonus token included. `given` is the engine's sampler factory.

    The prompt's step has no draft, because a head has not seen the target's states yet. So the prompt ends before
    the prefix's last token, the prompt's step decides the given last token, and the next step counts.
    """
    lengths = []
    for prefix in prefixes:
        *before, last = prefix.output_ids
        end = len(prefix.output_ids) + LONGEST_STEP
        given.force(prefix.id, [last])
        params = SamplingParams(temperature, max_tokens=end, ignore_eos=True, seed=prefix.seed)
        request = Request(prefix.id, prefix.prompt_ids, params, segment=Segment(tuple(before), end))
        first, counted = _two_steps(engine, request)
        assert first == 1, "the step that reads a prefix must not draft"
        lengths.append(counted)
        tick(f"the same beginnings, T = {temperature:g}", len(lengths), len(prefixes))
    return lengths


def _two_steps(engine: Engine, request: Request) -> list[int]:
    """Tokens of a request's first two steps; the request is cancelled behind them. Raises: EngineError."""
    deltas: SimpleQueue[Delta] = SimpleQueue()
    engine.submit(request, deltas.put)
    lengths: list[int] = []
    for delta in iter(deltas.get, None):
        if delta.finish_reason is FinishReason.ERROR:
            raise EngineError(f"request {request.id} failed: {delta.error}")
        lengths += [len(delta.token_ids)] if delta.token_ids else []
        if delta.finish_reason is not None:
            break
        if len(lengths) == 2:
            engine.cancel(request.id)
    return lengths[:2]


def ratio_with_error(lengths: Sequence[int], base: Sequence[int]) -> tuple[float, float]:
    """(mean over mean, its standard error), for pairs measured on the same prefixes. Source: the delta method."""
    ratio = mean(lengths) / mean(base)
    residuals = [a - ratio * b for a, b in zip(lengths, base, strict=True)]
    return ratio, stdev(residuals) / mean(base) / math.sqrt(len(base)) if len(base) > 1 else math.nan


def prefix_row(at_zero: Sequence[int], coupled: Sequence[int], uncoupled: Sequence[int] = ()) -> Result:
    """The three conditions on the same prefixes; without `uncoupled`, two."""
    result: dict[str, Any] = {"num_prefixes": len(at_zero), "t0": mean(at_zero)}
    for name, lengths in (("coupled", coupled), ("uncoupled", uncoupled)):
        if lengths:
            result[f"t1_{name}"] = mean(lengths)
            result[f"{name}_t1_over_t0"], result[f"{name}_t1_over_t0_error"] = ratio_with_error(lengths, at_zero)
    return result
