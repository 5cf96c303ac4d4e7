"""What an engine's thread hears, and that it beats while it has nothing else to do."""

import itertools
import threading
import time

import pytest

from ragspec.engine.client import CommandQueue
from ragspec.errors import RankLost


def test_an_idle_engine_beats_however_often_it_is_asked_something() -> None:
    """A host that asks four times a second kept the engine from ever looking after its ranks."""
    beats: list[float] = []
    commands = CommandQueue(lambda: beats.append(time.monotonic()), 0.1)
    asking = threading.Event()

    def ask() -> None:
        for _ in range(50):
            commands.put(lambda: None)
            time.sleep(0.02)
        asking.set()
        commands.end()

    thread = threading.Thread(target=ask)
    thread.start()
    assert not commands.run(lambda: True)
    thread.join()
    assert asking.is_set() and len(beats) >= 3
    assert min(later - earlier for earlier, later in itertools.pairwise(beats)) >= 0.1


def test_an_engine_without_other_ranks_sleeps_until_it_is_asked() -> None:
    """Every idle engine woke up each second for nothing."""
    commands = CommandQueue(lambda: pytest.fail("there is nobody to beat for"), None)
    threading.Timer(0.2, commands.end).start()
    assert not commands.run(lambda: True)


def test_a_busy_engine_runs_what_it_was_asked_and_goes_on() -> None:
    """A step waited for a command, or for a beat that a step is itself."""
    commands, done = CommandQueue(lambda: pytest.fail("steps are beats"), 0.0), []
    for number in range(3):
        commands.put(lambda number=number: done.append(number))
    assert commands.run(lambda: False)
    assert done == [0, 1, 2]


def test_a_failing_command_is_not_the_end_and_a_failing_beat_is(caplog: pytest.LogCaptureFixture) -> None:
    """One bad call ended the engine's thread; a lost rank was logged and forgotten."""

    def lose() -> None:
        raise RankLost("gone")

    commands, done = CommandQueue(lose, 0.1), []
    commands.put(lambda: 1 // 0)
    commands.put(lambda: done.append(1))
    assert commands.run(lambda: False) and done == [1]
    assert "a command to the engine failed" in caplog.text
    with pytest.raises(RankLost):
        commands.run(lambda: True)
