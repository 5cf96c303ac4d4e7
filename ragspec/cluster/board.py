"""What a router decides, without its threads: what runs where, what waits, and what becomes of what a lost replica was at.

A request is sent as one leg, all choices together. A leg ends with its choices or is lost with its link; then every choice that
has not ended is a leg of its own, behind what was told of it. Legs have ids of their own, never used twice, so what an earlier
leg still says is known by its id and dropped. Lost legs go before new requests; new ones are first come, first served.

Not safe to call from several threads: a `Router` calls it under its lock. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ragspec.cluster.affinity import choose, key_of
from ragspec.cluster.legs import Leg, without
from ragspec.cluster.links import Link
from ragspec.cluster.remembered import Remembered
from ragspec.cluster.routing import RoutingConfig
from ragspec.cluster.streams import Ear, Listener, Stream, Ticket
from ragspec.core import Delta, FinishReason, salt_belongs_to
from ragspec.errors import InputError, Overloaded

log = logging.getLogger(__name__)

Tell = Callable[[Ticket, Ear, Delta], None]


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
        self.num_heard = 0
        """Messages of replicas: it rises as long as any of them goes on with something."""

    @property
    def idle(self) -> bool:
        return not self._tickets

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._loads)

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, tickets: Sequence[Ticket]) -> None:
        """All of them, or none. The listener of one that is known already is told what that has said, and goes on with it.

        Raises: InputError, Overloaded.
        """
        if len({ticket.request.id for ticket in tickets}) < len(tickets):
            raise InputError("requests that run at once need different ids; an id comes twice")
        now = time.monotonic()
        known = {ticket: earlier for ticket in tickets if (earlier := self._known(ticket, now))}
        fresh = [ticket for ticket in tickets if ticket not in known]
        self._check_room(len(fresh))
        keys = {ticket: key_of(ticket.request, self._config.prefix_tokens) for ticket in fresh}
        for ticket, earlier in known.items():
            self._join(earlier, ticket.ears[0])
        for ticket in fresh:
            self._tickets[ticket.request.id] = ticket
            self._fresh.append(Leg(ticket, list(ticket.streams.values()), keys[ticket]))
        self.place()

    def cancel(self, request_id: str) -> None:
        if ticket := self._tickets.get(request_id):
            self._end_all(ticket)
            self.place()

    def cancel_all(self) -> None:
        self._lost, self._fresh = [], deque()
        for ticket in list(self._tickets.values()):
            self._end_all(ticket)

    def leave(self, request_id: str, listener: Listener) -> None:
        if ticket := self._tickets.get(request_id):
            for ear in [ear for ear in ticket.ears if ear.listener is listener]:
                self.deafen(ticket, ear)

    def deafen(self, ticket: Ticket, ear: Ear) -> None:
        """It cannot be told any more; a request that nobody listens to is cancelled."""
        ear.deaf = True
        if all(each.deaf for each in ticket.ears) and self._tickets.get(ticket.request.id) is ticket:
            self.cancel(ticket.request.id)

    def purge(self, salt: str) -> None:
        """Remember nothing that one tenant has asked, nor what it is asking."""
        self._remembered.purge(salt)
        for ticket in self._tickets.values():
            ticket.may_be_remembered = ticket.may_be_remembered and not salt_belongs_to(ticket.request.salt, salt)

    # -- links -------------------------------------------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        self._loads[link] = 0
        self.place()

    def link_down(self, link: Link) -> None:
        """What it was at waits for another, before everything new; if it still lives, it need not go on with it."""
        self._loads.pop(link, None)
        for leg in [leg for leg in self._legs.values() if leg.link is link]:
            link.cancel(leg.id)
            self._lose(leg, leg.streams)
        self.place()

    def hear(self, link: Link, deltas: Iterable[Delta]) -> None:
        """What an older leg, or a choice that has ended, still says is dropped. A mistake over one costs no other its tokens."""
        for delta in deltas:
            leg = self._legs.get(delta.request_id)
            stream = leg.ticket.streams.get(delta.choice) if leg else None
            if leg is None or stream is None or leg.link is not link or stream not in leg.streams:
                continue
            try:
                self._hear(leg, stream, delta, link)
            except Exception as cause:
                log.exception("what a replica said of request %r was not understood", leg.ticket.request.id)
                self._end(leg.ticket, leg.streams, FinishReason.ERROR, f"{type(cause).__name__}: {cause}")
        self.place()

    def _hear(self, leg: Leg, stream: Stream, delta: Delta, link: Link) -> None:
        if delta.finish_reason in (FinishReason.CANCELLED, FinishReason.LOST):  # nobody here has asked for that
            self._lose(leg, [stream])
            return
        self.num_heard += 1
        told = stream.hear(delta, link.identity, time.monotonic())
        if stream.ended:
            self._leave(leg, stream)
        self._tell(leg.ticket, told)

    def refuse(self, link: Link, leg_id: str, error: Exception) -> None:
        """A replica does not take a leg, or fails over it: so would any other."""
        leg = self._legs.get(leg_id)
        if leg is not None and leg.link is link:
            self._end(leg.ticket, leg.streams, FinishReason.ERROR, str(error) or type(error).__name__)
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
        homeless = {leg for leg in (*self._lost, *self._fresh) if self._is_homeless(leg, now)}
        if self._loads and self._config.unequal_numerics == "flag":
            for leg in homeless:
                leg.anywhere = True
        else:
            self._lost = [leg for leg in self._lost if leg not in homeless]
            self._fresh = deque(leg for leg in self._fresh if leg not in homeless)
            for leg in homeless:
                self._end(leg.ticket, leg.streams, FinishReason.LOST, self._why_homeless(leg))
        self.place()

    def _is_homeless(self, leg: Leg, now: float) -> bool:
        """There has been no replica for it all the time that it may wait."""
        if any(leg.fits(link.identity) for link in self._loads):
            leg.homeless_s = None
            return False
        leg.homeless_s = now if leg.homeless_s is None else leg.homeless_s
        return now - leg.homeless_s >= self._config.replay_timeout_s

    def _known(self, ticket: Ticket, now: float) -> Ticket | None:
        """Raises: InputError when the id is another request's."""
        request_id = ticket.request.id
        earlier = self._tickets.get(request_id) or self._remembered.get(request_id, now)
        if earlier is not None and earlier.digest != ticket.digest:
            raise InputError(f"another request was submitted under the id {request_id!r}")
        return earlier

    def _join(self, ticket: Ticket, ear: Ear) -> None:
        """One more listens: first to what was told already."""
        for delta in ticket.told:
            self._tell_ear(ticket, ear, delta)
        if not ticket.ended:
            ticket.ears.append(ear)

    def _check_room(self, num_requests: int) -> None:
        room = sum(max(0, self._config.max_running - load) for load in self._loads.values())
        room += self._config.max_queued - len(self._fresh)
        if num_requests > room:
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
        self._lost = without(self._lost, ending)
        self._fresh = deque(without(self._fresh, ending))
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
