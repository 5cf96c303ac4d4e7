"""The engine as a decoder that a stopwatch can stand beside: alone, and several requests together."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ragspec.core import Completion, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.evaluation.cases import Case
from ragspec.speculation import Speculation, SpeculationGiven

_SALTS = itertools.count()


class Run(NamedTuple):
    """One generation. `first_s`: from the request to its first token; `decode_s`: from there to the last."""

    token_ids: tuple[int, ...]
    first_s: float
    decode_s: float
    num_steps: int = 0
    num_drafted: int = 0
    text: str = ""


Decoder = Callable[[Case], Run]


class Together(NamedTuple):
    """Several requests at once; `wall_s` from the first submission to the last token, prompts included."""

    runs: list[Run]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(run.token_ids) for run in self.runs) / self.wall_s


class EngineDecoder:
    """The engine with one set of sampling parameters. Every call starts with a prefix cache that knows nothing of it.

    `seed` is the job's; each case's own is derived from it and the case's id, so order and company do not matter.
    """

    def __init__(self, engine: Engine, *, speculation: SpeculationGiven, seed: int, **sampling: Any) -> None:
        self._engine = engine
        self._speculation = Speculation.of(speculation)
        self._seed = seed
        self._sampling = sampling

    def __call__(self, case: Case) -> Run:
        request = self._request(case)
        begin = time.perf_counter()
        (completion,) = self._engine.generate([request])
        wall_s = time.perf_counter() - begin
        decode_s = completion.stats.decode_s
        return _run(completion, wall_s - decode_s, decode_s)

    def together(self, cases: Sequence[Case]) -> Together:
        """All cases at once; the engine's `max_running` says how many of them run side by side."""
        requests = [self._request(case) for case in cases]
        begin = time.perf_counter()
        completions = self._engine.generate(requests)
        wall_s = time.perf_counter() - begin
        runs = [_run(c, c.stats.queue_s + c.stats.prefill_s, c.stats.decode_s) for c in completions]
        return Together(runs, wall_s)

    def _request(self, case: Case) -> Request:
        params = SamplingParams(max_tokens=case.max_tokens, seed=_case_seed(self._seed, case.id), **self._sampling)
        salt = f"run-{next(_SALTS)}"  # Why: a tenant of its own shares no cached prefix
        return Request(case.id, case.prompt_ids, params, case.sources, salt, self._speculation)


def _run(completion: Completion, first_s: float, decode_s: float) -> Run:
    stats = completion.stats
    return Run(completion.token_ids, first_s, decode_s, stats.num_steps, stats.num_drafted, completion.text)


def _case_seed(seed: int, case_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{case_id}".encode()).digest()[:8], "little")
