"""The load curve: the same chats by 1 to 64 users at once, with speculation and without, in turns.

A mix is a list of chat bodies. A run sends each body once, and at least one for each user; every user sends the next body after
an answer has ended. No run shares a cached prefix with another.

    >>> curve_row(service, "rag", sent_by(8, "rag", mixes["rag"]), users=8, num_runs=2)["on_off"]
"""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pipelines.benchmarks.harness import Row
from pipelines.benchmarks.users.clients import Answer, chat_body, quantile
from pipelines.benchmarks.users.service import Service
from ragspec.errors import EngineError
from ragspec.rag.wording import GRAMMAR_REQUEST

Body = dict[str, Any]

RAG, MIXED = "rag", "mixed"
GOOD_FIRST_S = 2.0
"""An answer is good if its first token came within this time, and the others followed within `GOOD_TOKEN_S` each."""
GOOD_TOKEN_S = 0.1
"""The time of a token of a good answer."""

_MAX_TOKENS = 64
_NUM_KINDS = 4
_SALTS = itertools.count()


def mixes_of(model: str, questions: Sequence[str], seed: int) -> dict[str, list[Body]]:
    """One body of each kind for each question; `MIXED` has all of them."""
    drawn = {"max_tokens": _MAX_TOKENS, "seed": seed}
    free = drawn | {"retrieval": False}
    kinds: dict[str, list[Body]] = {RAG: [], "chat": [], "grammar": [], "creative": []}
    for question in questions:
        follow_up = (question, "I do not know. What do you mean?", f"I mean this: {question}")
        story = f"Write a story that begins like this: {question}"
        kinds[RAG].append(chat_body(model, question, **drawn))
        kinds["chat"].append(chat_body(model, *follow_up, **free))
        kinds["grammar"].append(_correction(model, f"he ask me: {question}", free))
        kinds["creative"].append(chat_body(model, story, temperature=1.0, **free))
    return kinds | {MIXED: [body for group in zip(*kinds.values(), strict=True) for body in group]}


def _correction(model: str, sentence: str, drawn: Mapping[str, Any]) -> Body:
    prediction = {"type": "content", "content": sentence}
    return chat_body(model, GRAMMAR_REQUEST + sentence, prediction=prediction, **drawn)


def sent_by(users: int, mix: str, bodies: Sequence[Body], num_questions: int | None = None) -> list[Body]:
    """The bodies of a run: those of `num_questions` questions (None: all), and at least one for each user.

    A body comes again only where there are more users than bodies.
    """
    num_least = len(bodies) if num_questions is None else num_questions * (_NUM_KINDS if mix == MIXED else 1)
    return list(itertools.islice(itertools.cycle(bodies), max(users, num_least)))


def curve_row(service: Service, mix: str, bodies: Sequence[Body], users: int, num_runs: int, tenant: str = "") -> Row:
    """Medians of runs with speculation (`on_...`) and without (`off_...`). `tenant`: as of `Service.timed`.

    `on_off`: tokens a second with speculation over without; `on_off_p99`: the 99th percentile of the time a token without
    speculation over with. Raises: EngineError.
    """
    runs: dict[bool, list[Row]] = {True: [], False: []}
    for number in range(num_runs):
        for on in (True, False) if number % 2 == 0 else (False, True):
            salt = f"run-{next(_SALTS)}"
            own = [{**body, "speculation": on, "cache_salt": salt} for body in bodies]
            runs[on].append(measured(service.timed(own, users, tenant=tenant)))
    on_medians, off_medians = _medians(runs[True]), _medians(runs[False])
    return {
        "mix": mix,
        "users": users,
        "on_off": on_medians["tokens_per_s"] / off_medians["tokens_per_s"],
        "on_off_p99": off_medians["token_p99_ms"] / on_medians["token_p99_ms"],
        **{f"on_{name}": value for name, value in on_medians.items()},
        **{f"off_{name}": value for name, value in off_medians.items()},
    }


def measured(answers: Sequence[Answer]) -> Row:
    """Throughput, latencies and goodput of one run. Raises: EngineError for an answer without an end."""
    if failed := [answer for answer in answers if not answer["ended"]]:
        raise EngineError(f"{len(failed)} of {len(answers)} answers did not end: {failed[0].get('error')}")
    first_s, token_s, num_tokens = list[float](), list[float](), 0
    for answer in answers:
        count = answer["usage"]["completion_tokens"]
        num_tokens += count
        first_s.append(answer["total_s"] if answer["first_s"] is None else answer["first_s"])
        token_s.append((answer["total_s"] - first_s[-1]) / max(1, count - 1))
    wall_s = max(a["begin_s"] + a["total_s"] for a in answers) - min(a["begin_s"] for a in answers)
    good = [first <= GOOD_FIRST_S and token <= GOOD_TOKEN_S for first, token in zip(first_s, token_s, strict=True)]
    row: Row = {"tokens_per_s": num_tokens / wall_s, "answers_per_s": len(answers) / wall_s}
    for name, seconds in (("first", sorted(first_s)), ("token", sorted(token_s))):
        row |= {f"{name}_p{share}_ms": 1e3 * quantile(seconds, share / 100) for share in (50, 99)}
    return row | {"goodput_per_s": sum(good) / wall_s}


def _medians(runs: Sequence[Row]) -> Row:
    return {name: median(run[name] for run in runs) for name in runs[0]}
