"""Compares a run with faults with an undisturbed run: every stream and every row with its expected counterpart.

Pure functions: stream logs go in, names of lost, doubled or changed streams and rows come out. Any other
difference has at least one of the three marks.

    >>> judge_streams({"a": completion}, {"a": StreamLog(deltas=[...])}).lost
    ()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragspec.core import Completion, Delta, FinishReason

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class StreamLog:
    """The log of one stream: all deltas in order with their times (seconds of one clock). `error`: the request was
    refused."""

    prompt_ids: tuple[int, ...] = ()
    deltas: list[Delta] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    begin_s: float = 0.0
    error: str = ""

    @property
    def ended(self) -> bool:
        return bool(self.error) or self.end_s is not None

    @property
    def end_s(self) -> float | None:
        """The time of the first delta that ends the stream."""
        deltas = zip(self.times_s, self.deltas, strict=False)  # Why not strict: a delta may arrive in between
        return next((time_s for time_s, delta in deltas if delta.finish_reason is not None), None)

    def is_open(self, moment_s: float) -> bool:
        """Whether the stream had begun and not ended at the moment."""
        return self.begin_s <= moment_s and (self.end_s is None or self.end_s >= moment_s)


class Expected(NamedTuple):
    """The undisturbed engine's completion of one request."""

    prompt_ids: tuple[int, ...]
    completion: Completion


class Verdict(NamedTuple):
    """Sorted names; a name may have several marks."""

    lost: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def judge_streams(expected: Mapping[str, Expected], heard: Mapping[str, StreamLog]) -> Verdict:
    """Judge all streams; streams without a request count as doubled."""
    marks = {name: _marks(own, heard.get(name, StreamLog())) for name, own in expected.items()}
    marks |= {name: {"doubled"} for name in heard.keys() - expected.keys()}
    return Verdict(*(tuple(sorted(n for n, own in marks.items() if mark in own)) for mark in Verdict._fields))


def judge_rows(expected: Mapping[str, Hashable], found: Iterable[tuple[str, Hashable]]) -> Verdict:
    """Judge the rows of a file by id. Repeated rows are doubled even if both are right; so are rows without a
    request."""
    rows = list(found)
    counts = Counter(name for name, _ in rows)
    lost = expected.keys() - counts.keys()
    doubled = {name for name, count in counts.items() if count > 1 or name not in expected}
    changed = {name for name, value in rows if name in expected and value != expected[name]}
    return Verdict(tuple(sorted(lost)), tuple(sorted(doubled)), tuple(sorted(changed)))


def slowest_gap_s(streams: Iterable[StreamLog], moment_s: float) -> float | None:
    """The longest gap until the next delta over all streams open at the moment; None without open streams.

    A stream without a further delta has an infinite gap.
    """
    still_open = [stream for stream in streams if stream.is_open(moment_s) and not stream.error]
    gaps = (min((t for t in stream.times_s if t >= moment_s), default=math.inf) for stream in still_open)
    return max((next_s - moment_s for next_s in gaps), default=None)


def _marks(expected: Expected, heard: StreamLog) -> set[str]:
    ends = [i for i, delta in enumerate(heard.deltas) if delta.finish_reason is not None]
    marks = set()
    if heard.error or not ends or heard.deltas[ends[0]].finish_reason not in _WHOLE:
        marks.add("lost")
    if len(ends) > 1 or (ends and ends[0] < len(heard.deltas) - 1):
        marks.add("doubled")
    if heard.prompt_ids and heard.prompt_ids != expected.prompt_ids:
        marks.add("changed")
    return marks | _token_marks(expected.completion, heard.deltas, whole=not marks)


def _token_marks(expected: Completion, deltas: Sequence[Delta], whole: bool) -> set[str]:
    """`whole`: the stream ended properly, so nothing excuses a difference."""
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    if tokens != expected.token_ids:
        if _is_within(expected.token_ids, tokens):
            return {"doubled"}
        return {"lost"} if _is_within(tokens, expected.token_ids) else {"changed"}
    logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs)
    same = text == expected.text and logprobs == expected.logprobs
    same = same and (not whole or deltas[-1].finish_reason is expected.finish_reason)
    return set() if same else {"changed"}


def _is_within(short: Sequence[int], long: Sequence[int]) -> bool:
    """Whether the short one is a subsequence of the long one."""
    remaining = iter(long)
    return all(token in remaining for token in short)
