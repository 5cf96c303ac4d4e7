"""Small things that tests of any package take: waiting without a fixed time, a clock that stands still, a listener of deltas, a
progress callback."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ragspec.core import Delta


def until(condition: Callable[[], Any], what: str = "what was waited for", timeout_s: float = 600.0) -> Any:
    """What the condition gives once it is true. A test machine may be slow, so time decides nothing but that it never comes."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if found := condition():
            return found
        time.sleep(0.01)
    pytest.fail(f"{what} did not come about within {timeout_s} s")


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Heard:
    """A listener that keeps everything, and can be waited for; `act` runs on each delta, in the thread that brings it."""

    def __init__(self, num_choices: int = 1, act: Callable[[Delta], None] = lambda delta: None) -> None:
        self.deltas: list[Delta] = []
        self._num_choices, self._act = num_choices, act
        self._ends: set[tuple[str, int]] = set()
        self.began, self.ended = threading.Event(), threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.began.set()
        if delta.finish_reason:
            self._ends.add((delta.request_id, delta.choice))
        if len(self._ends) == self._num_choices:
            self.ended.set()
        self._act(delta)

    def wait(self, timeout_s: float = 30.0) -> list[Delta]:
        assert self.ended.wait(timeout_s), "no end came"
        return self.deltas

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)


def no_tick(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total
