"""How much: requests at once of all keys, and for each key requests a minute, requests at once, and tokens a minute.

    >>> with gate.request(caller):                          # by the guard, around everything
    ...     async with gate.enter(caller, num_prompt_tokens=812, max_tokens=96) as tokens:   # by a route, once it knows
    ...         tokens.used(812 + 40)

Nobody waits here: a request that is too much is refused at once, with the time after which it may be taken. What waits for its
turn waits in the engine, where it costs a few hundred bytes. Everything runs in one event loop, so there is no lock.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

from services.errors import ApiError
from services.keys import Caller
from services.metrics import Metrics
from services.settings import KeyLimits, Limits

_MINUTE_S = 60.0
_OVERLOADED_S = 2.0
_BUSY_S = 1.0
_MAX_KEYS = 10_000


class Tokens:
    """What one request took of its key's tokens: reserved at first, then what it used."""

    def __init__(self, reserved: int) -> None:
        self.count = reserved

    def used(self, num_tokens: int) -> None:
        """Never more than was reserved: what a minute holds was promised."""
        self.count = min(self.count, max(0, num_tokens))


class _Use:
    """One key's last minute."""

    def __init__(self) -> None:
        self.running = 0
        self.begun: deque[float] = deque()  # when requests began
        self.taken: deque[tuple[float, Tokens]] = deque()

    def forget(self, now: float) -> None:
        while self.begun and self.begun[0] <= now - _MINUTE_S:
            self.begun.popleft()
        while self.taken and self.taken[0][0] <= now - _MINUTE_S:
            self.taken.popleft()

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.begun or self.taken)


class Gate:
    """States: open -> draining (what runs may end, nothing more is taken)."""

    def __init__(self, limits: Limits, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._metrics, self._clock = limits, metrics, clock
        self._uses: dict[str, _Use] = {}
        self._running = 0
        self._changed = asyncio.Event()
        self.draining = False

    @property
    def running(self) -> int:
        return self._running

    @contextmanager
    def request(self, caller: Caller) -> Iterator[None]:
        """Counts one request while it runs. Raises: ApiError 429 or, when draining, 503."""
        use, limits, now = self._use(caller), self._of(caller), self._clock()
        if self.draining:
            self._metrics.rejected("draining")
            raise ApiError(503, "the service is shutting down", code="shutting_down", retry_after_s=_OVERLOADED_S)
        if self._running >= self._limits.max_in_flight:
            self._refuse(
                "queue", "too many requests at once, of everybody together", _OVERLOADED_S, "server_overloaded"
            )
        if limits.concurrency is not None and use.running >= limits.concurrency:
            self._refuse("concurrency", f"more than {limits.concurrency} requests of this key at once", _BUSY_S)
        if limits.requests_per_minute is not None:
            if len(use.begun) >= limits.requests_per_minute:
                wait_s = use.begun[0] + _MINUTE_S - now
                self._refuse("requests", f"more than {limits.requests_per_minute} requests a minute", wait_s)
            use.begun.append(now)
        self._running += 1
        use.running += 1
        try:
            yield
        finally:
            self._running -= 1
            use.running -= 1
            self._changed.set()

    @asynccontextmanager
    async def enter(self, caller: Caller, num_prompt_tokens: int, max_tokens: int) -> AsyncIterator[Tokens]:
        """Reserves what an answer may take; at its end the key has back what it did not.

        Raises: ApiError 429, or 400 for more than a minute holds.
        """
        tokens, most = Tokens(num_prompt_tokens + max_tokens), self._of(caller).tokens_per_minute
        if most is not None:
            self._reserve(self._use(caller), tokens, most)
        yield tokens

    async def drained(self, timeout_s: float) -> bool:
        """Take nothing more, and wait for what runs. Whether all of it ended."""
        self.draining = True
        deadline = self._clock() + timeout_s
        while self._running:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - self._clock()))
            except TimeoutError:
                return not self._running
        return True

    def _reserve(self, use: _Use, tokens: Tokens, most: int) -> None:
        if tokens.count > most:
            raise ApiError(
                400, f"prompt and max_tokens are {tokens.count} tokens, of {most} a minute", code="tokens_exceeded"
            )
        now = self._clock()
        use.forget(now)
        free, wait_s = most - sum(taken.count for _, taken in use.taken), 0.0
        for begun, taken in use.taken:
            if free >= tokens.count:
                break
            free, wait_s = free + taken.count, begun + _MINUTE_S - now
        if wait_s:
            self._refuse("tokens", f"more than {most} tokens a minute", wait_s, type="tokens")
        use.taken.append((now, tokens))

    def _refuse(self, why: str, message: str, wait_s: float, code: str | None = None, type: str = "") -> NoReturn:
        self._metrics.rejected(why)
        raise ApiError(429, message, type=type, code=code, retry_after_s=wait_s)

    def _of(self, caller: Caller) -> KeyLimits:
        return caller.limits or self._limits.key

    def _use(self, caller: Caller) -> _Use:
        now = self._clock()
        if len(self._uses) > _MAX_KEYS:
            for use in self._uses.values():
                use.forget(now)
            self._uses = {name: use for name, use in self._uses.items() if not use.is_idle}
        use = self._uses.setdefault(caller.key_id, _Use())
        use.forget(now)
        return use
