"""Leaks between tenants: drafts, caches, and the time to the first token.

For each pair, a unique sentence is written into one tenant's conversation and answer. Another tenant then sends the
beginning of this sentence, and the beginning of a new sentence. Nothing may differ.

    >>> probe(service, num_pairs=500, seed=0, tick=tick)["tenant_cliffs_delta"]
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.benchmarks.clients import chat_body
from pipelines.benchmarks.service import Service
from ragspec.errors import InputError
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick

OWNER, STRANGER = "ann", "bob"
_BATCH = 20
_REMEMBER = "Remember:"
_MAX_TOKENS = 8
_SYLLABLES = ("ba", "ko", "ri", "du", "sel", "ma", "tor", "vi", "lun", "pe", "gan", "sho")
_FOREIGN = ("passage", "earlier", "draft")
"""Kinds of sources that only another tenant can have: the stranger sends a question and no passages."""


def probe(service: Service, num_pairs: int, seed: int, tick: Tick) -> Result:
    """Drafted foreign tokens, cached tokens beyond those of a new sentence, and Cliff's deltas of first-token
    times and of all drafted tokens. The last delta tells whether another tenant's conversation is drafted from."""
    draw = random.Random(f"tenants {seed}")
    openers = iter(_openers(service.backend.prompts.tokenizer, 2 * num_pairs))
    drafted = cached = 0
    first_s: dict[bool, list[float]] = {True: [], False: []}
    drafts: dict[bool, list[float]] = {True: [], False: []}
    for done in range(0, num_pairs, _BATCH):
        secrets = [_sentence(draw, next(openers)) for _ in range(min(_BATCH, num_pairs - done))]
        others = [_sentence(draw, next(openers)) for _ in secrets]
        service.timed([_told(service.backend.model, secret) for secret in secrets], 4, OWNER)
        pairs = [[(secret, True), (other, False)] for secret, other in zip(secrets, others, strict=True)]
        for pair in pairs:
            draw.shuffle(pair)
        order = [each for pair in pairs for each in pair]
        answers = service.timed([_asked(service.backend.model, text) for text, _ in order], 1, STRANGER)
        usual = max(_cached(answer) for answer, (_, known) in zip(answers, order, strict=True) if not known)
        for answer, (_, known) in zip(answers, order, strict=True):
            first_s[known].append(answer["first_s"] or answer["total_s"])
            drafts[known].append(sum(_by_source(answer).values()))
            drafted += foreign_tokens(_by_source(answer))
            cached += max(0, _cached(answer) - usual) if known else 0
        tick("pairs of tenants", done + len(pairs), num_pairs)
    return {
        "tenant_pairs": num_pairs,
        "tenant_drafted": drafted,
        "tenant_cache_hits": cached,
        "tenant_cliffs_delta": cliffs_delta(first_s[True], first_s[False]),
        "tenant_drafts_delta": cliffs_delta(drafts[True], drafts[False]),
    }


def cliffs_delta(a: Sequence[float], b: Sequence[float]) -> float:
    """Cliff's delta: P(a > b) - P(a < b), from -1 to 1 (Cliff 1993)."""
    return sum((x > y) - (x < y) for x in a for y in b) / (len(a) * len(b))


def _openers(tokenizer: Any, count: int) -> list[str]:
    """Distinct words of one token: sentences that begin with them share no beginning, so the stranger's own cache
    never matches.

    Raises: InputError if the tokenizer has too few.
    """
    begin = tokenizer(f"{_REMEMBER} a")["input_ids"][:-1]
    words: list[str] = []
    for token in sorted(tokenizer.get_vocab().values()):
        word = tokenizer.decode([token]).strip()
        if word.isalpha() and tokenizer(f"{_REMEMBER} {word}")["input_ids"] == [*begin, token]:
            words.append(word)
            if len(words) == count:
                return words
    raise InputError(f"{count} words of one token are needed, and the target's tokenizer has {len(words)}")


def _sentence(draw: random.Random, opener: str) -> str:
    words = ["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4))) for _ in range(15)]
    return " ".join([opener, *words]) + "."


def _told(model: str, secret: str) -> dict[str, Any]:
    """The owner's turn: an answer holds the sentence, and the next answer is likely to repeat it."""
    texts = f"{_REMEMBER} {secret}", secret, f"Say it again: {secret}"
    return chat_body(model, *texts, max_tokens=32, retrieval=False)


def _asked(model: str, text: str) -> dict[str, Any]:
    beginning = " ".join(text.split()[:8])
    settings = {"max_tokens": _MAX_TOKENS, "retrieval": False, "temperature": 0.0, "seed": 0}
    told = {"metrics": True, "stream_options": {"include_usage": True}}
    return chat_body(model, f"{_REMEMBER} {beginning}", **settings, **told)


def _cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def foreign_tokens(drafted_by_source: Mapping[str, int]) -> int:
    """Tokens drafted from sources that the stranger did not send."""
    return sum(drafted_by_source.get(kind, 0) for kind in _FOREIGN)


def _by_source(answer: dict[str, Any]) -> dict[str, int]:
    drafted: dict[str, int] = answer["metrics"]["speculative_decoding"]["drafted_by_source"]
    return drafted
