"""Calls that any of several actors can answer: they end with an answer, or with an error that says what is lost, in time.

A call that fails, whose actor dies or that is late goes to another actor; a late actor that does not even answer a ping is
reported to its directory as hung. Which actor answers never matters: each call carries all that it needs.

    >>> crew = Crew(directory, "shard", what="a shard of the index")
    >>> ask(crew, {"segment-000001": ("shard-1", "shard-0")}, lambda actor, names: actor.search.remote(...), Patience(30.0))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from ragspec.cluster.crew import PING_S, Crew
from ragspec.cluster.directory import Member
from ragspec.errors import ConfigError, InputError, RagspecError, RetrievalError

Item = TypeVar("Item", bound=Hashable)
Send = Callable[[Any, list[Item]], Any]
"""Calls an actor (its handle) for some items at once; gives Ray's reference to the answer."""

_LOOK_S = 0.1
_CALLS_AT_ONCE = 2


class Patience(NamedTuple):
    """Seconds that a call may take in all, and after which it is late; None: half of all.

    `elsewhere`: a late call is made again, by another actor. `for_lost`: who cannot be asked now is waited for, as long as
    there is time; otherwise an item is given up when everyone alive has failed it.
    """

    timeout_s: float
    late_s: float | None = None
    elsewhere: bool = True
    for_lost: bool = True


class Answers(NamedTuple, Generic[Item]):
    """What was answered, for which items together, and why the others were not. No item is in two answers."""

    given: list[tuple[list[Item], Any]]
    unanswered: dict[Item, RagspecError]


def ask(crew: Crew, items: Mapping[Item, Sequence[str]], send: Send[Item], patience: Patience) -> Answers[Item]:
    """Each item is asked of the first of its members that can answer, then of the others; of none twice.

    An item with no members named is asked alone, of whoever is free.
    Raises: InputError or ConfigError of an actor's code; RetrievalError if the crew was closed.
    """
    return _Asking(crew, items, send, patience).run()


@dataclass(slots=True)
class _Call(Generic[Item]):
    member: Member
    items: list[Item]
    late_at: float
    doubted_at: float


class _Asking(Generic[Item]):
    """One `ask`."""

    def __init__(self, crew: Crew, items: Mapping[Item, Sequence[str]], send: Send[Item], patience: Patience) -> None:
        self._crew, self._orders, self._send, self._patience = crew, items, send, patience
        self._deadline = time.monotonic() + patience.timeout_s
        self._late_s = patience.timeout_s / 2 if patience.late_s is None else patience.late_s
        self._left = dict.fromkeys(items)
        self._asked: dict[Item, set[tuple[str, int]]] = {item: set() for item in items}
        self._alone: set[Item] = set()
        self._errors: dict[Item, RagspecError] = {}
        self._calls: dict[Any, _Call[Item]] = {}
        self._given: list[tuple[list[Item], Any]] = []

    def run(self) -> Answers[Item]:
        given_up: dict[Item, RagspecError] = {}
        while self._left and time.monotonic() < self._deadline:
            self._crew.check_open()
            self._drop_lost()
            self._start()
            given_up |= self._hopeless()
            for item in given_up:
                self._left.pop(item, None)
            if self._left:
                self._wait()
        return Answers(self._given, given_up | {item: self._too_late(item) for item in self._left})

    def _start(self) -> None:
        groups: dict[tuple[str, int, Item | None], tuple[Member, list[Item]]] = {}
        live = self._crew.live(self._crew.watch.table)
        busy = {(call.member.name, call.member.epoch) for call in self._calls.values()}
        for item in self._left:
            member = self._next(item, live, busy) if self._is_due(item) else None
            if member is None:
                continue
            key = (member.name, member.epoch)
            self._asked[item].add(key)
            groups.setdefault((*key, item if item in self._alone else None), (member, []))[1].append(item)
            busy.add(key)
        late_at = time.monotonic() + self._late_s
        for member, items in groups.values():
            self._calls[self._send(member.actor, items)] = _Call(member, items, late_at, late_at)

    def _is_due(self, item: Item) -> bool:
        running = [call for call in self._calls.values() if item in call.items]
        if not running:
            return True
        is_late = all(call.late_at <= time.monotonic() for call in running)
        return is_late and self._patience.elsewhere and len(running) < _CALLS_AT_ONCE

    def _next(self, item: Item, live: Iterable[Member], busy: set[tuple[str, int]]) -> Member | None:
        order = self._orders[item]
        rank = {name: number for number, name in enumerate(order)}
        fresh = [
            member
            for member in live
            if (key := (member.name, member.epoch)) not in self._asked[item] and (order or key not in busy)
        ]
        if fresh and not order:
            return fresh[next(self._crew.turns) % len(fresh)]
        return min(fresh, key=lambda member: rank.get(member.name, len(rank)), default=None)

    def _wait(self) -> None:
        """Until something is answered, late or to be looked at again."""
        now, table = time.monotonic(), self._crew.watch.table
        for call in self._calls.values():
            if call.doubted_at <= now:
                self._crew.doubt(call.member)
                call.doubted_at = now + max(self._late_s, PING_S)
        left_s = max(0.0, min(self._deadline - now, _LOOK_S))
        if not self._calls:
            self._crew.watch.wait(table.version, left_s)
            return
        answered, _ = ray.wait(list(self._calls), timeout=left_s)
        for reference in answered:
            self._settle(self._calls.pop(reference), reference)

    def _settle(self, call: _Call[Item], reference: Any) -> None:
        try:
            value = ray.get(reference)
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, InputError | ConfigError):
                raise cause from None
            told = cause if isinstance(cause, RagspecError) else self._failed("failed", error)
            self._note(call, told)
        except RayError as error:
            self._crew.lose(call.member, f"a call was lost: {_last_line(error)}")
            self._errors |= dict.fromkeys(call.items, self._failed("is lost", error))
        else:
            self._accept(call.items, value)

    def _note(self, call: _Call[Item], told: RagspecError) -> None:
        """Why items that failed together are asked again one by one: the fault of one of them is not the others'."""
        self._errors |= dict.fromkeys(call.items, told)
        if len(call.items) > 1:
            self._alone |= set(call.items)
            for item in call.items:
                self._asked[item].discard((call.member.name, call.member.epoch))

    def _accept(self, items: list[Item], value: Any) -> None:
        """Two actors may have been asked for overlapping items: an answer counts if it makes others superfluous."""
        if all(item not in self._left for item in items):
            return
        overlapping = [each for each in self._given if not set(each[0]).isdisjoint(items)]
        if all(set(each[0]) <= set(items) for each in overlapping):
            self._given = [each for each in self._given if each not in overlapping]
            self._given.append((items, value))
            for item in items:
                self._left.pop(item, None)

    def _drop_lost(self) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if not self._crew.is_lost(call.member)}

    def _hopeless(self) -> dict[Item, RagspecError]:
        """Items that everyone has failed who could be asked."""
        here = [member for member in self._crew.watch.table.of(self._crew.kind) if not self._crew.is_lost(member)]
        if not here or (self._patience.for_lost and len(here) < len(self._crew.names())):
            return {}
        running = {item for call in self._calls.values() for item in call.items}
        return {
            item: self._errors[item]
            for item in self._left
            if item not in running
            and item in self._errors
            and all((member.name, member.epoch) in self._asked[item] for member in here)
        }

    def _too_late(self, item: Item) -> RagspecError:
        self._crew.check_open()
        if item in self._errors:
            return self._errors[item]
        waited = f"within {self._patience.timeout_s:g} s"
        if not self._asked[item]:
            return RetrievalError(f"{self._crew.what} is lost: none came to life {waited}")
        return RetrievalError(f"{self._crew.what} did not answer {waited}")

    def _failed(self, verb: str, error: RayError) -> RetrievalError:
        failed = RetrievalError(f"{self._crew.what} {verb}: {_last_line(error)}")
        failed.__cause__ = error.with_traceback(None)  # Why: its frames would keep the asker's generation on lease
        return failed


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
