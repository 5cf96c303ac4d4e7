"""Both sides of an engine's door: the interface that callers use, and the queue of calls that the engine's thread runs.

`EngineClient` is what a local engine and a router to engines elsewhere have in common. Computes nothing.

    >>> completions = client.generate([request])
    >>> async for delta in client.stream(request): ...
"""

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Self

from ragspec.core import Completion, Delta, FinishReason, GenerationStats, Request
from ragspec.engine.sequence import Listener
from ragspec.errors import Cancelled, EngineError, ReplicaLost

log = logging.getLogger(__name__)


class EngineClient(ABC):
    """Thread-safe; as a context manager it closes itself."""

    @abstractmethod
    def submit_all(self, requests: SequenceOf[Request], listener: Listener) -> None:
        """Queue all requests; if one is refused, none is queued.

        The engine's thread calls the listener with every Delta of every choice. Raises: InputError, PromptTooLong, EngineClosed.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """End a request within one step. Unknown and finished requests are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Stop; running requests end as cancelled."""

    def submit(self, request: Request, listener: Listener) -> None:
        """As `submit_all`, for one request."""
        self.submit_all([request], listener)

    def generate(self, requests: SequenceOf[Request]) -> list[Completion]:
        """Run all requests together to their end. Completions come in the order of requests, then of choices."""
        collector = Collector(requests)
        self.submit_all(requests, collector)
        return collector.wait()

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Deltas as they come. Leaving the loop early cancels the request, unless it has other listeners."""
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[Delta]()

        def listener(delta: Delta) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        self.submit(request, listener)
        num_open = len(request.choices)
        try:
            while num_open:
                delta = await deltas.get()
                num_open -= delta.finish_reason is not None
                yield delta
        finally:
            if num_open:
                self.leave(request.id, listener)

    def leave(self, request_id: str, listener: Listener) -> None:
        """Remove one listener. A request without listeners is cancelled."""
        self.cancel(request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Collector:
    """A listener that collects the deltas of every choice of some requests."""

    def __init__(self, requests: SequenceOf[Request]) -> None:
        self._order = [(r.id, choice) for r in requests for choice in r.choices]
        self._deltas: dict[tuple[str, int], list[Delta]] = {key: [] for key in self._order}
        self._num_open = len(self._order)
        self._done = threading.Event()
        if not self._num_open:
            self._done.set()

    def __call__(self, delta: Delta) -> None:
        self._deltas[delta.request_id, delta.choice].append(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._done.set()

    def wait(self) -> list[Completion]:
        """Completions in order. Raises: as `completion_of`, for the first request that failed."""
        self._done.wait()
        return [completion_of(self._deltas[key]) for key in self._order]


def completion_of(deltas: SequenceOf[Delta]) -> Completion:
    """The completion that all deltas of one choice add up to.

    Raises: EngineError if the request failed, ReplicaLost if its replica is lost, Cancelled.
    """
    last = deltas[-1]
    if last.finish_reason is FinishReason.LOST:
        raise ReplicaLost(f"request {last.request_id} is lost: {last.error}")
    if last.finish_reason is FinishReason.ERROR:
        raise EngineError(f"request {last.request_id} failed: {last.error}")
    if last.finish_reason is FinishReason.CANCELLED:
        raise Cancelled(f"request {last.request_id} was cancelled")
    assert last.finish_reason is not None
    return Completion(
        last.request_id,
        last.choice,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        last.finish_reason,
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
        last.stats or GenerationStats(),
        last.attention,
    )


@contextmanager
def logged_errors(message: str) -> Iterator[None]:
    """Log an exception instead of raising it."""
    try:
        yield
    except Exception:
        log.exception(message)


class CommandQueue:
    """Calls from other threads, run by the engine's thread in order of arrival.

    While the engine is idle, `heartbeat` runs every `interval_s` seconds; with None the thread sleeps until the next call.
    """

    def __init__(self, heartbeat: Callable[[], None], interval_s: float | None) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._heartbeat, self._interval_s = heartbeat, interval_s
        self._due = 0.0

    def put(self, call: Callable[[], None]) -> None:
        self._queue.put(call)

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Queue a call that somebody waits for: an error of the call is set in the future."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                call()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self.put(run)
        return done

    def end(self) -> None:
        """Calls that are put after this one are not run."""
        self._queue.put(None)

    def run(self, idle: Callable[[], bool]) -> bool:
        """Run all queued calls; while the engine is idle, wait for the next call. False: the queue has ended.

        A call that raises is logged. Raises: errors of the heartbeat.
        """
        while True:
            waits = idle()
            try:
                call = self._queue.get(waits, self._until_heartbeat() if waits else None)
            except queue.Empty:
                if not waits:
                    return True
                continue
            if call is None:
                return False
            with logged_errors("a command to the engine failed"):
                call()

    def _until_heartbeat(self) -> float | None:
        """Seconds until the next heartbeat; runs a heartbeat that is due."""
        if self._interval_s is None:
            return None
        if time.monotonic() >= self._due:
            self._heartbeat()
            self._due = time.monotonic() + self._interval_s
        return max(0.0, self._due - time.monotonic())
