"""One cell of the suite `drafters`: an engine's variants and plain decoding take turns on the same prompts.

>>> with load_engine(target, engine_config(), setup.drafting) as engine:
...     alone_rows(engine, setup, "prose", cases, SamplingPlan(temperature=1.0), tick)[0]["speedup"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragspec.core import GenerationStats
from ragspec.engine.engine import Engine
from ragspec.evaluation.cases import Case
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.drafters.prompts import PROSE
from ragspec.evaluation.suites.drafters.variants import CHAIN, NONE, Setup
from ragspec.evaluation.timing import PLAIN, SPECULATIVE, EngineDecoder, Equality, Tick, TimedGeneration, Timings
from ragspec.speculation import OFF, Speculation

_NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters and repetitions of a cell."""

    temperature: float
    seed: int = 0
    num_runs: int = 1

    def params(self, task: str) -> dict[str, Any]:
        """Prose ignores the end of text: its length would decide how much is measured."""
        return {"temperature": self.temperature, "ignore_eos": task == PROSE}


def _decoders(engine: Engine, setup: Setup, task: str, sampling: Sampling) -> dict[str, EngineDecoder]:
    """Plain decoding first, then the variants."""
    ways: dict[str, Speculation] = {PLAIN: OFF, **setup.variants}
    params = sampling.params(task)
    return {name: EngineDecoder(engine, speculation=way, seed=sampling.seed, **params) for name, way in ways.items()}


def alone_rows(
    engine: Engine, setup: Setup, task: str, cases: Sequence[Case], sampling: Sampling, tick: Tick
) -> list[Result]:
    """One row a variant, plain decoding included: one request at a time, after uncounted warm-up requests."""
    stage = f"{', '.join(setup.variants)} ({setup.shape}), {task}"
    decoders = _decoders(engine, setup, task, sampling)
    timings = Timings.measure(decoders, cases, sampling.num_runs, tick, stage, _NUM_WARM_UP)
    rows = []
    for name, runs in timings.runs.items():
        row = _named(setup, name, task, sampling.temperature, batch=1)
        row |= drafting_row(_stats(runs), setup.shape == CHAIN) | _speeds(timings.runs, name, cases)
        rows.append(row | _equal(name, timings.runs) | {"num_prompts": len(cases)})
    return rows


def together_rows(
    engine: Engine, setup: Setup, task: str, cases: Sequence[Case], batch: int, sampling: Sampling
) -> list[Result]:
    """One row a variant: groups of `batch` requests that start together; the next group starts when the slowest
    request ends.

    Speeds are tokens a second of a whole group, its prompts included.
    """
    decoders = _decoders(engine, setup, task, sampling)
    groups = [cases[i : i + batch] for i in range(0, len(cases) - batch + 1, batch)]
    seconds: dict[str, list[float]] = {name: [0.0] * sampling.num_runs for name in decoders}
    runs: dict[str, list[list[TimedGeneration]]] = {name: [[] for _ in range(sampling.num_runs)] for name in decoders}
    for number in range(sampling.num_runs):
        for group in groups:
            for name, decoder in decoders.items():
                timed = decoder.together(group)
                seconds[name][number] += timed.wall_s
                runs[name][number] += timed.runs
    rows = []
    for name, tables in runs.items():
        row = _named(setup, name, task, sampling.temperature, batch) | drafting_row(_stats(tables), False)
        rates = [sum(len(run.token_ids) for run in runs) / s for runs, s in zip(tables, seconds[name], strict=True)]
        gains = [plain / own for plain, own in zip(seconds[PLAIN], seconds[name], strict=True)]
        row |= {"tokens_per_s": median(rates), "speedup": median(gains), "prompts_included": True}
        rows.append(row | _equal(name, runs) | {"num_prompts": batch * len(groups)})
    return rows


def _stats(tables: Sequence[Sequence[TimedGeneration]]) -> list[GenerationStats]:
    return [run.stats for runs in tables for run in runs]


def _named(setup: Setup, name: str, task: str, temperature: float, batch: int) -> Result:
    plain = name == PLAIN
    return {
        "variant": NONE if plain else name,
        "shape": None if plain else setup.shape,
        "nodes": None if plain else setup.fixed_nodes,
        "coupled": None if plain else setup.coupled,
        "task": task,
        "temperature": temperature,
        "batch": batch,
    }


def _speeds(runs: Mapping[str, Sequence[Sequence[TimedGeneration]]], name: str, cases: Sequence[Case]) -> Result:
    """Speeds against plain decoding; the draft's share of the prompt's step counts as decoding."""
    pair = Timings({PLAIN: runs[PLAIN], SPECULATIVE: runs[name]}, [case.prepare_s for case in cases])
    return {
        "tokens_per_s": pair.tokens_per_s(SPECULATIVE),
        "speedup": pair.ratio(PLAIN, SPECULATIVE),
        "speedup_end_to_end": pair.ratio(PLAIN, SPECULATIVE, Timings.end_to_end_s),
        "prompts_included": False,
        "repeated_share": repeated_share(run.token_ids for run in runs[name][0]),
    }


def _equal(name: str, runs: Mapping[str, Sequence[Sequence[TimedGeneration]]]) -> Result:
    """Compare with the first plain run; None without a comparison."""
    equality = Equality()
    first = runs[PLAIN][0]
    for table in runs[name][1:] if name == PLAIN else runs[name]:
        equality.check(name, first, table)
    return {"identical": equality.identical}


Positions = list[tuple[int, int]]
"""By depth from 1 on: (steps that reached it, steps that accepted it)."""

_LOOP_TOKENS = 8


def acceptance_length(stats: Iterable[GenerationStats]) -> float | None:
    """Tokens a decode step, the bonus token included, the prompt's step excluded. None without decode steps.

    Source: tau of the EAGLE papers, MAT of Spec-Bench.
    """
    known = list(stats)
    num_steps = sum(max(0, one.num_steps - 1) for one in known)
    num_tokens = sum(one.num_output_tokens - one.num_first_tokens for one in known)
    return num_tokens / num_steps if num_steps else None


def pooled_positions(stats: Iterable[GenerationStats]) -> dict[str, Positions]:
    """Counts of all generations together, by drafter."""
    pooled: dict[str, Positions] = {}
    for one in stats:
        for drafter, counts in one.positions.items():
            known = pooled.setdefault(drafter, [])
            known += [(0, 0)] * (len(counts) - len(known))
            for depth, (reached, accepted) in enumerate(counts):
                known[depth] = known[depth][0] + reached, known[depth][1] + accepted
    return pooled


def position_acceptance(positions: Sequence[tuple[int, int]]) -> list[float | None]:
    """pos_acc: of the steps whose first i - 1 drafted positions were accepted, the share whose position i is.

    On a chain this is EAGLE's n-alpha: the token at depth n + 1 was drafted with n predicted features below it.
    Source: PosS (arXiv 2506.03566) for trees, EAGLE (arXiv 2401.15077) for chains.
    """
    return [accepted / reached if reached else None for reached, accepted in positions]


def repeated_share(outputs: Iterable[Sequence[int]]) -> float:
    """Share of output tokens that end a run of 8 tokens which the same output had before.

    Why: text that repeats itself is easy to draft for, and readers of acceptance lengths must know.
    """
    num_tokens = num_repeated = 0
    for output in outputs:
        seen: set[tuple[int, ...]] = set()
        for end in range(_LOOP_TOKENS, len(output) + 1):
            run = tuple(output[end - _LOOP_TOKENS : end])
            num_repeated += run in seen
            seen.add(run)
        num_tokens += len(output)
    return num_repeated / max(1, num_tokens)


def drafting_row(stats: Sequence[GenerationStats], chain: bool) -> Result:
    """The drafting statistics of one setting's generations. `chain`: their drafts had no branches.

    Units: draft_ms per step, in the engine's thread.
    """
    positions = pooled_positions(stats)
    shares = {drafter: position_acceptance(counts) for drafter, counts in positions.items()}
    num_steps = max(1, sum(one.num_steps for one in stats))
    return {
        "acceptance_length": acceptance_length(stats),
        "drafted_a_step": sum(one.num_drafted for one in stats) / num_steps,
        "draft_ms": 1e3 * sum(one.draft_s for one in stats) / num_steps,
        "accepted_by_drafter": _summed(one.accepted_by_drafter for one in stats),
        "pos_acc": shares,
        "pos_reached": {drafter: [reached for reached, _ in counts] for drafter, counts in positions.items()},
        "n_alpha": shares if chain else None,
    }


def _summed(counters: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counter in counters:
        for name, count in counter.items():
            total[name] = total.get(name, 0) + count
    return total
