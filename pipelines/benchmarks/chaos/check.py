"""Compares a run with faults with an undisturbed run: every stream and every row with its expected counterpart.

Pure functions: stream logs go in, names of lost, duplicated or changed streams and rows come out. Any other
difference has at least one of the three marks.

    >>> judge_streams({"a": completion}, {"a": StreamLog(deltas=[...])}).lost
    ()
"""

from __future__ import annotations

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
        return bool(self.error) or any(delta.finish_reason is not None for delta in self.deltas)

    @property
    def end_s(self) -> float | None:
        """The time of the first delta that ends the stream."""
        ends = (t for t, delta in zip(self.times_s, self.deltas, strict=True) if delta.finish_reason is not None)
        return next(ends, None)


@dataclass(frozen=True, slots=True)
class Expected:
    """The undisturbed engine's completion of one request."""

    prompt_ids: tuple[int, ...]
    completion: Completion


class Verdict(NamedTuple):
    """Sorted names; a name may have several marks."""

    lost: tuple[str, ...] = ()
    duplicated: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not any(self)


def judge_streams(expected: Mapping[str, Expected], heard: Mapping[str, StreamLog]) -> Verdict:
    """Judge all streams; streams without a request count as duplicates."""
    marks = {name: _marks(own, heard.get(name, StreamLog())) for name, own in expected.items()}
    marks |= {name: {"duplicated"} for name in heard.keys() - expected.keys()}
    return _verdict(marks)


def judge_rows(expected: Mapping[str, Hashable], found: Iterable[tuple[str, Hashable]]) -> Verdict:
    """Judge the rows of a file by id. Repeated rows are duplicates even if both are right; so are rows without a
    request."""
    rows = list(found)
    counts = Counter(name for name, _ in rows)
    marks: dict[str, set[str]] = {name: set() for name in [*expected, *counts]}
    for name, own in marks.items():
        if not counts[name]:
            own.add("lost")
        if counts[name] > 1 or name not in expected:
            own.add("duplicated")
    for name, value in rows:
        if name in expected and value != expected[name]:
            marks[name].add("changed")
    return _verdict(marks)


def first_after(times_s: Sequence[float], moment_s: float) -> float | None:
    """The earliest time that is not before the moment."""
    return min((t for t in times_s if t >= moment_s), default=None)


def slowest_gap_s(streams: Iterable[StreamLog], moment_s: float) -> float | None:
    """The longest gap until the next delta over all streams open at the moment; None without open streams.

    A stream without a further delta has an infinite gap.
    """
    gaps = []
    for stream in streams:
        if stream.begin_s > moment_s or (stream.end_s is not None and stream.end_s < moment_s) or stream.error:
            continue
        after = first_after(stream.times_s, moment_s)
        gaps.append(float("inf") if after is None else after - moment_s)
    return max(gaps, default=None)


def _marks(expected: Expected, heard: StreamLog) -> set[str]:
    ends = [i for i, delta in enumerate(heard.deltas) if delta.finish_reason is not None]
    marks = set()
    if heard.error or not ends or heard.deltas[ends[0]].finish_reason not in _WHOLE:
        marks.add("lost")
    if len(ends) > 1 or (ends and ends[0] < len(heard.deltas) - 1):
        marks.add("duplicated")
    if heard.prompt_ids and heard.prompt_ids != expected.prompt_ids:
        marks.add("changed")
    return marks | _token_marks(expected.completion, heard.deltas, whole=not marks)


def _token_marks(expected: Completion, deltas: Sequence[Delta], whole: bool) -> set[str]:
    """`whole`: the stream ended properly, so nothing excuses a difference."""
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    if tokens != expected.token_ids:
        if _is_within(expected.token_ids, tokens):
            return {"duplicated"}
        return {"lost"} if _is_within(tokens, expected.token_ids) else {"changed"}
    logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs)
    same = text == expected.text and logprobs == expected.logprobs
    same = same and (not whole or deltas[-1].finish_reason is expected.finish_reason)
    return set() if same else {"changed"}


def _is_within(short: Sequence[int], long: Sequence[int]) -> bool:
    """Whether the short one is a subsequence of the long one."""
    remaining = iter(long)
    return all(token in remaining for token in short)


def _verdict(marks: Mapping[str, set[str]]) -> Verdict:
    return Verdict(*(tuple(sorted(n for n, own in marks.items() if mark in own)) for mark in Verdict._fields))
