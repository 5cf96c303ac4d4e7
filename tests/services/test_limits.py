"""How much one key may use, and everybody together; what is refused, and when to come back."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from stand_ins import Clock
from starlette.datastructures import Headers

from ragspec.core import Delta, FinishReason, GenerationStats, Request, SamplingParams
from ragspec.errors import EngineError
from ragspec.rag.openai_fields import usage
from ragspec.rag.prompt import Prompt
from ragspec.rag.retrieval_head import Look, PassageTokens
from ragspec.rag.steps import PreparedQuestion
from ragspec.rag.wording import ABSTENTION
from services import gateway
from services.errors import ApiError
from services.gateway import IncomingRequest
from services.keys import Caller
from services.limits import RateLimiter
from services.metrics import Metrics
from services.openai.generation import DeltaMailbox, RequestContext
from services.settings import KeyLimits, Limits


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limiter_of(clock: Clock, max_in_flight: int = 100, **key: int) -> RateLimiter:
    return RateLimiter(Limits(max_in_flight=max_in_flight, key=KeyLimits(**key)), Metrics("m"), clock)


ANN, BOB = Caller("a", "ann"), Caller("b", "bob")


def refused(limiter: RateLimiter, caller: Caller) -> ApiError:
    with pytest.raises(ApiError) as caught, limiter.admit(caller):
        raise AssertionError("it was let in")
    return caught.value


def test_requests_a_minute_are_counted_over_the_last_minute(clock: Clock) -> None:
    """A limit that is reset at full minutes lets twice as many through; one that counts refusals locks a key out."""
    limiter = limiter_of(clock, requests_per_minute=2)
    for _ in range(2):
        with limiter.admit(ANN):
            clock.now += 20.0
    error = refused(limiter, ANN)
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", pytest.approx(20.0))
    with limiter.admit(BOB):
        pass
    for _ in range(3):
        refused(limiter, ANN)
    clock.now += 20.0
    with limiter.admit(ANN):
        pass
    assert refused(limiter, ANN).retry_after_s == pytest.approx(20.0)


def test_requests_at_once_end_when_they_end(clock: Clock) -> None:
    """A request that fails keeps its place for ever."""
    limiter = limiter_of(clock, concurrency=1)
    with limiter.admit(BOB):
        with pytest.raises(ZeroDivisionError), limiter.admit(ANN):
            refused(limiter, ANN)
            raise ZeroDivisionError
        assert limiter.running == 1
        with limiter.admit(ANN):
            assert limiter.running == 2


def test_everybody_together_is_bounded_whoever_asks(clock: Clock) -> None:
    """Many keys at once fill the memory that each alone may use, or one key takes every place by default."""
    assert Limits().key.concurrency is not None and Limits().key.concurrency < Limits().max_in_flight
    limiter = limiter_of(clock, max_in_flight=2)
    with limiter.admit(ANN), limiter.admit(BOB):
        error = refused(limiter, Caller("c", "carl"))
    assert (error.status, error.code) == (429, "server_overloaded") and error.retry_after_s


def test_tokens_a_minute_are_reserved_and_given_back(clock: Clock) -> None:
    """A key's minute is used up by answers that were shorter than allowed, or overdrawn by answers at once."""
    limiter = limiter_of(clock, tokens_per_minute=100)
    first = limiter.reserve(ANN, 20, 40)
    with pytest.raises(ApiError) as caught:
        limiter.reserve(ANN, 20, 40)
    assert caught.value.body()["error"]["type"] == "tokens"
    assert caught.value.retry_after_s == pytest.approx(60.0)
    with pytest.raises(ApiError) as never:  # no minute has so many
        limiter.reserve(ANN, 90, 20)
    assert never.value.status == 400
    first.used(30)
    limiter.reserve(ANN, 20, 40)
    limiter.reserve(BOB, 20, 40)
    clock.now += 30.0
    with pytest.raises(ApiError):
        limiter.reserve(ANN, 20, 40)
    clock.now += 30.0
    limiter.reserve(ANN, 20, 40)


def context_of(limiter: RateLimiter, submit: Callable[[Request, Callable[[Delta], None]], None]) -> Any:
    """Of a request of ANN to an engine."""
    model = SimpleNamespace(engine=SimpleNamespace(submit=submit, cancel=Mock()), metrics=Metrics("m"))
    backend, body = SimpleNamespace(rate_limiter=limiter), SimpleNamespace(stream=False)
    shared = {"caller": ANN, "begin_s": 0.0, "mailbox": DeltaMailbox()}
    return SimpleNamespace(model=model, backend=backend, body=body, **shared)


def asked(request: Request, **first: Any) -> PreparedQuestion:
    prompt = Prompt.of(request.prompt_ids, (), (), "rank")
    return PreparedQuestion("Why?", prompt, request, "", (), 0.0, 0.0, Mock(), "", None, **first)


def look_at(request: Request, params: SamplingParams) -> Look:
    return Look(request, PassageTokens(np.empty(0), np.empty(0), {}), lambda seen: params)


async def test_a_look_costs_the_answers_prompt_once(clock: Clock) -> None:
    """A key's minute was used up twice as fast, and usage said that nearly all of a new prompt had been cached."""
    seen = list[Request]()

    def submit(request: Request, listener: Callable[[Delta], None]) -> None:
        seen.append(request)
        stats = GenerationStats(
            len(request.prompt_ids), num_cached_tokens=2 if len(seen) == 1 else 9, num_output_tokens=1
        )
        listener(Delta(request.id, 0, (7,), "It", (), FinishReason.STOP, stats, attention=((1.0,),)))

    limiter = limiter_of(clock, tokens_per_minute=100)
    request, biased = Request("a", (5,) * 10, SamplingParams(max_tokens=60)), SamplingParams(max_tokens=60, seed=3)
    look = look_at(Request("b", (5,) * 11), biased)
    async with RequestContext.generate(
        context_of(limiter, submit), [request], prepared=asked(request, look=look)
    ) as stream:
        (completion,) = await stream.completions()
    assert [each.id for each in seen] == ["b", "a"] and seen[1].params == biased
    told = usage([completion.stats])
    assert (told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"], told["total_tokens"]) == (10, 2, 11)
    limiter.reserve(ANN, 89, 0)
    with pytest.raises(ApiError):
        limiter.reserve(ANN, 1, 0)


async def test_a_first_question_that_fails_gives_the_answers_tokens_back(clock: Clock) -> None:
    """A client that left while the passages were judged had its key's minute used up by an answer that nobody wrote."""
    context = context_of(limiter_of(clock, tokens_per_minute=170), Mock(side_effect=EngineError("lost")))
    request = Request("a", (5,) * 10, SamplingParams(max_tokens=60))
    for first in ({"doubt": request}, {"look": look_at(request, request.params)}) * 2:
        with pytest.raises(EngineError):
            async with RequestContext.generate(context, [request], prepared=asked(request, **first)):
                raise AssertionError("it was answered")


@pytest.mark.parametrize("kind", ["doubt", "look"])
async def test_a_client_that_leaves_during_the_first_request_pays_for_its_prompt(clock: Clock, kind: str) -> None:
    """A key read prompts without end, and no limit refused it."""
    limiter = limiter_of(clock, tokens_per_minute=200)
    request, first = (Request(name, (5,) * 60, SamplingParams(max_tokens=1)) for name in "ab")
    prepared = asked(request, **{kind: first if kind == "doubt" else look_at(first, request.params)})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async with RequestContext.generate(context_of(limiter, Mock()), [request], prepared=prepared):
                raise AssertionError("it was answered")
    limiter.reserve(ANN, 140, 0)
    with pytest.raises(ApiError):
        limiter.reserve(ANN, 1, 0)


async def test_a_first_question_counts_in_usage_and_limits(clock: Clock) -> None:
    """A refused question took a prompt and a token of the target, and neither the answer's usage nor the key's minute had them;
    the key paid for the prompt of an answer that nobody wrote."""

    def submit(request: Request, listener: Callable[[Delta], None]) -> None:
        stats = GenerationStats(num_prompt_tokens=len(request.prompt_ids), num_output_tokens=1)
        listener(Delta(request.id, 0, (7,), "No", (), FinishReason.STOP, stats))

    limiter = limiter_of(clock, tokens_per_minute=100)
    request = Request("a", (5,) * 10, SamplingParams(max_tokens=60))
    doubt = Request("b", (5,) * 14, SamplingParams(max_tokens=1))
    context = context_of(limiter, submit)
    async with RequestContext.generate(context, [request], prepared=asked(request, doubt=doubt)) as stream:
        (completion,) = await stream.completions()
    assert completion.text == ABSTENTION
    told = usage([completion.stats])
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (14, 1, 15)
    limiter.reserve(ANN, 85, 0)
    with pytest.raises(ApiError):
        limiter.reserve(ANN, 1, 0)


def test_a_key_s_own_limits_stand_in_place_of_the_service_s(clock: Clock) -> None:
    """A key that was given more, or less, is treated like all; or has no limit at once because it has one a minute."""
    limiter = limiter_of(clock, requests_per_minute=1, concurrency=1)
    free = Caller("f", "", limits=KeyLimits(requests_per_minute=None))
    for _ in range(3):
        with limiter.admit(free):
            pass
    with limiter.admit(free):
        assert refused(limiter, free).status == 429


def test_every_choice_counts_as_a_request(clock: Clock) -> None:
    """Thirty requests of eight choices each are thirty requests at once: a key gets eight times its share."""
    limiter = limiter_of(clock, concurrency=8)
    with limiter.admit(ANN), limiter.choices(ANN, 6):
        with limiter.admit(ANN):
            with pytest.raises(ApiError) as caught, limiter.choices(ANN, 3):
                raise AssertionError("it was let in")
            assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
            with limiter.choices(ANN, 2):
                assert refused(limiter, ANN).status == 429
        with limiter.admit(BOB), limiter.choices(BOB, 8):
            pass
        with pytest.raises(ApiError) as caught, limiter.choices(ANN, 9):
            raise AssertionError("it was let in")
        assert (caught.value.status, caught.value.code) == (400, "concurrency_exceeded")
    with limiter.admit(ANN), limiter.choices(ANN, 8):
        pass


async def test_draining_takes_nothing_more_and_waits_for_what_runs() -> None:
    """A service that stops cuts answers off, or never stops because new ones come."""
    limiter, other = (RateLimiter(Limits(), Metrics("m")) for _ in range(2))
    with other.admit(ANN):
        assert not await other.drained(0.01)
    with limiter.admit(ANN):
        draining = asyncio.create_task(limiter.drained(30.0))
        await asyncio.sleep(0)
        assert refused(limiter, BOB).status == 503 and not draining.done()
    assert await draining


def test_the_table_of_keys_does_not_grow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are made and revoked by a script stay in memory."""
    monkeypatch.setattr("services.limits._MAX_KEYS", 10)
    limiter = limiter_of(clock, requests_per_minute=5)
    for number in range(200):
        with limiter.admit(Caller(str(number), "")):
            clock.now += 10.0
    assert limiter.num_keys <= 11


async def test_large_bodies_of_a_key_are_checked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bodies of 8 MB, checked at once, left another key's chat an eighth of the processor."""
    counting, running, most = threading.Lock(), dict.fromkeys((ANN.key_id, BOB.key_id), 0), dict[str, int]()
    both = threading.Barrier(2)

    def check(body: bytes) -> None:
        name = body[:1].decode()
        with counting:
            running[name] += 1
            most[name] = max(most.get(name, 0), running[name])
        if body[1:2] == b"!":  # one body of each key: they meet in their checks, or the barrier breaks
            both.wait(30)
        threading.Event().wait(0.02)
        with counting:
            running[name] -= 1

    async def send(limiter: RateLimiter, caller: Caller, mark: str) -> None:
        body = (caller.key_id + mark).encode() + b" " * 10**6
        headers = Headers({"content-type": "application/json", "content-length": str(len(body))})

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        with limiter.admit(caller):
            incoming = IncomingRequest("POST", "/v1/completions", headers, receive, Limits())
            await incoming.read(30.0, limiter.large_bodies(caller.key_id))

    monkeypatch.setattr("services.limits.check_json", check)
    limiter = RateLimiter(Limits(), Metrics("m"))
    await asyncio.gather(*(send(limiter, caller, mark) for mark in "!    " for caller in (ANN, BOB)))
    assert most == {ANN.key_id: 1, BOB.key_id: 1}


def test_large_bodies_of_a_key_are_read_at_a_bounded_rate(clock: Clock) -> None:
    """A key whose clients send 8 MB again and again, whose reading kept the interpreter from the engine most of the time."""
    limiter, waits, num_bytes = limiter_of(clock), list[float](), 8 * 2**20
    for _ in range(100):
        waits.append(limiter.large_bodies(ANN.key_id).wait_s(num_bytes))
        clock.now += waits[-1]
    assert waits[0] == 0.0 and clock.now - 1000.0 == pytest.approx(100 * num_bytes / (4 * 2**20) - 2.5)
    assert limiter.large_bodies(BOB.key_id).wait_s(num_bytes) == 0.0


async def test_a_large_body_is_read_with_pauses_and_a_small_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that the service itself spends waiting runs into the client's time limit, and small bodies wait behind large ones."""
    pauses, sleep = list[float](), asyncio.sleep

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def read(limiter: RateLimiter, num_pieces: int) -> int:
        num_left = itertools.count(num_pieces - 1, -1)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * 2**16, "more_body": next(num_left) > 0}

        headers = Headers({"content-type": "text/plain"})
        incoming = IncomingRequest("POST", "/v1/completions", headers, receive, Limits(body_bytes=2**30))
        await incoming.read(30.0, limiter.large_bodies(ANN.key_id))
        return len((await incoming.receive())["body"])

    monkeypatch.setattr(gateway.asyncio, "sleep", paused)
    limiter = limiter_of(Clock())
    assert await read(limiter, 1024) == 2**26  # 16 s of the rate, without the clock moving on
    assert max(pauses) == pytest.approx((2**26 - 2**17) / (4 * 2**20) - 2.5)
    pauses.clear()
    assert await read(limiter, 2) == 2**17 and not pauses


def test_who_asks_again_at_once_is_refused_once_a_second(clock: Clock) -> None:
    """A client that is refused 350 times a second takes half of the event loop from those who are not."""
    limiter = limiter_of(clock)
    assert [limiter.refusal_wait_s(ANN.key_id) for _ in range(10)] == [0.0] * 8 + [1.0] * 2
    assert limiter.refusal_wait_s(BOB.key_id) == 0.0
    clock.now += 0.9
    assert limiter.refusal_wait_s(ANN.key_id) == 1.0
    clock.now += 1.1
    assert limiter.refusal_wait_s(ANN.key_id) == 0.0
