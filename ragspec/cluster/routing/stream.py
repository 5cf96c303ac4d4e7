"""The state machine of a stream: one choice of a request, on whichever replica it runs.

States: waiting -> running -> ended, and back to waiting whenever the replica of a running stream is lost. Delivered tokens stay
valid: the next attempt is the segment behind them, with the same seed, so its text continues the text of the lost one. Knows no
threads, no replicas and no Ray; a `Router` calls it under its lock.

    >>> stream = Stream(request, choice=0, listener=listener, now=now)
    >>> stream.start("r~1", now); listener(stream.receive(delta, identity, now)); stream.lose(now)
    >>> stream.start("r~2", now); stream.request()     # the request for the next attempt
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragspec.core import Delta, FinishReason, GenerationStats, Request, Segment

Listener = Callable[[Delta], None]


class OutputIdentity(NamedTuple):
    """Replicas with equal identities write the same output: the same bits, and as much context."""

    fingerprint: str
    max_context_tokens: int


@dataclass
class _Attempt:
    """Output of a stream on one replica. Seconds of the router's clock; `first_s` is 0 before the first tokens."""

    id: str
    begun_s: float
    first_s: float = 0.0
    num_first_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0

    def add(self, num_tokens: int, now: float) -> None:
        self.first_s = self.first_s or now
        self.num_first_tokens = self.num_first_tokens or num_tokens
        self.num_tokens += num_tokens
        self.num_steps += 1

    def stats(self, now: float) -> GenerationStats:
        """The statistics of an attempt without a last delta: each step sent one delta, and all its tokens but one were
        drafted."""
        first_s = self.first_s or now
        return GenerationStats(
            num_output_tokens=self.num_tokens,
            num_first_tokens=self.num_first_tokens,
            num_steps=self.num_steps,
            num_drafted=self.num_tokens - self.num_steps,
            num_accepted=self.num_tokens - self.num_steps,
            prefill_s=first_s - self.begun_s,
            decode_s=now - first_s,
        )


class Stream:
    """One choice of a request.

    `identity`: of the replica that wrote its tokens; None before the first token. `num_vain`: attempts lost in a row before any
    token. `unplaced_since_s`: since when no replica could take the waiting stream.
    """

    def __init__(self, request: Request, choice: int, listener: Listener | None, now: float) -> None:
        """`request` needs a seed, because all attempts use the same."""
        self.submitted, self.choice, self.listener = request, choice, listener
        self.output_ids: list[int] = []
        self.identity: OutputIdentity | None = None
        self.num_vain = 0
        self.unplaced_since_s: float | None = None
        self.is_ended = False
        self._stats = GenerationStats(seed=request.params.seed or 0, exactness=request.speculation.exactness)
        self._waiting_since_s = now
        self._attempt: _Attempt | None = None

    @property
    def attempt_id(self) -> str:
        """The id of the running attempt; empty while the stream waits."""
        return self._attempt.id if self._attempt else ""

    def fits(self, identity: OutputIdentity) -> bool:
        """Whether a replica of this identity may continue it."""
        return self.identity is None or self.identity == identity

    def start(self, attempt_id: str, now: float) -> None:
        """waiting -> running."""
        assert self._attempt is None and not self.is_ended
        self._stats.queue_s += now - self._waiting_since_s
        self._attempt = _Attempt(attempt_id, now)
        self.unplaced_since_s = None

    def request(self) -> Request:
        """The request as the replica of the running attempt gets it: the part behind the delivered tokens."""
        segment, num_delivered = self.submitted.segment, len(self.output_ids)
        choice = self.choice if self.submitted.params.n > 1 else segment.choice
        written = (*segment.output_ids, *self.output_ids)
        remaining = Segment(written, segment.end, segment.draft_ids[num_delivered:], choice)
        return replace(self.submitted, id=self.attempt_id, segment=remaining)

    def receive(self, delta: Delta, identity: OutputIdentity, now: float) -> Delta:
        """A delta of the running attempt, as the listener gets it. The last delta ends the stream and carries the statistics of
        all attempts."""
        assert self._attempt is not None
        if delta.token_ids:
            self._attempt.add(len(delta.token_ids), now)
            self.output_ids += delta.token_ids
            self.identity = identity
        stats = None
        if delta.finish_reason is not None:
            stats = self._end(delta.stats or self._attempt.stats(now))
        return replace(delta, request_id=self.submitted.id, stats=stats)

    def lose(self, now: float) -> None:
        """running -> waiting: the replica is lost."""
        assert self._attempt is not None
        self.num_vain = 0 if self._attempt.num_tokens else self.num_vain + 1
        self._add(replace(self._attempt.stats(now), num_replays=1))
        self._attempt, self._waiting_since_s = None, now

    def end(self, reason: FinishReason, error: str, now: float) -> Delta:
        """waiting or running -> ended, by the router. Gives the last delta."""
        stats = self._end(self._attempt.stats(now) if self._attempt else GenerationStats())
        return Delta(self.submitted.id, self.choice, (), "", (), reason, stats, error)

    def _end(self, last: GenerationStats) -> GenerationStats:
        self._add(last)
        self._stats.system_fingerprint = self.identity.fingerprint if self.identity else last.system_fingerprint
        self._attempt, self.is_ended = None, True
        return self._stats

    def _add(self, stats: GenerationStats) -> None:
        self._stats.add(replace(stats, seed=self._stats.seed))
