"""How an engine looks from the outside: everything that waits for one, in terms of `submit`, `cancel` and `close`."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from typing import Self

from ragspec.core import Completion, Delta, Request
from ragspec.engine.collect import Collector, tell
from ragspec.engine.sequence import Listener


class EngineClient(AbstractContextManager["EngineClient"]):
    """Use from any thread, and as a context manager that closes."""

    @abstractmethod
    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; the listener hears every Delta of every choice, in the engine's thread.

        Raises: InputError, PromptTooLong, EngineClosed.
        """

    @abstractmethod
    def submit_all(self, requests: SequenceOf[Request], listener: Listener) -> None:
        """All of them or, when one is refused, none."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """End a request within one step; unknown and finished ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Stop; running requests end as cancelled."""

    def generate(self, requests: SequenceOf[Request]) -> list[Completion]:
        """Run requests to their end, all at once; completions in the order of requests, then choices."""
        collector = Collector(requests)
        self.submit_all(requests, collector)
        return collector.wait()

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Deltas as they come; leaving the loop early cancels the request, unless others listen to it."""
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[Delta]()

        def hear(delta: Delta) -> None:
            tell(loop, deltas, delta)

        self.submit(request, hear)
        open_choices = len(request.choices)
        try:
            while open_choices:
                delta = await deltas.get()
                open_choices -= delta.finish_reason is not None
                yield delta
        finally:
            if open_choices:
                self.leave(request.id, hear)

    def leave(self, request_id: str, listener: Listener) -> None:
        """This listener hears no more; what nobody listens to is cancelled."""
        self.cancel(request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
