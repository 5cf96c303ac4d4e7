"""The load curve: the same chats by 1 to 64 users at once, with speculation and without, in turns.

A mix is a list of chat bodies. A run sends each body once, one for each user at least: closed, every user sending the next body
when an answer has ended, or open, bodies arriving by a Poisson process or in bursts. No run shares a cached prefix with another.

    >>> LoadCurve(service, mixes_of(model, questions, 0), tick).row("rag", users=8, num_runs=2)["on_off"]
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from pipelines.benchmarks.clients import Answer, chat_body
from pipelines.benchmarks.harness import Result
from pipelines.benchmarks.service import Service
from ragspec.errors import EngineError
from ragspec.evaluation.measures import Tick
from ragspec.rag.wording import GRAMMAR_REQUEST

Body = dict[str, Any]
Arrivals = Callable[[int, float, random.Random], list[float]]
"""Seconds after the start at which each of so many bodies is sent, at so many bodies a second."""

RAG, MIXED = "rag", "mixed"
SLO_FIRST_S, SLO_TOKEN_S = 2.0, 0.1
"""An answer is good if its first token came, and its others followed, at least so fast."""
_MAX_TOKENS = 64
_BURST = 8
_NUM_KINDS = 4
_SALTS = itertools.count()


def mixes_of(model: str, questions: Sequence[str], seed: int) -> dict[str, list[Body]]:
    """One body of each kind for each question."""
    drawn = {"max_tokens": _MAX_TOKENS, "seed": seed}
    free = {**drawn, "retrieval": False}
    kinds = {
        RAG: [chat_body(model, question, **drawn) for question in questions],
        "chat": [
            chat_body(model, question, "I do not know. What do you mean?", f"I mean this: {question}", **free)
            for question in questions
        ],
        "grammar": [_correction(model, f"he ask me: {question}", free) for question in questions],
        "creative": [
            chat_body(model, f"Write a story that begins like this: {question}", temperature=1.0, **free)
            for question in questions
        ],
    }
    return kinds | {MIXED: [body for group in zip(*kinds.values(), strict=True) for body in group]}


def _correction(model: str, sentence: str, drawn: Mapping[str, Any]) -> Body:
    prediction = {"type": "content", "content": sentence}
    return chat_body(model, GRAMMAR_REQUEST + sentence, prediction=prediction, **drawn)


def poisson(count: int, rate: float, draw: random.Random) -> list[float]:
    """Independent arrivals."""
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def bursts(count: int, rate: float, draw: random.Random) -> list[float]:
    """The same rate, in groups that arrive together."""
    groups = poisson(-(-count // _BURST), rate / _BURST, draw)
    return [groups[number // _BURST] for number in range(count)]


def sent_by(users: int, mix: str, bodies: Sequence[Body], num_questions: int | None = None) -> list[Body]:
    """The bodies of a run: those of so many questions, by default all, and one for each user at least. A body comes again only
    where users are more than bodies."""
    num_least = len(bodies) if num_questions is None else num_questions * (_NUM_KINDS if mix == MIXED else 1)
    return list(itertools.islice(itertools.cycle(bodies), max(users, num_least)))


class LoadCurve:
    """Runs mixes against a service. `tenant`: who asks; by default the service's first. `num_questions`: of a run by few
    users, by default all."""

    def __init__(
        self,
        service: Service,
        mixes: Mapping[str, Sequence[Body]],
        tick: Tick,
        tenant: str = "",
        num_questions: int | None = None,
    ) -> None:
        self._service, self._mixes, self._tick, self._tenant = service, mixes, tick, tenant
        self._num_questions = num_questions

    def warm_up(self, users: int) -> None:
        """The mix of all kinds both ways, uncounted: the first of a kind compiles kernels and teaches the drafters."""
        self.row(MIXED, users, 1)

    def row(self, mix: str, users: int, num_runs: int, arrivals: Arrivals | None = None, rate: float = 0.0) -> Result:
        """Medians over runs of both ways. `on_off`: tokens a second with speculation over without; `on_off_p99`: the 99th
        percentile of the time a token without speculation over with."""
        bodies = sent_by(users, mix, self._mixes[mix], self._num_questions)
        runs: dict[bool, list[Result]] = {True: [], False: []}
        at_s = arrivals(len(bodies), rate, random.Random(f"{mix} {users}")) if arrivals else None
        for number in range(num_runs):
            for on in (True, False) if number % 2 == 0 else (False, True):
                salt = f"run-{next(_SALTS)}"
                own = [{**body, "speculation": on, "cache_salt": salt} for body in bodies]
                runs[on].append(measured(self._service.timed(own, users, tenant=self._tenant, at_s=at_s)))
            self._tick(f"{mix}, {users} users", number + 1, num_runs)
        ways = {name: _medians(runs[on]) for name, on in (("on", True), ("off", False))}
        return {
            "mix": mix,
            "users": users,
            "arrivals": arrivals.__name__ if arrivals else "closed",
            "on_off": ways["on"]["tokens_per_s"] / ways["off"]["tokens_per_s"],
            "on_off_p99": ways["off"]["token_p99_ms"] / ways["on"]["token_p99_ms"],
            **ways,
        }


def measured(answers: Sequence[Answer]) -> Result:
    """Throughput, latencies and goodput of one run. Raises: EngineError for an answer without an end."""
    if failed := [answer for answer in answers if not answer["ended"]]:
        raise EngineError(f"{len(failed)} of {len(answers)} answers did not end: {failed[0].get('error')}")
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    wall_s = max(a["begin_s"] + a["total_s"] for a in answers) - min(a["begin_s"] for a in answers)
    first_s = [a["total_s"] if a["first_s"] is None else a["first_s"] for a in answers]
    token_s = [(a["total_s"] - first) / max(1, n - 1) for a, first, n in zip(answers, first_s, counts, strict=True)]
    good = [first <= SLO_FIRST_S and each <= SLO_TOKEN_S for first, each in zip(first_s, token_s, strict=True)]
    result: Result = {"tokens_per_s": sum(counts) / wall_s, "answers_per_s": len(answers) / wall_s}
    for name, seconds in (("first", first_s), ("token", token_s)):
        result |= {f"{name}_p{share}_ms": 1e3 * _quantile(seconds, share / 100) for share in (50, 90, 99)}
    return result | {"goodput_per_s": sum(good) / wall_s}


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _medians(runs: Sequence[Result]) -> Result:
    return {name: median(run[name] for run in runs) for name in runs[0]}
