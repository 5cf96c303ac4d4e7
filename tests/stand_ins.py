"""Small things that tests of any package take: waiting without a fixed time, a clock that stands still, a progress callback."""

import time
from collections.abc import Callable
from typing import Any

import pytest


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


def no_tick(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total
