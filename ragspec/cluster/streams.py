"""What a router keeps of a request, so that it can go on on another replica as if nothing had happened.

A choice is written in parts, one after another, each by one replica. A part that was lost with its replica counts as far as it
was told: its tokens are decided, and the next part is the segment behind them, under the same key. Nothing here knows of threads
or connections.

    >>> stream = Stream(request, choice=0)
    >>> stream.begin(now); listener(stream.hear(delta, identity, now)); stream.lose(now)
    >>> replace(request, segment=stream.rest())     # what is still to be written
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ragspec.core import Delta, FinishReason, GenerationStats, Request, Segment
from ragspec.numerics.noise import random_seed

Listener = Callable[[Delta], None]


class Identity(NamedTuple):
    """Replicas of equal ones write the same output: the same bits, and as much context."""

    fingerprint: str
    max_context_tokens: int


@dataclass
class _Part:
    """What was heard of a part. Seconds of the router's clock; `first_s` is 0 before its first tokens."""

    begun_s: float
    first_s: float = 0.0
    num_first_tokens: int = 0
    num_tokens: int = 0
    num_steps: int = 0

    def stats(self, now: float) -> GenerationStats:
        """Each step told one delta, and all its tokens but one had been drafted."""
        first_s = self.first_s or now
        return GenerationStats(
            num_output_tokens=self.num_tokens,
            num_first_tokens=self.num_first_tokens,
            num_steps=self.num_steps,
            num_drafted=self.num_tokens - self.num_steps,
            num_accepted=self.num_tokens - self.num_steps,
            num_replays=1,
            prefill_s=first_s - self.begun_s,
            decode_s=now - first_s,
        )


class Stream:
    """One choice of a request. `identity`: of what its tokens come from; None before the first.

    `num_vain`: parts lost in a row that had told nothing.
    """

    def __init__(self, request: Request, choice: int, now: float) -> None:
        self._request, self.choice = request, choice
        self.output_ids: list[int] = []
        self.identity: Identity | None = None
        self.ended = False
        self.num_vain = 0
        self._stats = GenerationStats(seed=request.params.seed or 0, exactness=request.speculation.exactness)
        self._fingerprints: list[str] = []
        self._waiting_s = now
        self._part: _Part | None = None

    def begin(self, now: float) -> None:
        """A part is sent to a replica."""
        self._stats.queue_s += now - self._waiting_s
        self._part = _Part(now)

    def hear(self, delta: Delta, identity: Identity, now: float) -> Delta:
        """What the listener hears of a part's delta; the last one has the statistics of all parts."""
        assert self._part is not None and not self.ended
        part = self._part
        if delta.token_ids:
            part.first_s = part.first_s or now
            part.num_first_tokens = part.num_first_tokens or len(delta.token_ids)
            part.num_tokens += len(delta.token_ids)
            part.num_steps += 1
            self.output_ids += delta.token_ids
            self._note(identity)
        if delta.finish_reason is None:
            return replace(delta, request_id=self._request.id)
        self.ended = True
        return replace(delta, request_id=self._request.id, stats=self._total(delta.stats or part.stats(now)))

    def lose(self, now: float) -> None:
        """The part that was being written is lost, beyond what was heard of it."""
        assert self._part is not None
        self.num_vain = 0 if self._part.num_tokens else self.num_vain + 1
        self._add(self._part.stats(now))
        self._waiting_s, self._part = now, None

    def end(self, reason: FinishReason, error: str, now: float) -> Delta:
        """No more of it: the delta that says so."""
        self.ended = True
        lost = GenerationStats() if self._part is None else replace(self._part.stats(now), num_replays=0)
        return Delta(self._request.id, self.choice, (), "", (), reason, self._total(lost), error)

    def rest(self) -> Segment:
        """What is still to be written: behind what was told, up to the same end."""
        segment, num_told = self._request.segment, len(self.output_ids)
        return Segment(
            (*segment.output_ids, *self.output_ids),
            segment.end,
            segment.draft_ids[num_told:],
            self.choice if self._request.params.n > 1 else segment.choice,
        )

    def _note(self, identity: Identity) -> None:
        """A part under other numerics than those before it: the output is not what one replica would have written."""
        self.identity = identity
        if identity.fingerprint not in self._fingerprints:
            self._fingerprints.append(identity.fingerprint)

    def _add(self, part: GenerationStats) -> None:
        self._stats.add(replace(part, seed=self._stats.seed, system_fingerprint=""))

    def _total(self, last: GenerationStats) -> GenerationStats:
        self._add(last)
        self._stats.system_fingerprint = "+".join(self._fingerprints) or last.system_fingerprint
        if len(self._fingerprints) > 1:
            self._stats.exactness = "none"
        return self._stats


@dataclass(eq=False)
class Ear:
    """A listener to one request; a deaf one raised and hears nothing more."""

    listener: Listener
    deaf: bool = False


@dataclass(eq=False)
class Ticket:
    """A request that was accepted. `told`: everything that its listeners heard, in order."""

    request: Request
    digest: bytes
    ears: list[Ear]
    streams: dict[int, Stream]
    told: list[Delta] = field(default_factory=list)
    may_be_remembered: bool = True
    num_chars: int = 0

    @classmethod
    def of(cls, request: Request, listener: Listener, now: float) -> Ticket:
        """A seed that was not given is drawn here: every part is written with the same."""
        content = _content(request)
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=random_seed()))
        streams = {choice: Stream(request, choice, now) for choice in request.choices}
        return cls(request, _digest(content), [Ear(listener)], streams, num_chars=len(content))

    @property
    def ended(self) -> bool:
        return all(stream.ended for stream in self.streams.values())


def put_together(deltas: Iterable[Delta]) -> list[Delta]:
    """One for each choice, in place of one for each step."""
    parts: dict[int, list[Delta]] = {}
    for delta in deltas:
        parts.setdefault(delta.choice, []).append(delta)
    return [
        replace(
            told[-1],
            token_ids=tuple(token for delta in told for token in delta.token_ids),
            text="".join(delta.text for delta in told),
            logprobs=tuple(logprob for delta in told for logprob in delta.logprobs),
        )
        for told in parts.values()
    ]


def digest_of(request: Request) -> bytes:
    """Equal for requests that ask for the same, whatever their id. The seed counts as it was given."""
    return _digest(_content(request))


def _content(request: Request) -> bytes:
    params = request.params
    params = replace(params, logit_bias=dict(sorted(params.logit_bias.items())))
    content = (request.prompt_ids, params, request.sources, request.salt, request.speculation, request.segment)
    return repr(content).encode("utf-8", "surrogatepass")


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
