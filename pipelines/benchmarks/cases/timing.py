"""Timed runs of several decoders on the same cases, and the ratios between them.

Decoders take turns at every case (A B A B), so that a machine which slows down slows all of them. A ratio compares total times of
the cases in which both decoders wrote the same tokens; of several runs the median of each case counts.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ragspec.core import Completion, CopySource, GenerationStats, Passage, Request, SamplingParams, Say, log_progress
from ragspec.engine.engine import Engine
from ragspec.rag.citations import answer_grammar
from ragspec.speculation import Speculation, SpeculationGiven
from ragspec.tenants import cache_salt_of

SPECULATIVE, PLAIN, GENERATE, PROMPT_LOOKUP = "speculative", "plain", "generate", "prompt_lookup"
_SALTS = itertools.count()

Unit = TypeVar("Unit")
Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt for any decoder. `prepare_s`: seconds of retrieval and prompt building for this prompt alone."""

    id: str
    prompt_ids: tuple[int, ...]
    sources: tuple[CopySource, ...]
    max_tokens: int
    prepare_s: float = 0.0
    passages: tuple[Passage, ...] = ()


class TimedGeneration(NamedTuple):
    """One generation. `first_s`: from the request to its first token; `decode_s`: from there to the last token."""

    token_ids: tuple[int, ...]
    first_s: float
    decode_s: float
    num_steps: int = 0
    text: str = ""
    stats: GenerationStats = GenerationStats()

    @property
    def decoding_s(self) -> float:
        """Decode time, plus drafting time of the prompt's step: tokens drafted there arrive with the first token."""
        return self.decode_s + self.stats.prompt_draft_s


Decoder = Callable[[Case], TimedGeneration]


class TimedBatch(NamedTuple):
    """Several requests at once. `wall_s`: from the first submission to the last token, prompts included."""

    runs: list[TimedGeneration]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(run.token_ids) for run in self.runs) / self.wall_s


class EngineDecoder:
    """The engine with one set of sampling parameters. Every call starts with an empty prefix cache, unless `salt` names a tenant.

    `seed` is the job's seed. A case's own seed is derived from the job's seed and the case's id, so order and batches do not
    matter.
    """

    def __init__(
        self, engine: Engine, *, speculation: SpeculationGiven, seed: int, salt: str = "", **sampling: Any
    ) -> None:
        self._engine, self._salt, self._seed = engine, salt, seed
        self._speculation = Speculation.of(speculation)
        self._sampling = sampling

    def __call__(self, case: Case) -> TimedGeneration:
        request = self._request(case)
        begin = time.perf_counter()
        (completion,) = self._engine.generate([request])
        wall_s = time.perf_counter() - begin
        decode_s = completion.stats.decode_s
        return _timed(completion, wall_s - decode_s, decode_s)

    def together(self, cases: Sequence[Case]) -> TimedBatch:
        """All cases at once. The engine's `max_num_seqs` limits how many run side by side."""
        requests = [self._request(case) for case in cases]
        begin = time.perf_counter()
        completions = self._engine.generate(requests)
        wall_s = time.perf_counter() - begin
        timed = [_timed(c, c.stats.queue_s + c.stats.prefill_s, c.stats.decode_s) for c in completions]
        return TimedBatch(timed, wall_s)

    def _request(self, case: Case) -> Request:
        digest = hashlib.sha256(f"{self._seed}:{case.id}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little")
        params = SamplingParams(max_tokens=case.max_tokens, seed=seed, **self._sampling)
        # Why a part of one tenant: requests share no cached prefix, and all share the rates of acceptance
        salt = self._salt or cache_salt_of("runs", str(next(_SALTS)))
        request = Request(case.id, case.prompt_ids, params, case.sources, salt, self._speculation)
        return replace(request, grammar=answer_grammar(params, request.speculation, case.passages))


def _timed(completion: Completion, first_s: float, decode_s: float) -> TimedGeneration:
    stats = completion.stats
    return TimedGeneration(completion.token_ids, first_s, decode_s, stats.num_steps, completion.text, stats)


def take_turns(
    contenders: Mapping[str, Callable[[Unit], Taken]],
    units: Sequence[Unit],
    num_runs: int,
    tick: Say = log_progress,
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


class Timings:
    """`runs[decoder][run][case]` of the same cases for every decoder."""

    def __init__(self, runs: Mapping[str, Sequence[Sequence[TimedGeneration]]], prepare_s: Sequence[float]) -> None:
        self.runs = runs
        self._prepare_s = prepare_s

    @classmethod
    def measure(
        cls,
        decoders: Mapping[str, Decoder],
        cases: Sequence[Case],
        num_runs: int,
        tick: Say = log_progress,
        stage: str = "timed runs",
    ) -> Timings:
        """Every decoder on every case, `num_runs` times in turns, after an uncounted run of the first case."""
        for case in cases[:1]:
            for decode in decoders.values():
                decode(case)
        return cls(take_turns(decoders, cases, num_runs, tick, stage), [case.prepare_s for case in cases])

    def same_tokens(self, a: str, b: str) -> list[int]:
        """Cases for which two decoders wrote the same tokens, in every run."""
        cases = range(len(self._prepare_s))
        pairs = list(zip(self.runs[a], self.runs[b], strict=True))
        return [i for i in cases if all(x[i].token_ids == y[i].token_ids for x, y in pairs)]

    def identical(self, name: str) -> bool:
        """Whether every run of `name` has the tokens of the first run of plain decoding."""
        first = [run.token_ids for run in self.runs[PLAIN][0]]
        return all([run.token_ids for run in table] == first for table in self.runs[name])

    def ratio(self, slow: str, fast: str, end_to_end: bool = False) -> float | None:
        """Decode seconds of `slow` over those of `fast`, where both wrote the same tokens; None without such cases.

        `end_to_end`: with retrieval, prompt building and prefill.
        """
        if not {slow, fast} <= self.runs.keys():
            return None
        a, b = (sum(self._seconds(name, i, end_to_end) for i in self.same_tokens(slow, fast)) for name in (slow, fast))
        return a / b if a > 0 and b > 0 else None

    def _seconds(self, name: str, case: int, end_to_end: bool) -> float:
        """The median of all runs of a case."""
        runs = [table[case] for table in self.runs[name]]
        if end_to_end:
            return self._prepare_s[case] + median(run.first_s + run.decode_s for run in runs)
        return median(run.decoding_s for run in runs)

    def tokens_per_s(self, name: str) -> float | None:
        """Tokens after the first, a second of decoding; the median of the runs."""
        rates = []
        for table in self.runs[name]:
            seconds = sum(run.decoding_s for run in table)
            if seconds > 0:
                rates.append(sum(len(run.token_ids) - 1 for run in table) / seconds)
        return median(rates) if rates else None

    def rate_ratio(self, name: str, others: Iterable[str]) -> float | None:
        """Tokens a second over those of the best of `others`, whatever tokens each wrote; None if no other ran."""
        rates = [rate for other in others if other in self.runs and (rate := self.tokens_per_s(other))]
        own = self.tokens_per_s(name)
        return own / max(rates) if rates and own else None

    def first_token_ratio(self, name: str, others: Iterable[str]) -> float | None:
        """Seconds to the first token of the fastest of `others` over those of `name`; None if no other ran."""
        seconds = [self._first_s(other) for other in others if other in self.runs]
        return min(seconds) / self._first_s(name) if seconds else None

    def _first_s(self, name: str) -> float:
        return median(sum(run.first_s for run in table) for table in self.runs[name])

    def agreement(self, a: str, b: str) -> float | None:
        """Share of cases for which two decoders wrote the same tokens; None if one of them did not run."""
        return len(self.same_tokens(a, b)) / len(self._prepare_s) if {a, b} <= self.runs.keys() else None

    def acceptance_length(self, name: str) -> float:
        """Tokens emitted a step, the bonus token included, the prompt's step counted."""
        runs = [run for table in self.runs[name] for run in table]
        return sum(len(run.token_ids) for run in runs) / max(1, sum(run.num_steps for run in runs))
