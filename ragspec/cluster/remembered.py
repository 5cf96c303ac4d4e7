"""Requests that have ended, for a while: the same id with the same content is answered again without being generated again."""

from __future__ import annotations

from collections import OrderedDict

from ragspec.cluster.streams import Ticket, put_together
from ragspec.core import salt_belongs_to

_ENTRY_TOKENS = 16
"""What an entry costs beside its tokens."""

_TOKEN_CHARS = 5
"""Of a request as it is written out."""


class Remembered:
    """At most `max_tokens` tokens, each request for at most `seconds`; the oldest go first."""

    def __init__(self, seconds: float, max_tokens: int) -> None:
        self._seconds, self._max_tokens = seconds, max_tokens
        self._tickets: OrderedDict[str, tuple[float, Ticket]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket, now: float) -> None:
        self.drop(ticket.request.id)
        ticket.told = put_together(ticket.told)
        self._tickets[ticket.request.id] = now, ticket
        self._num_tokens += _size(ticket)
        self.expire(now)

    def get(self, request_id: str, now: float) -> Ticket | None:
        self.expire(now)
        known = self._tickets.get(request_id)
        return known[1] if known else None

    def purge(self, salt: str) -> None:
        """Forget one tenant's."""
        for request_id in [i for i, (_, ticket) in self._tickets.items() if salt_belongs_to(ticket.request.salt, salt)]:
            self.drop(request_id)

    def expire(self, now: float) -> None:
        while self._tickets:
            request_id, (ended_s, _) = next(iter(self._tickets.items()))
            if now - ended_s < self._seconds and self._num_tokens <= self._max_tokens:
                return
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        if known := self._tickets.pop(request_id, None):
            self._num_tokens -= _size(known[1])


def _size(ticket: Ticket) -> int:
    """The request is kept with it, and every alternative of a log-probability."""
    num_told = sum(len(delta.token_ids) * (1 + (ticket.request.params.logprobs or 0)) for delta in ticket.told)
    return _ENTRY_TOKENS + ticket.num_chars // _TOKEN_CHARS + num_told
