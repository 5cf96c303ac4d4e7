"""Timed runs of several decoders, and the ratios between them.

Decoders take turns at every prompt (A B A B), so a machine that slows down slows all of them. `Timings.ratio` compares total
times, where the median over runs counts of each prompt; rates are medians over runs.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ragspec.core import Completion, GenerationStats, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.evaluation.cases import Case
from ragspec.rag.verbatim_quotes import answer_grammar
from ragspec.speculation import Speculation, SpeculationGiven
from ragspec.tenants import cache_salt_of

SPECULATIVE, PLAIN, GENERATE, PROMPT_LOOKUP = "speculative", "plain", "generate", "prompt_lookup"

Unit = TypeVar("Unit")
Taken = TypeVar("Taken")
Tick = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


def no_tick(stage: str, done: int, total: int) -> None:
    """Progress that nobody follows."""


def take_turns(
    contenders: Mapping[str, Callable[[Unit], Taken]],
    units: Sequence[Unit],
    num_runs: int,
    tick: Tick = no_tick,
    stage: str = "timed runs",
) -> dict[str, list[list[Taken]]]:
    """`[contender][run][unit]`: every unit by every contender, `num_runs` times in turns."""
    runs: dict[str, list[list[Taken]]] = {name: [[] for _ in range(num_runs)] for name in contenders}
    for number in range(num_runs):
        for i, unit in enumerate(units, 1):
            for name, take in contenders.items():
                runs[name][number].append(take(unit))
            tick(stage, number * len(units) + i, num_runs * len(units))
    return runs


def warm_turns(
    contenders: Mapping[str, Callable[[], Taken]], num_runs: int, tick: Tick = no_tick, stage: str = "timed runs"
) -> dict[str, list[Taken]]:
    """`[contender][run]`: every contender `num_runs` times in turns, after one run of each that does not count."""
    calls = {name: lambda _, take=take: take() for name, take in contenders.items()}
    runs = take_turns(calls, [None], num_runs + 1, tick, stage)
    return {name: [taken for (taken,) in table[1:]] for name, table in runs.items()}


class Timings:
    """`runs[decoder][run][case]` of the same cases for every decoder."""

    def __init__(self, runs: Runs, prepare_s: Sequence[float]) -> None:
        self.runs = runs
        self._prepare_s = prepare_s

    @classmethod
    def measure(
        cls,
        decoders: Mapping[str, Decoder],
        cases: Sequence[Case],
        num_runs: int,
        tick: Tick = no_tick,
        stage: str = "timed runs",
        num_warm_up: int = 0,
    ) -> Timings:
        """Every decoder on every case, `num_runs` times, taking turns.

        Before, uncounted: once on `num_warm_up` cases, at most half of all.
        """
        for case in cases[: min(num_warm_up, (len(cases) + 1) // 2)]:
            for decode in decoders.values():
                decode(case)
        return cls(take_turns(decoders, cases, num_runs, tick, stage), [case.prepare_s for case in cases])

    def of(self, chosen: Sequence[int]) -> Timings:
        """Only these cases."""
        runs = {name: [[run[i] for i in chosen] for run in table] for name, table in self.runs.items()}
        return Timings(runs, [self._prepare_s[i] for i in chosen])

    def same_tokens(self, a: str, b: str) -> list[int]:
        """Cases for which two decoders wrote the same tokens, in every run."""
        pairs = [zip(x, y, strict=True) for x, y in zip(self.runs[a], self.runs[b], strict=True)]
        equal = [[x.token_ids == y.token_ids for x, y in pair] for pair in pairs]
        return [i for i, column in enumerate(zip(*equal, strict=True)) if all(column)]

    def decode_s(self, name: str, number: int) -> float:
        """Seconds of decoding in one run (`TimedGeneration.decoding_s`)."""
        return sum(run.decoding_s for run in self.runs[name][number])

    def first_to_last_s(self, name: str, number: int) -> float:
        """Seconds from first to last token; tokens that arrive with the first token cost nothing."""
        return sum(run.decode_s for run in self.runs[name][number])

    def _first_s(self, name: str, number: int) -> float:
        return sum(run.first_s for run in self.runs[name][number])

    def end_to_end_s(self, name: str, number: int) -> float:
        """Seconds with retrieval, prompt building and prefill."""
        return sum(self._prepare_s) + self._first_s(name, number) + self.first_to_last_s(name, number)

    def ratio(self, slow: str, fast: str, seconds: Callable[[Timings, str, int], float] = decode_s) -> float | None:
        """Seconds of `slow` over seconds of `fast`, for cases in which both wrote the same tokens; of several runs the medians of
        each case.

        None without such cases.
        """
        if not {slow, fast} <= self.runs.keys():
            return None
        same = self.of(self.same_tokens(slow, fast)).typical()
        a, b = seconds(same, slow, 0), seconds(same, fast, 0)
        return a / b if a > 0 and b > 0 else None

    def typical(self) -> Timings:
        """One run, in which every case takes the median of its times."""
        runs = {name: [[_typical(own) for own in zip(*table, strict=True)]] for name, table in self.runs.items()}
        return Timings(runs, self._prepare_s)

    def agreement(self, a: str, b: str) -> float | None:
        """Share of cases for which two decoders wrote the same tokens."""
        if not {a, b} <= self.runs.keys():
            return None
        return len(self.same_tokens(a, b)) / len(self._prepare_s)

    def tokens_per_s(self, name: str) -> float | None:
        """Tokens after the first, a second of decoding."""
        num_tokens = [sum(len(run.token_ids) - 1 for run in table) for table in self.runs[name]]
        rates = ((tokens, self.decode_s(name, n)) for n, tokens in enumerate(num_tokens))
        return _median(tokens / seconds for tokens, seconds in rates if seconds > 0)

    def rate(self, name: str) -> float | None:
        """Tokens a second, those that came with the first counted neither as tokens nor as time."""
        return _median(rate for n in range(len(self.runs[name])) if (rate := self._rate(name, n)) > 0)

    def rate_ratio(self, name: str, others: Sequence[str]) -> float | None:
        """`rate` over that of the best of `others`, whatever tokens each wrote. None where none of them ran."""
        ran = [other for other in others if other in self.runs]
        best = [max((self._rate(other, n) for other in ran), default=0.0) for n in range(len(self.runs[name]))]
        return _median(self._rate(name, n) / rate for n, rate in enumerate(best) if rate > 0)

    def prompt_ratio(self, name: str, others: Sequence[str]) -> float | None:
        """Seconds to the first token of the best of `others` over those of `name`. None where none of them ran."""
        ran = [other for other in others if other in self.runs]
        runs = range(len(self.runs[name])) if ran else ()
        return _median(min(self._first_s(other, n) for other in ran) / self._first_s(name, n) for n in runs)

    def shared_tokens(self, a: str, b: str) -> float:
        """Share of the tokens of `a` in the first run that come before the first difference from `b`."""
        pairs = [(x.token_ids, y.token_ids) for x, y in zip(self.runs[a][0], self.runs[b][0], strict=True)]
        equal = [[one == other for one, other in zip(x, y, strict=False)] for x, y in pairs]
        return sum(sum(itertools.takewhile(bool, row)) for row in equal) / max(1, sum(len(x) for x, _ in pairs))

    def _rate(self, name: str, number: int) -> float:
        """0 where no time was measured."""
        seconds, runs = self.first_to_last_s(name, number), self.runs[name][number]
        num_tokens = sum(len(run.token_ids) - max(1, run.stats.num_first_tokens) for run in runs)
        return num_tokens / seconds if seconds > 0 else 0.0

    def step_s(self, name: str) -> float | None:
        """Seconds of one decode step of a decoder that writes one token a step."""
        rate = self.tokens_per_s(name)
        return 1.0 / rate if rate else None

    def acceptance_length(self, name: str) -> float:
        """Tokens emitted a step, the bonus token included, the prompt's step counted."""
        runs = [run for table in self.runs[name] for run in table]
        return sum(len(run.token_ids) for run in runs) / max(1, sum(run.num_steps for run in runs))


def _typical(runs: Sequence[TimedGeneration]) -> TimedGeneration:
    """The first run, with the median times of all runs."""
    stats = replace(runs[0].stats, prompt_draft_s=median(run.stats.prompt_draft_s for run in runs))
    first_s, decode_s = median(run.first_s for run in runs), median(run.decode_s for run in runs)
    return runs[0]._replace(first_s=first_s, decode_s=decode_s, stats=stats)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


_SALTS = itertools.count()


class TimedGeneration(NamedTuple):
    """One generation. `first_s`: from the request to its first token; `decode_s`: from there to the last."""

    token_ids: tuple[int, ...]
    first_s: float
    decode_s: float
    num_steps: int = 0
    text: str = ""
    stats: GenerationStats = GenerationStats()

    @property
    def decoding_s(self) -> float:
        """From the first token to the last, plus what drafting took before: tokens drafted there come with the first token.

        Why not the excess over the same prompt without drafts: a prompt's time scatters by as much as a short answer takes. Of
        other programs nothing is added.
        """
        return self.decode_s + self.stats.prompt_draft_s


Decoder = Callable[[Case], TimedGeneration]
Runs = Mapping[str, Sequence[Sequence[TimedGeneration]]]
"""`[decoder][run][case]`."""


class TimedBatch(NamedTuple):
    """Several requests at once; `wall_s`: from the first submission to the last token, prompts included."""

    runs: list[TimedGeneration]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(run.token_ids) for run in self.runs) / self.wall_s


class EngineDecoder:
    """The engine with one set of sampling parameters. Every call starts with an empty prefix cache, unless `salt` names one.

    `seed` is the job's seed; a case's own seed is derived from it and the case's id, so order and batches do not
    matter.
    """

    def __init__(
        self, engine: Engine, *, speculation: SpeculationGiven, seed: int, salt: str = "", **sampling: Any
    ) -> None:
        self._engine, self._salt = engine, salt
        self._speculation = Speculation.of(speculation)
        self._seed = seed
        self._sampling = sampling

    def __call__(self, case: Case) -> TimedGeneration:
        request = self._request(case)
        begin = time.perf_counter()
        (completion,) = self._engine.generate([request])
        wall_s = time.perf_counter() - begin
        decode_s = completion.stats.decode_s
        return _run(completion, wall_s - decode_s, decode_s)

    def together(self, cases: Sequence[Case]) -> TimedBatch:
        """All cases at once; the engine's `max_running` limits how many run side by side."""
        requests = [self._request(case) for case in cases]
        begin = time.perf_counter()
        completions = self._engine.generate(requests)
        wall_s = time.perf_counter() - begin
        runs = [_run(c, c.stats.queue_s + c.stats.prefill_s, c.stats.decode_s) for c in completions]
        return TimedBatch(runs, wall_s)

    def _request(self, case: Case) -> Request:
        digest = hashlib.sha256(f"{self._seed}:{case.id}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        params = SamplingParams(max_tokens=case.max_tokens, seed=seed, **self._sampling)
        # Why a part of one tenant: it shares no cached prefix, and the rates of acceptance of all runs
        salt = self._salt or cache_salt_of("runs", str(next(_SALTS)))
        request = Request(case.id, case.prompt_ids, params, case.sources, salt, self._speculation)
        return replace(request, grammar=answer_grammar(params, request.speculation, case.passages))


def _run(completion: Completion, first_s: float, decode_s: float) -> TimedGeneration:
    stats = completion.stats
    return TimedGeneration(completion.token_ids, first_s, decode_s, stats.num_steps, completion.text, stats)


class Equality:
    """Counts of all comparisons, by name, as (equal, compared)."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}

    def check(self, name: str, expected: Sequence[TimedGeneration], got: Sequence[TimedGeneration]) -> None:
        equal = sum(a.token_ids == b.token_ids for a, b in zip(expected, got, strict=True))
        before = self.counts.get(name, (0, 0))
        self.counts[name] = (before[0] + equal, before[1] + len(expected))

    @property
    def identical(self) -> bool | None:
        """True if all comparisons found the same tokens; None without comparisons."""
        if not self.counts:
            return None
        return all(equal == compared for equal, compared in self.counts.values())

    def as_text(self) -> dict[str, str]:
        return {name: f"{equal}/{compared}" for name, (equal, compared) in self.counts.items()}
