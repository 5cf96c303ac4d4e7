"""How much one key may use, and everybody together; what is refused, and when to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from services.errors import ApiError
from services.keys import Caller
from services.limits import Gate
from services.metrics import Metrics
from services.settings import KeyLimits, Limits


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def gate_of(clock: Clock, max_in_flight: int = 100, **key: int) -> Gate:
    return Gate(Limits(max_in_flight=max_in_flight, key=KeyLimits(**key)), Metrics("m"), clock)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as open_stack:
        yield open_stack


ANN, BOB = Caller("a", "ann"), Caller("b", "bob")


def refused(gate: Gate, caller: Caller) -> ApiError:
    with pytest.raises(ApiError) as caught, gate.request(caller):
        raise AssertionError("it was let in")
    return caught.value


def test_requests_a_minute_are_counted_over_the_last_minute(clock: Clock) -> None:
    """A limit that is reset at full minutes lets twice as many through; one that never forgets locks a key out."""
    gate = gate_of(clock, requests_per_minute=2)
    for _ in range(2):
        with gate.request(ANN):
            clock.now += 20.0
    error = refused(gate, ANN)
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", pytest.approx(20.0))
    with gate.request(BOB):
        pass
    clock.now += 20.0
    with gate.request(ANN):
        pass
    assert refused(gate, ANN).retry_after_s == pytest.approx(20.0)


def test_a_refused_request_costs_nothing(clock: Clock) -> None:
    """A client that retries too early pushes its own turn further away each time."""
    gate = gate_of(clock, requests_per_minute=1)
    with gate.request(ANN):
        pass
    for _ in range(5):
        clock.now += 10.0
        refused(gate, ANN)
    clock.now += 10.0
    with gate.request(ANN):
        pass


def test_requests_at_once_end_when_they_end(clock: Clock, stack: ExitStack) -> None:
    """A request that fails keeps its place for ever."""
    gate = gate_of(clock, concurrency=1)
    with pytest.raises(ZeroDivisionError), gate.request(ANN):
        refused(gate, ANN)
        stack.enter_context(gate.request(BOB))
        raise ZeroDivisionError
    assert gate.running == 1
    with gate.request(ANN):
        assert gate.running == 2


def test_everybody_together_is_bounded_whoever_asks(clock: Clock, stack: ExitStack) -> None:
    """Many keys at once fill the memory that each alone may use."""
    gate = gate_of(clock, max_in_flight=2)
    stack.enter_context(gate.request(ANN))
    stack.enter_context(gate.request(BOB))
    error = refused(gate, Caller("c", "carl"))
    assert (error.status, error.code) == (429, "server_overloaded") and error.retry_after_s


def test_tokens_a_minute_are_reserved_and_given_back(clock: Clock) -> None:
    """A key's minute is used up by answers that were shorter than allowed, or overdrawn by answers at once."""

    async def run() -> None:
        gate = gate_of(clock, tokens_per_minute=100)
        async with gate.enter(ANN, 20, 40) as first:
            with pytest.raises(ApiError) as caught:
                async with gate.enter(ANN, 20, 40):
                    pass
            assert caught.value.body()["error"]["type"] == "tokens"
            assert caught.value.retry_after_s == pytest.approx(60.0)
            first.used(30)
        async with gate.enter(ANN, 20, 40):
            async with gate.enter(BOB, 20, 40):
                pass
            clock.now += 30.0
            with pytest.raises(ApiError):
                async with gate.enter(ANN, 20, 40):
                    pass
        clock.now += 30.0
        async with gate.enter(ANN, 20, 40):
            pass

    asyncio.run(run())


def test_more_than_a_minute_holds_is_told_apart(clock: Clock) -> None:
    """A client is told to come back for what will never fit."""

    async def run() -> None:
        gate = gate_of(clock, tokens_per_minute=100)
        with pytest.raises(ApiError) as caught:
            async with gate.enter(ANN, 90, 20):
                pass
        assert caught.value.status == 400

    asyncio.run(run())


def test_a_key_s_own_limits_stand_in_place_of_the_service_s(clock: Clock) -> None:
    """A key that was given more, or less, is treated like all."""
    gate = gate_of(clock, requests_per_minute=1)
    free = Caller("f", "", limits=KeyLimits())
    for _ in range(3):
        with gate.request(free):
            pass


def test_draining_takes_nothing_more_and_waits_for_what_runs(clock: Clock) -> None:
    """A service that stops cuts answers off, or never stops because new ones come."""

    async def run() -> None:
        gate = Gate(Limits(), Metrics("m"))
        running = gate.request(ANN)
        running.__enter__()
        draining = asyncio.create_task(gate.drained(30.0))
        await asyncio.sleep(0)
        assert refused(gate, BOB).status == 503 and not draining.done()
        running.__exit__(None, None, None)
        assert await draining

    async def in_vain() -> None:
        gate = Gate(Limits(), Metrics("m"))
        with gate.request(ANN):
            assert not await gate.drained(0.01)

    asyncio.run(run())
    asyncio.run(in_vain())


def test_the_table_of_keys_does_not_grow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are made and revoked by a script stay in memory."""
    monkeypatch.setattr("services.limits._MAX_KEYS", 10)
    gate = gate_of(clock, requests_per_minute=5)
    for number in range(200):
        with gate.request(Caller(str(number), "")):
            clock.now += 10.0
    assert len(gate._uses) <= 11
