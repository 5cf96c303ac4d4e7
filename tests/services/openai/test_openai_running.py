"""What an answer holds is given back, however it ends: clients that leave, engines that fail, clients that do not read."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import openai
import pytest
from letter_encoder import LetterEncoder
from raw_http import opened
from service_parts import Service, Serving
from stand_ins import until

from ragspec.core import Delta, FinishReason, GenerationStats, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.errors import Cancelled, EngineError, ReplicaLost
from services.errors import ClientTooSlow
from services.limits import TokenReservation
from services.metrics import Metrics
from services.openai import answers
from services.openai.answers import immediate
from services.openai.generation import DeltaMailbox, EngineStream

LONG = 500
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def service(serving: Serving) -> Iterator[Service]:
    """Nothing is kept after a request, so that every slot must be free."""
    with serving(engine={"enable_prefix_caching": False}) as running:
        yield running


def body(**options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Who built the bridge?"}]
    given = {"model": "tiny", "messages": messages, "max_tokens": LONG, "ignore_eos": True, "logit_bias": {"1": -100}}
    return given | {"temperature": 1.0, "seed": 3} | options


def engine_of(service: Service) -> Engine:
    engine = service.backend.target.engine
    assert isinstance(engine, Engine)
    return engine


def is_free(service: Service) -> bool:
    """Whether the engine knows no request and every page is free."""
    engine, found = engine_of(service), list[bool]()
    pool = engine.target.pool
    engine.between_steps(lambda: found.append(pool.num_pages == pool.num_free_pages))
    return engine.idle() and found[0]


def post(service: Service, given: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, sent and not read."""
    content = json.dumps(given).encode()
    link = opened(service.url)
    link.sendall(service.json_head(f"Content-Length: {len(content)}") + content)
    return link


@pytest.mark.parametrize("options", [{"stream": True}, {}, {"n": 3}, {"stream": True, "privacy": "strict"}])
def test_a_client_that_leaves_is_worked_for_no_longer(
    service: Service, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The engine wrote on for a client that was gone, streaming or not; its slots, or its key's tokens, stayed taken."""
    reserved, reserve = list[TokenReservation](), service.backend.rate_limiter.reserve

    def watched(*asked: Any) -> TokenReservation:
        reserved.append(reserve(*asked))
        return reserved[-1]

    monkeypatch.setattr(service.backend.rate_limiter, "reserve", watched)
    gone, vain = service.counted("ragspec_aborts_total"), service.counted("vllm:generation_tokens_total")
    with post(service, body(**options)) as link:
        before = engine_of(service).load().num_steps
        until(lambda: engine_of(service).load().num_steps > before + 8)
        if options.get("stream"):
            assert link.recv(1) == b"H"
    until(lambda: service.counted("ragspec_aborts_total") == gone + 1)
    until(lambda: is_free(service))
    until(lambda: service.counted("vllm:generation_tokens_total") > vain)
    assert service.counted("vllm:generation_tokens_total") - vain < LONG * options.get("n", 1)
    assert 0 < reserved[0].num_tokens < LONG * options.get("n", 1)
    assert service.backend.rate_limiter.running == 0


@pytest.mark.parametrize("where", ["prepare", "submit"])
def test_a_client_that_leaves_while_a_thread_works_leaves_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A request whose client left during retrieval was handed to the engine afterwards, and cancelled by nobody."""
    owner: Any = service.backend.target.chat if where == "prepare" else service.backend.target.engine
    real, entered, release = getattr(owner, where), threading.Event(), threading.Event()
    done = threading.Event()

    def slow(*args: Any) -> Any:
        entered.set()
        release.wait(PATIENCE_S)
        try:
            return real(*args)
        finally:
            done.set()

    monkeypatch.setattr(owner, where, slow)
    gone = service.counted("ragspec_aborts_total")
    prediction = {"type": "content", "content": "The bridge. " * 500}  # long enough to be read in a thread
    with post(service, body(stream=True, prediction=prediction)):
        assert entered.wait(PATIENCE_S)
    until(lambda: service.counted("ragspec_aborts_total") == gone + 1)
    release.set()
    assert done.wait(PATIENCE_S)
    until(lambda: is_free(service))
    assert service.backend.rate_limiter.running == 0


def test_an_engine_that_fails_ends_the_stream_with_an_error(
    service: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that broke off looked like an answer that was complete."""
    target = engine_of(service).target
    real, num_calls = target.forward_tapped, 0

    def failing(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 6:
            raise RuntimeError("no memory left at 0x7f")
        return real(*args)

    monkeypatch.setattr(target, "forward_tapped", failing)
    with service.openai() as api:
        asked = body(stream=True)
        extra = {"ignore_eos": asked.pop("ignore_eos")}
        with pytest.raises(openai.APIError, match="could not be written") as failed:
            list(api.chat.completions.create(**asked, extra_body=extra))
        assert failed.value.code == "generation_failed" and "0x7f" not in str(failed.value.body)
    num_calls = 0
    events = client.post("/v1/chat/completions", json=body(stream=True)).text.strip()
    num_calls = 0
    whole = client.post("/v1/chat/completions", json=body())
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "generation_failed")
    assert json.loads(events.split("\n")[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert is_free(service)


def test_a_strict_stream_sends_pieces_of_one_size(client: httpx.Client) -> None:
    """Sizes or numbers of packets followed what was accepted; text was lost between two ticks."""
    asked = body(max_tokens=60, stream=True)
    normal = client.post("/v1/chat/completions", json=asked | {"stream": False}).json()
    with client.stream("POST", "/v1/chat/completions", json=asked | {"privacy": "strict"}) as reply:
        frames = [line for line in reply.iter_lines() if line]
    refused = client.post("/v1/chat/completions", json=asked | {"privacy": "strict", "logprobs": True})
    assert frames.pop() == "data: [DONE]"
    assert all((len(frame) + 2) % answers.STRICT_PAD_BYTES == 0 for frame in frames)
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    pieces = [(len(frame), chunk) for frame, chunk in zip(frames, chunks, strict=True) if "ragspec" not in chunk]
    assert len({size for size, _ in pieces}) == 1
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == normal["choices"][0]["message"]["content"]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"


def test_the_end_of_a_choice_does_not_wait_for_another_choice(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice that had ended was sent with the next text of another one, which may take as long as that one's queue."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 10 * PATIENCE_S)  # a keep-alive would send what is held
    seen, was_seen = threading.Event(), list[bool]()

    def submit(request: Request, listener: Callable[[Delta], None]) -> None:
        def speak() -> None:
            stats = GenerationStats(seed=3)
            listener(Delta(request.id, 0, (5,), "yes", (), FinishReason.STOP, stats))
            was_seen.append(seen.wait(PATIENCE_S))
            listener(Delta(request.id, 1, (6,), "no", (), FinishReason.STOP, stats))

        threading.Thread(target=speak).start()

    monkeypatch.setattr(service.backend.target.engine, "submit", submit)
    ended = []
    asked = body(stream=True, n=2)
    with service.client() as client, client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        for line in reply.iter_lines():
            choices = json.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else []
            ended += [choice["index"] for choice in choices if choice["finish_reason"]]
            if ended:
                seen.set()
    assert (ended, was_seen) == ([0, 1], [True])


# -- runs alone --------------------------------------------------------------------------------------------------------


def request(name: str, **params: Any) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(**params))


class Told:
    """An engine that says what it is told to, from another thread."""

    fingerprint, max_context_tokens = "told", 100

    def __init__(self, deltas: list[Delta], wait_s: float = 0.0) -> None:
        self.deltas, self.wait_s, self.cancelled = deltas, wait_s, list[str]()

    def submit(self, request: Request, listener: Callable[[Delta], None]) -> None:
        def speak() -> None:
            for delta in self.deltas:
                time.sleep(self.wait_s)
                listener(delta)

        self.thread = threading.Thread(target=speak)
        self.thread.start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def delta(text: str, reason: FinishReason | None = None, tokens: int = 1) -> Delta:
    stats = GenerationStats(num_output_tokens=3) if reason else None
    return Delta("a", 0, (1,) * tokens, text, (), reason, stats)


@pytest.mark.parametrize(
    ("reason", "error"),
    [(FinishReason.LOST, ReplicaLost), (FinishReason.ERROR, EngineError), (FinishReason.CANCELLED, Cancelled)],
)
async def test_a_choice_that_cannot_be_written_raises(reason: FinishReason, error: type[Exception]) -> None:
    """Half an answer was returned as a whole one."""
    engine: Any = Told([delta("half"), delta("", reason)])

    with pytest.raises(error):
        async with EngineStream(engine, [request("a")], DeltaMailbox(), Metrics("told")) as run:
            await run.completions()
    engine.thread.join()


async def test_a_client_that_falls_too_far_behind_is_given_up() -> None:
    """What nobody reads piled up without end."""
    engine: Any = Told([delta("x", tokens=50) for _ in range(10)])

    with pytest.raises(ClientTooSlow):
        async with EngineStream(engine, [request("a")], DeltaMailbox(), Metrics("told"), max_waiting_tokens=400) as run:
            await asyncio.to_thread(engine.thread.join)
            await run.next_deltas()
    assert engine.cancelled == ["a"]


async def test_a_client_that_waits_hears_that_it_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy closed a connection on which nothing came while the request stood in the queue."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.01)
    engine: Any = Told([delta("x"), delta("y", FinishReason.STOP)], wait_s=0.2)

    async with EngineStream(engine, [request("a")], DeltaMailbox(), Metrics("told")) as run:
        pieces = [piece and piece.text async for piece in immediate(run)]
    assert pieces[0] is None and [piece for piece in pieces if piece] == ["x", "y"]
    assert engine.cancelled == []


async def test_a_run_that_cannot_begin_takes_nothing() -> None:
    """The first of two requests ran on after the second was refused."""

    class Choosy(Told):
        def submit(self, request: Request, listener: Callable[[Delta], None]) -> None:
            if request.id == "b":
                raise EngineError("no")

    engine: Any = Choosy([])

    with pytest.raises(EngineError, match="no"):
        async with EngineStream(engine, [request("a"), request("b")], DeltaMailbox(), Metrics("told")):
            pass
    assert "a" in engine.cancelled


def test_what_one_stream_cannot_take_in_reaches_the_others() -> None:
    """A mistake over one stream's message left those of all others undelivered; a loop that had ended, for ever."""
    told, mail = list[tuple[str, int]](), DeltaMailbox()

    def receive(delta: Delta) -> None:
        told.append((delta.text, delta.choice))
        if delta.text == "bad":
            raise RuntimeError("not this one")

    async def deliver(number: int, *, waits: bool) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        for name in ("bad", "good"):
            stream: Any = SimpleNamespace(receive=receive)
            mail.post(loop, stream, Delta("a", number, (1,), name, (), None))
        if waits:
            await asyncio.sleep(0.05)

    asyncio.run(deliver(0, waits=True))
    assert told == [("bad", 0), ("good", 0)]
    asyncio.run(deliver(1, waits=False))  # ends before it is told
    asyncio.run(deliver(2, waits=True))
    assert ("good", 2) in told


async def test_a_whole_answer_wakes_its_request_once() -> None:
    """Every step of every answer woke a coroutine that had nothing to do before the last one."""
    woken: list[int] = []

    class Counting(EngineStream):
        async def next_deltas(self, timeout_s: float | None = None) -> dict[Any, list[Delta]]:
            found = await super().next_deltas(timeout_s)
            woken.append(len(found["a", 0]))
            return found

    engine: Any = Told([*[delta("x") for _ in range(9)], delta("y", FinishReason.STOP)], wait_s=0.005)

    async with Counting(engine, [request("a")], DeltaMailbox(), Metrics("told")) as run:
        (completion,) = await run.completions()
    assert completion.text == "x" * 9 + "y" and woken == [10]


async def test_a_step_of_64_answers_wakes_their_loop_once() -> None:
    """Each answer's words took the interpreter's lock from the engine, 64 times a step."""
    calls, told = [0], list[int]()
    loop, mail = asyncio.get_running_loop(), DeltaMailbox()
    wake = loop.call_soon_threadsafe

    def counted(*args: Any) -> asyncio.Handle:
        calls[0] += 1
        return wake(*args)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
    for number in range(64):
        stream: Any = SimpleNamespace(receive=lambda _, number=number: told.append(number))
        mail.post(loop, stream, delta("x"))
    while len(told) < 64:
        await asyncio.sleep(0)
    assert told == list(range(64)) and calls == [1]


def test_chats_at_once_share_one_call_of_encoder_and_index(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen questions were encoded and searched for one after the other, each behind fifteen others."""
    encode, sizes, first = LetterEncoder.encode, list[int](), threading.Event()
    encoding = service.backend.retriever._retriever._batcher._encoding  # type: ignore[attr-defined]

    def counted(encoder: LetterEncoder, texts: Sequence[str], kind: Any = "document") -> Any:
        sizes.append(len(texts))
        first.set()
        until(lambda: len(sizes) > 1 or sum(map(len, list(encoding._waiting.values()))) == 15)
        return encode(encoder, texts, kind)

    monkeypatch.setattr(LetterEncoder, "encode", counted)

    def ask(number: int) -> str:
        messages = [{"role": "user", "content": f"Who built bridge {number}?"}]
        asked = body(messages=messages, max_tokens=2, retrieval={}, stream=True)
        with service.client() as client:
            return client.post("/v1/chat/completions", json=asked).text

    with ThreadPoolExecutor(16) as threads:
        begun = threads.submit(ask, 0)
        assert first.wait(PATIENCE_S)
        rest = list(threads.map(ask, range(1, 16)))
    assert sizes == [1, 15]
    assert all(text.endswith("data: [DONE]\n\n") and '"passages": [{' in text for text in (begun.result(), *rest))
