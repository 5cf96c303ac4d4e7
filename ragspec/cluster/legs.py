"""Choices of a request that are sent to a replica together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ragspec.cluster.links import Link
from ragspec.cluster.streams import Identity, Stream, Ticket
from ragspec.core import Request


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


def without(legs: Iterable[Leg], streams: Sequence[Stream]) -> list[Leg]:
    """Legs that wait, less these choices."""
    for leg in legs:
        leg.streams = [stream for stream in leg.streams if stream not in streams]
    return [leg for leg in legs if leg.streams]
