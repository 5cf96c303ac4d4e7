"""Pairs of answers to ordinary requests, from the adapted and the unadapted target, which a person compares blind.

Owns the requests (Vicuna's questions, which the adapter's recipe does not read), the shuffled sides, the files for the reader and
the count of the verdicts. `chat_pairs.md` holds the pairs, `chat_key.json` the adapted target's side of each. A verdict is a line
of a JSONL file: the side with the better answer, or "same".

    {"pair": "3f2a9c64d01b77e5", "verdict": "A"}

A pair is named by a digest of its texts, so a verdict never counts for another answer than was read.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from ragspec.disk import saving
from ragspec.errors import InputError
from ragspec.training.reference.sources import json_lines

Meaning = TypeVar("Meaning")

NUM_PAIRS = 50
REQUESTS = "mt_bench/vicuna_bench_question.jsonl"
SIDES = "AB"
NOT_WORSE = {"A": "A", "B": "B", "same": "AB"}
"""The sides that are not worse, by verdict."""
INTRODUCTION = """# Which answer is better?
Write one line a pair to the file of verdicts: `{"pair": "NAME", "verdict": "A"}`, or `"B"`, or `"same"`. Long answers are cut.
"""


class ChatPair(NamedTuple):
    """`answers`: of side A and of side B. `adapted`: the side of the adapted target."""

    request: str
    answers: tuple[str, str]
    adapted: str

    @property
    def name(self) -> str:
        return hashlib.sha256(json.dumps([self.request, self.answers]).encode()).hexdigest()[:16]


def chat_requests(data_dir: Path, count: int, seed: int) -> list[str]:
    """At most so many requests, and at most `NUM_PAIRS`; none without the file."""
    path = data_dir / REQUESTS
    asked = [row["turns"][0] for row in json_lines(path)] if path.exists() else []
    return random.Random(seed).sample(asked, min(count, NUM_PAIRS, len(asked)))


def shuffled_pairs(requests: list[str], answers: tuple[list[str], list[str]], seed: int) -> list[ChatPair]:
    """`answers`: of the adapted and of the unadapted target. A pair's sides depend on the seed and the request alone."""
    pairs = []
    for request, ours, theirs in zip(requests, *answers, strict=True):
        side = random.Random(f"{seed}/{request}").choice(SIDES)
        pairs.append(ChatPair(request, (ours, theirs) if side == "A" else (theirs, ours), side))
    return pairs


def write_pairs(pairs: list[ChatPair], folder: Path) -> None:
    """The file for reading and the key, in a folder that exists. Raises: SaveError."""
    sections = [INTRODUCTION]
    for pair in pairs:
        sections.append(f"## {pair.name}\n\n{pair.request}\n")
        sections += [f"{side}:\n\n~~~~text\n{text}\n~~~~\n" for side, text in zip(SIDES, pair.answers, strict=True)]
    with saving(folder):
        (folder / "chat_pairs.md").write_text("\n".join(sections), encoding="utf-8")
        (folder / "chat_key.json").write_text(json.dumps({pair.name: pair.adapted for pair in pairs}, indent=1))


def read_verdicts(path: Path | None, named: str, meanings: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """The meaning of each verdict in a file of lines `{named: ..., "verdict": ...}`; none without a file.

    Raises: InputError for a line that is no verdict.
    """
    try:
        rows = json_lines(path) if path is not None and path.exists() else ()
        return {row[named]: meanings[row["verdict"]] for row in rows}
    except (ValueError, KeyError, TypeError) as cause:
        raise InputError(f"{path} holds a line that is no verdict: {cause!r}") from cause


def verdict_scores(pairs: list[ChatPair], path: Path | None) -> dict[str, float]:
    """The share of judged pairs whose adapted answer is not worse, NaN without one; and the number of judged pairs.

    Raises: InputError for a line that is no verdict.
    """
    not_worse = read_verdicts(path, "pair", NOT_WORSE)
    judged = [pair.adapted in not_worse[pair.name] for pair in pairs if pair.name in not_worse]
    return {"chat_not_worse": sum(judged) / len(judged) if judged else math.nan, "chat_judged": len(judged)}
