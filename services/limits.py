"""Every limit on a request, the counts of the last minute, and the checks of bodies.

Limits that a file of settings can change stand in `services.settings`, fixed ones here or where the last rows say:

    limit                                      unit            name                                        refused with
    ------------------------------------------------------------------------------------------------------------------------
    head of a request                          bytes           HEADER_BYTES                                431, or 400
    time to send the head                      s               HEADER_S                                   closed connection
    body                                       bytes           limits.body_bytes                           413
    time to send the body                      s               timeouts.client_s                           408
    bodies above INLINE_BYTES, of a key        bytes/s         LARGE_BYTES_PER_S, LARGE_BURST_S            nothing: read slowly
    nesting of JSON                            levels          MAX_JSON_DEPTH                              400
    lists, objects and items of JSON; keys     1               MAX_JSON_ITEMS; MAX_JSON_KEYS               413
    fields of a form or query string           1               MAX_FORM_FIELDS                             400
    forms without a key, being read            requests        MAX_ANONYMOUS_FORMS, MAX_FORMS_PER_NETWORK  429
    connections; of one network                connections     limits.connections, .address_connections    closed connection
    requests at once, over all keys            requests        limits.max_in_flight                        429
    choices at once, of a key                  choices         limits.key.concurrency                      429; 400 if never
    requests of a key                          1/min           limits.key.requests_per_minute              429
    tokens of a key, prompts and answers       1/min           limits.key.tokens_per_minute                429; 400 if never
    refusals of a key or network               1/s             PROMPT_REFUSALS                             delay of BUSY_S
    whole answer                               s               timeouts.request_s                          504
    time to read what was sent                 s               timeouts.client_s                           closed connection
    unsent tokens of a stream                  tokens          openai.generation.MAX_WAITING_TOKENS        closed connection
    messages, choices, stops, prompts, ...     1               openai.types.MAX_*                          400
    text to correct                            characters      grammar.max_text_chars                      413
    time to correct it                         s               grammar.timeout_s                           rest uncorrected
    stored bytes of a tenant                   bytes           stores.records.MAX_BYTES_PER_TENANT,        507
                                                               rag.chat.conversations.MAX_BYTES_PER_TENANT
    text, rows and time of one uploaded file   bytes, 1, s     bounded_reader.ReadLimits                   failed file

Owns the counts of the last minute. Never queues: a request over a limit is refused at once, with the time to retry after. Queues
are the engine's. `RateLimiter` runs in one event loop, so there is no lock.

    >>> with rate_limiter.admit(caller):                                             # the gateway, around the request
    ...     reservation = rate_limiter.reserve(caller, num_prompt_tokens=812, max_tokens=96)     # a route, before it generates
    ...     reservation.used(812 + 40)
"""

import asyncio
import ipaddress
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn
from urllib.parse import parse_qs

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from services.errors import ApiError
from services.keys import Caller
from services.metrics import Metrics
from services.settings import KeyLimits, Limits

INLINE_BYTES = 2**17
"""Larger bodies are checked in a thread, so that the event loop goes on streaming other answers."""
LARGE_BYTES_PER_S = 4 * 2**20
"""Rate at which the large bodies of a key are read. Reading and checking a megabyte keeps the interpreter from the engine for
about six milliseconds."""
LARGE_BURST_S = 2.5
"""A key that was silent this long may send the bytes of this time at once."""
HEADER_S, HEADER_BYTES = 10.0, 16 * 2**10
MAX_JSON_DEPTH, MAX_JSON_ITEMS, MAX_JSON_KEYS = 64, 250_000, 32_768
"""Keys of all objects of a body. Why so few: validation makes an error of every unknown key."""
MAX_FORM_FIELDS = 64
MAX_ANONYMOUS_FORMS = 64
"""Forms read at once whose key is not known yet."""
MAX_FORMS_PER_NETWORK = 8
"""The same, from one network."""
PROMPT_REFUSALS = 8
"""After so many refusals of a key, or of a network without one, within `BUSY_S`, each further refusal is delayed by `BUSY_S`."""
BUSY_S = 1.0
"""Time to retry after, of a key that runs too much at once."""
OVERLOADED_S = 2.0
"""Time to retry after, of a service that runs too much at once."""

_MINUTE_S = 60.0
_MAX_KEYS = 10_000
"""Idle keys are forgotten above this number."""


def network_of(peer: Sequence[Any] | None) -> str:
    """The network that a connection counts for: an IPv4 address, or 64 bits of an IPv6 address, since a client owns so many."""
    host = str(peer[0]) if peer else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address) if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


class TokenReservation:
    """The tokens that one request takes from its key's minute."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def used(self, num_tokens: int) -> None:
        """Returns the tokens that were reserved and not used."""
        self.num_tokens = min(self.num_tokens, max(0, num_tokens))


class LargeBodies:
    """The large bodies of one key. `checking`: held while one of them is checked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.checking = asyncio.Lock()
        self._clock, self._paid_s = clock, -math.inf  # when all bytes so far are within the rate

    def wait_s(self, num_bytes: int) -> float:
        """Counts bytes that were read; seconds until the next may be."""
        now_s = self._clock()
        self._paid_s = max(self._paid_s, now_s - LARGE_BURST_S) + num_bytes / LARGE_BYTES_PER_S
        return max(0.0, self._paid_s - now_s)

    @property
    def is_idle(self) -> bool:
        return self._paid_s <= self._clock()


class _KeyUsage:
    """One key's requests and tokens in the last minute, by the time they began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.running = 0
        self.large_bodies = LargeBodies(clock)
        self.refusals_s: deque[float] = deque(maxlen=PROMPT_REFUSALS)
        self.requests_s: deque[float] = deque()
        self.reservations: deque[tuple[float, TokenReservation]] = deque()

    def expire(self, now_s: float) -> None:
        while self.requests_s and self.requests_s[0] <= now_s - _MINUTE_S:
            self.requests_s.popleft()
        while self.reservations and self.reservations[0][0] <= now_s - _MINUTE_S:
            self.reservations.popleft()

    @property
    def is_idle(self) -> bool:
        return self.large_bodies.is_idle and not (self.running or self.requests_s or self.reservations)


class RateLimiter:
    """States: open -> draining (running requests may end, new ones are refused)."""

    def __init__(self, limits: Limits, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._metrics, self._clock = limits, metrics, clock
        self._usage: dict[str, _KeyUsage] = {}
        self._request_ended = asyncio.Event()
        self.running = 0
        self.draining = False

    @property
    def num_keys(self) -> int:
        """Keys, and networks without one, whose last minute is remembered."""
        return len(self._usage)

    @contextmanager
    def admit(self, caller: Caller) -> Iterator[None]:
        """Counts one request while it runs. Raises: ApiError 429 or, when draining, 503."""
        usage, limits = self._usage_of(caller.key_id), self._limits_of(caller)
        if self.draining:
            self._metrics.rejected("draining")
            raise ApiError(503, "the service is shutting down", code="shutting_down", retry_after_s=OVERLOADED_S)
        if self.running >= self._limits.max_in_flight:
            self._refuse("queue", "too many requests at once, over all keys", OVERLOADED_S, code="server_overloaded")
        if limits.concurrency is not None and usage.running >= limits.concurrency:
            self._refuse("concurrency", f"more than {limits.concurrency} requests of this key at once", BUSY_S)
        if limits.requests_per_minute is not None:
            now_s = self._clock()
            if len(usage.requests_s) >= limits.requests_per_minute:
                wait_s = usage.requests_s[0] + _MINUTE_S - now_s
                self._refuse("requests", f"more than {limits.requests_per_minute} requests a minute", wait_s)
            usage.requests_s.append(now_s)
        self.running += 1
        usage.running += 1
        try:
            yield
        finally:
            self.running -= 1
            usage.running -= 1
            self._request_ended.set()

    def large_bodies(self, name: str) -> LargeBodies:
        """The large bodies of a key, or of a network whose clients send none."""
        return self._usage_of(name).large_bodies

    def refusal_wait_s(self, name: str) -> float:
        """Counts a refusal; seconds to keep it back. Why: a client that asks again at once costs others more than it is worth."""
        refusals_s, now_s = self._usage_of(name).refusals_s, self._clock()
        is_many = len(refusals_s) == PROMPT_REFUSALS and refusals_s[0] > now_s - BUSY_S
        refusals_s.append(now_s)
        return BUSY_S if is_many else 0.0

    @contextmanager
    def choices(self, caller: Caller, num_choices: int) -> Iterator[None]:
        """Counts every choice of an admitted request as a request of its key while they run.

        Raises: ApiError 429, or 400 if there are more than the key may ever run.
        """
        usage, most, more = self._usage_of(caller.key_id), self._limits_of(caller).concurrency, num_choices - 1
        if most is not None and num_choices > most:
            raise ApiError(400, f"{num_choices} choices are asked for, of {most} at once", code="concurrency_exceeded")
        if most is not None and more and usage.running + more > most:
            self._refuse("concurrency", f"more than {most} choices of this key at once", BUSY_S)
        usage.running += more
        try:
            yield
        finally:
            usage.running -= more

    def reserve(self, caller: Caller, num_prompt_tokens: int, max_tokens: int) -> TokenReservation:
        """Reserves the most tokens that an answer may take.

        Raises: ApiError 429, or 400 if the key's minute has fewer tokens in all.
        """
        reservation = TokenReservation(num_prompt_tokens + max_tokens)
        max_per_minute = self._limits_of(caller).tokens_per_minute
        if max_per_minute is None:
            return reservation
        needed, now_s = reservation.num_tokens, self._clock()
        if needed > max_per_minute:
            reason = f"prompt and max_tokens are {needed} tokens, of {max_per_minute} a minute"
            raise ApiError(400, reason, code="tokens_exceeded")
        reservations = self._usage_of(caller.key_id).reservations
        free, wait_s = max_per_minute - sum(each.num_tokens for _, each in reservations), 0.0
        for begin_s, earlier in reservations:
            if free >= needed:
                break
            free, wait_s = free + earlier.num_tokens, begin_s + _MINUTE_S - now_s
        if wait_s:
            self._refuse("tokens", f"more than {max_per_minute} tokens a minute", wait_s, type="tokens")
        reservations.append((now_s, reservation))
        return reservation

    async def drained(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for running ones. Returns whether all of them ended."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.running:
                    self._request_ended.clear()
                    await self._request_ended.wait()
        return not self.running

    def _refuse(self, reason: str, message: str, wait_s: float, *, code: str | None = None, type: str = "") -> NoReturn:
        self._metrics.rejected(reason)
        raise ApiError(429, message, type=type, code=code, retry_after_s=wait_s)

    def _limits_of(self, caller: Caller) -> KeyLimits:
        return caller.limits.over(self._limits.key) if caller.limits else self._limits.key

    def _usage_of(self, name: str) -> _KeyUsage:
        now_s = self._clock()
        if len(self._usage) > _MAX_KEYS:
            for usage in self._usage.values():
                usage.expire(now_s)
            self._usage = {name: usage for name, usage in self._usage.items() if not usage.is_idle}
        if name not in self._usage:
            self._usage[name] = _KeyUsage(self._clock)
        own = self._usage[name]
        own.expire(now_s)
        return own


def form_fields(raw: bytes) -> dict[str, list[str]]:
    """The fields of a form or a query string. Raises: ApiError 400."""
    try:
        return parse_qs(raw.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS, errors="strict")
    except ValueError:
        raise ApiError(400, f"the form is not UTF-8, or has more than {MAX_FORM_FIELDS} fields") from None


async def read_form(raw: bytes) -> dict[str, list[str]]:
    """As `form_fields`; large forms are read in a thread."""
    return await asyncio.to_thread(form_fields, raw) if len(raw) > INLINE_BYTES else form_fields(raw)


def check_num_items(body: bytes, max_items: int) -> None:
    """Refuses JSON with too many lists, objects and items, or too many keys, without parsing it. Raises: ApiError 413.

    Why: a few megabytes of empty lists become gigabytes of objects.
    """
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the only quotation marks left are the ends of strings
    if pieces.count(b'"') <= 2 * (max_items + MAX_JSON_KEYS):
        outside = b"".join(pieces.split(b'"')[::2])
        num_items = sum(map(outside.count, (b",", b"[", b"{")))
        if num_items <= max_items and outside.count(b":") <= MAX_JSON_KEYS:
            return
    raise ApiError(413, f"the body holds more than {max_items} items, or more than {MAX_JSON_KEYS} keys")


class RequestBody(BaseModel):
    """Base class of request bodies and of the objects in them. Unknown fields are errors. A null field counts as absent, unless
    the field is required.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in required}


def at_most(max_items: int) -> BeforeValidator:
    """Refuses a longer list or object before its items are validated: each of them might add an error."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > max_items:
            raise PydanticCustomError("too_long", "at most {limit} items are allowed", {"limit": max_items})
        return value

    return BeforeValidator(check)


def check_json(body: bytes) -> None:
    """Refuses JSON that is unsafe to pass on.

    Raises: ApiError 413 if it has too many items; 400 if it is not UTF-8 or not JSON (NaN and Infinity are not), is nested too
    deep, or has a string with a NUL character or half a surrogate pair.
    """
    check_num_items(body, MAX_JSON_ITEMS)
    try:
        value = _STRICT_JSON.decode(body.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise ApiError(400, f"the body is not UTF-8: byte {cause.start}") from None
    except RecursionError:
        raise ApiError(400, f"the body is nested more than {MAX_JSON_DEPTH} deep") from None
    except json.JSONDecodeError as cause:
        raise ApiError(400, f"the body is not JSON: {cause.msg} at character {cause.pos}") from None
    except ValueError as cause:  # a number of thousands of digits
        raise ApiError(400, f"the body is not JSON: {cause}") from None
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_JSON_DEPTH} deep")
        children: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_string(each)
            elif isinstance(each, dict):
                children += [*each.keys(), *each.values()]
            elif isinstance(each, list):
                children += each
        level, depth = children, depth + 1


def _check_string(text: str) -> None:
    try:
        has_nul = b"\0" in text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "a string of the body holds half a surrogate pair") from None
    if has_nul:
        raise ApiError(400, "a string of the body holds a NUL character")


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not JSON: {name} is no number")


_STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
