"""Calls of many are made together, each gets its own answer, and none waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from ragspec.errors import EngineClosed, InputError, RetrievalError
from ragspec.retrieval.batching_retriever import RequestBatcher

WAIT_S = 10.0


class Doubling:
    """Doubles numbers, once it may; a negative one fails the call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[list[int]]]] = []
        self.may_go = threading.Event()
        self.began = threading.Semaphore(0)

    def __call__(self, key: str, parts: list[Sequence[int]]) -> list[list[int]]:
        self.seen.append((key, [list(part) for part in parts]))
        self.began.release()
        assert self.may_go.wait(WAIT_S)
        if any(number < 0 for part in parts for number in part):
            raise InputError("negative")
        return [[2 * number for number in part] for part in parts]


@pytest.fixture
def doubling() -> Doubling:
    return Doubling()


@pytest.fixture
def calls(doubling: Doubling) -> Iterator[RequestBatcher[str, int, list[int]]]:
    made = RequestBatcher(doubling, max_items=4)
    yield made
    doubling.may_go.set()
    made.close()


def test_what_comes_during_a_call_shares_the_next(
    calls: RequestBatcher[str, int, list[int]], doubling: Doubling
) -> None:
    """Every request made a call of its own, or got another's part of the answer."""
    first = calls.submit("a", [1])
    assert doubling.began.acquire(timeout=WAIT_S)
    others = [calls.submit("a", [2, 3]), calls.submit("b", [9]), calls.submit("a", [4]), calls.submit("a", [5, 6])]
    doubling.may_go.set()
    assert [future.result(WAIT_S) for future in (first, *others)] == [[2], [4, 6], [18], [8], [10, 12]]
    assert doubling.seen == [("a", [[1]]), ("a", [[2, 3], [4]]), ("b", [[9]]), ("a", [[5, 6]])]


def test_a_submission_larger_than_a_call_is_one_call(
    calls: RequestBatcher[str, int, list[int]], doubling: Doubling
) -> None:
    """It waited for room that never comes."""
    doubling.may_go.set()
    assert calls.submit("a", list(range(9))).result(WAIT_S) == [2 * number for number in range(9)]


def test_one_fault_is_not_the_others(calls: RequestBatcher[str, int, list[int]], doubling: Doubling) -> None:
    """One request's bad query failed all that shared its call."""
    calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    good, bad, late = calls.submit("a", [1]), calls.submit("a", [-1]), calls.submit("a", [2])
    doubling.may_go.set()
    assert good.result(WAIT_S) == [2]
    assert late.result(WAIT_S) == [4]
    with pytest.raises(InputError, match="negative"):
        bad.result(WAIT_S)


def test_what_is_lost_is_lost_for_all(doubling: Doubling) -> None:
    """An index that does not answer was asked once more by each that waited, one after the other, while all others stood."""
    num_calls = 0

    def call(key: str, parts: list[Sequence[int]]) -> list[list[int]]:
        nonlocal num_calls
        num_calls += 1
        doubling.began.release()
        assert doubling.may_go.wait(WAIT_S)
        raise RetrievalError("lost")

    calls = RequestBatcher(call, max_items=8)
    first = calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    others = [calls.submit("a", [number]) for number in range(5)]
    doubling.may_go.set()
    for future in (first, *others):
        with pytest.raises(RetrievalError, match="lost"):
            future.result(WAIT_S)
    assert num_calls == 2
    calls.close()


def test_cancelled_submissions_are_left_out(calls: RequestBatcher[str, int, list[int]], doubling: Doubling) -> None:
    """A request that was given up still cost a lookup, or broke the thread when its answer came."""
    calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    gone, there = calls.submit("a", [1]), calls.submit("a", [2])
    assert gone.cancel()
    doubling.may_go.set()
    assert there.result(WAIT_S) == [4]
    assert doubling.seen[-1] == ("a", [[2]])


def test_closing_ends_what_waits(calls: RequestBatcher[str, int, list[int]], doubling: Doubling) -> None:
    """Requests that wait at the end waited for ever."""
    calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    gone, waiting = calls.submit("b", [0]), calls.submit("b", [1])
    assert gone.cancel()
    calls.close()
    doubling.may_go.set()
    with pytest.raises(EngineClosed):
        waiting.result(WAIT_S)
    with pytest.raises(EngineClosed):
        calls.submit("a", [1])
