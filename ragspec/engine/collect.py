"""Deltas back into completions, for callers that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ragspec.core import Completion, Delta, FinishReason, GenerationStats, Request
from ragspec.errors import Cancelled, EngineError, ReplicaLost


class Collector:
    """A listener that gathers every choice of some requests; `wait` returns them in order."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._order = [(r.id, choice) for r in requests for choice in r.choices]
        self._parts: dict[tuple[str, int], list[Delta]] = {key: [] for key in self._order}
        self._open = len(self._order)
        self._done = threading.Event()
        if not self._open:
            self._done.set()

    def __call__(self, delta: Delta) -> None:
        self._parts[delta.request_id, delta.choice].append(delta)
        if delta.finish_reason is not None:
            self._open -= 1
            if not self._open:
                self._done.set()

    def wait(self) -> list[Completion]:
        """Raises: EngineError when one of them failed, ReplicaLost when nothing can go on with it, Cancelled when the engine was
        closed."""
        self._done.wait()
        return [join(self._parts[key]) for key in self._order]


def tell(loop: asyncio.AbstractEventLoop, deltas: asyncio.Queue[Delta], delta: Delta) -> None:
    """Pass a delta from the engine's thread to a coroutine's loop, if that still runs."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(deltas.put_nowait, delta)


def settle(done: Future[None], call: Callable[[], None]) -> None:
    """Run `call`; its exception belongs to whoever waits for `done`."""
    try:
        call()
        done.set_result(None)
    except BaseException as error:
        done.set_exception(error)


def join(deltas: Sequence[Delta]) -> Completion:
    """The completion that one choice's deltas add up to. Raises: EngineError, ReplicaLost, Cancelled."""
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
    )
