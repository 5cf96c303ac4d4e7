"""One cell of the suite `drafters`: an engine's variants and plain decoding take turns on the same prompts.

>>> with load_engine(target, engine_config(), setup.drafting) as engine:
...     alone_rows(engine, setup, "prose", cases, SamplingPlan(temperature=1.0), tick)[0]["speedup"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragspec.core import GenerationStats
from ragspec.engine.engine import Engine
from ragspec.evaluation.cases import Case
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.drafters.prompts import PROSE
from ragspec.evaluation.suites.drafters.variants import CHAIN, NONE, Setup
from ragspec.evaluation.timing import PLAIN, SPECULATIVE, EngineDecoder, Equality, Runs, Tick, Timings, take_turns
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
    return [
        _row(setup, name, task, sampling.temperature, 1, timings.runs)
        | _speeds(timings.runs, name, cases)
        | {"num_prompts": len(cases)}
        for name in decoders
    ]


def together_rows(
    engine: Engine, setup: Setup, task: str, cases: Sequence[Case], batch: int, sampling: Sampling
) -> list[Result]:
    """One row a variant: groups of `batch` requests that start together; the next group starts when the slowest
    request ends.

    Speeds are tokens a second of a whole group, its prompts included.
    """
    decoders = _decoders(engine, setup, task, sampling)
    groups = [cases[i : i + batch] for i in range(0, len(cases) - batch + 1, batch)]
    taken = take_turns({name: each.together for name, each in decoders.items()}, groups, sampling.num_runs)
    seconds = {name: [sum(one.wall_s for one in run) for run in table] for name, table in taken.items()}
    runs = {name: [[each for one in run for each in one.runs] for run in table] for name, table in taken.items()}
    rows = []
    for name, tables in runs.items():
        rates = [sum(len(run.token_ids) for run in runs) / s for runs, s in zip(tables, seconds[name], strict=True)]
        gains = [plain / own for plain, own in zip(seconds[PLAIN], seconds[name], strict=True)]
        speeds = {"tokens_per_s": median(rates), "speedup": median(gains), "prompts_included": True}
        row = _row(setup, name, task, sampling.temperature, batch, runs)
        rows.append(row | speeds | {"num_prompts": batch * len(groups)})
    return rows


def _row(setup: Setup, name: str, task: str, temperature: float, batch: int, runs: Runs) -> Result:
    """A cell without its speeds. `identical`: to the first plain run; None without a comparison."""
    plain, equality = name == PLAIN, Equality()
    for table in runs[name][1:] if plain else runs[name]:
        equality.check(name, runs[PLAIN][0], table)
    cell = {
        "variant": NONE if plain else name,
        "shape": None if plain else setup.shape,
        "nodes": None if plain else setup.fixed_nodes,
        "coupled": None if plain else setup.coupled,
        "task": task,
        "temperature": temperature,
        "batch": batch,
        "identical": equality.identical,
    }
    return cell | drafting_row([each.stats for run in runs[name] for each in run], setup.shape == CHAIN)


def _speeds(runs: Runs, name: str, cases: Sequence[Case]) -> Result:
    """Speeds against plain decoding; the draft's share of the prompt's step counts as decoding."""
    pair = Timings({PLAIN: runs[PLAIN], SPECULATIVE: runs[name]}, [case.prepare_s for case in cases])
    return {
        "tokens_per_s": pair.tokens_per_s(SPECULATIVE),
        "speedup": pair.ratio(PLAIN, SPECULATIVE),
        "speedup_end_to_end": pair.ratio(PLAIN, SPECULATIVE, Timings.end_to_end_s),
        "prompts_included": False,
        "repeated_share": repeated_share(run.token_ids for run in runs[name][0]),
    }


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
    accepted: Counter[str] = Counter()
    for one in stats:
        accepted.update(one.accepted_by_drafter)
    return {
        "acceptance_length": acceptance_length(stats),
        "drafted_a_step": sum(one.num_drafted for one in stats) / num_steps,
        "draft_ms": 1e3 * sum(one.draft_s for one in stats) / num_steps,
        "accepted_by_drafter": dict(accepted),
        "pos_acc": shares,
        "pos_reached": {drafter: [reached for reached, _ in counts] for drafter, counts in positions.items()},
        "n_alpha": shares if chain else None,
    }
