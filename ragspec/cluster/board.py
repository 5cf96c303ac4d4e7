"""What a router decides, without its threads: what runs where, what waits, and what becomes of what a lost replica was at.

A request is sent as one leg, all choices together. A leg ends with its choices or is lost with its link; then every choice that
has not ended is a leg of its own, behind what was told of it. Legs have ids of their own, never used twice, so what an earlier
leg still says is known by its id and dropped. Lost legs go before new requests; new ones are first come, first served.

Not safe to call from several threads: a `Router` calls it under its lock. Nothing here waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ragspec.cluster.affinity import choose, key_of
from ragspec.cluster.links import Link
from ragspec.cluster.remembered import Remembered
from ragspec.cluster.routing import RoutingConfig
from ragspec.cluster.streams import Ear, Identity, Listener, Stream, Ticket, digest_of
from ragspec.core import Delta, FinishReason, Request
from ragspec.engine.admission import Bounds
from ragspec.errors import InputError, Overloaded

Tell = Callable[[Ticket, Ear, Delta], None]


@dataclass(eq=False)
class Leg:
    """Some choices of a request on one replica, or on their way to one. `homeless_s`: since when there has been none for it."""

    ticket: Ticket
    streams: list[Stream]
    key: bytes | None
    id: str = ""
    link: Link | None = None
    homeless_s: float | None = None
    anywhere: bool = False

    @property
    def request(self) -> Request:
        """As it is sent."""
        request = replace(self.ticket.request, id=self.id)
        if len(self.streams) == len(self.ticket.streams) and not any(s.output_ids for s in self.streams):
            return request
        (stream,) = self.streams
        return replace(request, segment=stream.rest())

    def fits(self, identity: Identity) -> bool:
        """What has been begun goes on only where the same would be written."""
        begun = self.streams[0].identity
        return begun is None or self.anywhere or begun == identity


class Board:
    """Owns every request that has not ended, and those that are remembered."""

    def __init__(self, config: RoutingConfig, tell: Tell) -> None:
        self._config, self._tell_ear = config, tell
        self._tickets: dict[str, Ticket] = {}
        self._remembered = Remembered(config.remembered_s, config.remembered_tokens)
        self._legs: dict[str, Leg] = {}
        self._loads: dict[Link, int] = {}  # choices, of every link that is up
        self._lost: list[Leg] = []
        self._fresh: deque[Leg] = deque()
        self._num_sent = 0

    @property
    def idle(self) -> bool:
        return not self._tickets

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._loads)

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, requests: Sequence[Request], listener: Listener, bounds: Bounds) -> None:
        """All of them, or none. One that is known already is told what it said, and goes on.

        Raises: InputError, PromptTooLong, Overloaded.
        """
        if len({request.id for request in requests}) < len(requests):
            raise InputError("requests that run at once need different ids; an id comes twice")
        now = time.monotonic()
        known = {request.id: ticket for request in requests if (ticket := self._known(request, now))}
        fresh = [request for request in requests if request.id not in known]
        for request in fresh:
            bounds.limits(request)
        self._check_room(fresh)
        for ticket in known.values():
            self._join(ticket, Ear(listener))
        for request in fresh:
            ticket = self._tickets[request.id] = Ticket.of(request, listener, now)
            key = key_of(request, self._config.prefix_tokens)
            self._fresh.append(Leg(ticket, list(ticket.streams.values()), key))
        self.place()

    def cancel(self, request_id: str) -> None:
        if ticket := self._tickets.get(request_id):
            self._end_all(ticket)
            self.place()

    def cancel_all(self) -> None:
        for ticket in list(self._tickets.values()):
            self._end_all(ticket)

    def deafen(self, ticket: Ticket, ear: Ear) -> None:
        """It cannot be told any more; a request that nobody listens to is cancelled."""
        ear.deaf = True
        if all(each.deaf for each in ticket.ears) and self._tickets.get(ticket.request.id) is ticket:
            self.cancel(ticket.request.id)

    def purge(self, salt: str) -> None:
        """Remember nothing that one tenant has asked, nor what it is asking."""
        self._remembered.purge(salt)
        for ticket in self._tickets.values():
            ticket.may_be_remembered = ticket.may_be_remembered and ticket.request.salt != salt

    # -- links -------------------------------------------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        self._loads[link] = 0
        self.place()

    def link_down(self, link: Link) -> None:
        """What it was at waits for another, before everything new."""
        self._loads.pop(link, None)
        for leg in [leg for leg in self._legs.values() if leg.link is link]:
            self._lose(leg, leg.streams)
        self.place()

    def hear(self, link: Link, deltas: Iterable[Delta]) -> None:
        """What an older leg, or a choice that has ended, still says is dropped."""
        now = time.monotonic()
        for delta in deltas:
            leg = self._legs.get(delta.request_id)
            stream = leg.ticket.streams.get(delta.choice) if leg else None
            if leg is None or stream is None or leg.link is not link or stream not in leg.streams:
                continue
            if delta.finish_reason in (FinishReason.CANCELLED, FinishReason.LOST):  # nobody here has asked for that
                self._lose(leg, [stream])
                continue
            told = stream.hear(delta, link.identity, now)
            if stream.ended:
                self._leave(leg, stream)
            self._tell(leg.ticket, told)
        self.place()

    def refuse(self, link: Link, leg_id: str, error: InputError) -> None:
        """A replica does not take a leg: nor would any other."""
        leg = self._legs.get(leg_id)
        if leg is not None and leg.link is link:
            self._end(leg.ticket, leg.streams, FinishReason.ERROR, str(error))
            self.place()

    # -- what waits --------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Send what can be sent now."""
        self._lost = [leg for leg in self._lost if not self._sent(leg)]
        while self._fresh and self._sent(self._fresh[0]):
            self._fresh.popleft()

    def expire(self) -> None:
        """End what has waited too long for a replica that can take it, or let it go on anywhere, flagged."""
        now = time.monotonic()
        self._remembered.expire(now)
        for leg in [*self._lost, *self._fresh]:
            if any(leg.fits(link.identity) for link in self._loads):
                leg.homeless_s = None
                continue
            leg.homeless_s = now if leg.homeless_s is None else leg.homeless_s
            if now - leg.homeless_s < self._config.replay_timeout_s:
                continue
            if self._loads and self._config.unequal_numerics == "flag":
                leg.anywhere = True
            else:
                self._end(leg.ticket, leg.streams, FinishReason.LOST, self._why_homeless(leg))
        self.place()

    def _known(self, request: Request, now: float) -> Ticket | None:
        """Raises: InputError when the id is another request's."""
        ticket = self._tickets.get(request.id) or self._remembered.get(request.id, now)
        if ticket is not None and ticket.digest != digest_of(request):
            raise InputError(f"another request was submitted under the id {request.id!r}")
        return ticket

    def _join(self, ticket: Ticket, ear: Ear) -> None:
        """One more listens: first to what was told already."""
        for delta in ticket.told:
            self._tell_ear(ticket, ear, delta)
        if not ticket.ended:
            ticket.ears.append(ear)

    def _check_room(self, requests: Sequence[Request]) -> None:
        room = sum(max(0, self._config.max_running - load) for load in self._loads.values())
        room += self._config.max_queued - len(self._fresh)
        if len(requests) > room:
            raise Overloaded(f"{len(self._fresh)} requests wait already; {self._config.max_queued} may")

    def _sent(self, leg: Leg) -> bool:
        """Whether a replica was found for it."""
        links = {link.name: link for link in self._loads if leg.fits(link.identity)}
        loads = {name: self._loads[link] for name, link in links.items()}
        config, size = self._config, len(leg.streams)
        name = choose(leg.key, loads, size=size, load_factor=config.load_factor, most=config.max_running)
        if name is None:
            return False
        self._num_sent += 1
        leg.id, leg.link = f"{leg.ticket.request.id}~{self._num_sent}", links[name]
        self._legs[leg.id] = leg
        self._loads[leg.link] += size
        now = time.monotonic()
        for stream in leg.streams:
            stream.begin(now)
        leg.link.send(leg.request)
        return True

    def _lose(self, leg: Leg, streams: Sequence[Stream]) -> None:
        now, untouched = time.monotonic(), len(streams) == len(leg.ticket.streams)
        for stream in list(streams):
            stream.lose(now)
            self._leave(leg, stream)
        hopeless = [s for s in streams if s.num_vain > self._config.max_vain_replays]
        again = [s for s in streams if s.num_vain <= self._config.max_vain_replays]
        untouched = untouched and not hopeless and not any(s.output_ids for s in again)
        for group in [again] if untouched else [[stream] for stream in again]:
            self._lost.append(Leg(leg.ticket, group, leg.key, anywhere=leg.anywhere))
        if hopeless:
            why = f"its replicas were lost {hopeless[0].num_vain} times in a row before it had a token"
            self._end(leg.ticket, hopeless, FinishReason.ERROR, why)

    def _why_homeless(self, leg: Leg) -> str:
        waited = f"for {self._config.replay_timeout_s:g} s there was no replica"
        begun = leg.streams[0].identity
        if begun is None or not self._loads:
            return waited
        others = ", ".join(sorted({str(tuple(link.identity)) for link in self._loads}))
        return f"{waited} with the numerics that it was begun with: {tuple(begun)}; there are: {others}"

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end_all(self, ticket: Ticket) -> None:
        self._end(ticket, [s for s in ticket.streams.values() if not s.ended], FinishReason.CANCELLED)

    def _end(self, ticket: Ticket, streams: Sequence[Stream], reason: FinishReason, error: str = "") -> None:
        """Of these choices, wherever they are."""
        ending, now = list(streams), time.monotonic()
        for leg in [leg for leg in self._legs.values() if leg.ticket is ticket]:
            if leg.link is not None and all(stream in ending for stream in leg.streams):
                leg.link.cancel(leg.id)
            for stream in [stream for stream in leg.streams if stream in ending]:
                self._leave(leg, stream)
        self._lost = _without(self._lost, ending)
        self._fresh = deque(_without(self._fresh, ending))
        for stream in ending:
            self._tell(ticket, stream.end(reason, error, now))

    def _leave(self, leg: Leg, stream: Stream) -> None:
        leg.streams = [other for other in leg.streams if other is not stream]
        if leg.link in self._loads:
            self._loads[leg.link] -= 1
        if not leg.streams:
            del self._legs[leg.id]

    def _tell(self, ticket: Ticket, delta: Delta) -> None:
        ticket.told.append(delta)
        for ear in ticket.ears:
            self._tell_ear(ticket, ear, delta)
        if ticket.ended:
            del self._tickets[ticket.request.id]
            ticket.ears.clear()
            reasons = {told.finish_reason for told in ticket.told} - {None}
            if ticket.may_be_remembered and reasons <= {FinishReason.STOP, FinishReason.LENGTH}:
                self._remembered.add(ticket, time.monotonic())


def _without(legs: Iterable[Leg], streams: Sequence[Stream]) -> list[Leg]:
    """Legs that wait, less these choices."""
    for leg in legs:
        leg.streams = [stream for stream in leg.streams if stream not in streams]
    return [leg for leg in legs if leg.streams]
