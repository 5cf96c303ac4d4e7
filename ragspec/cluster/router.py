"""Several replicas of an engine as one that survives the death of any.

Looks like an engine to whoever asks. Every choice's tokens are kept as they are told; when a replica is lost, each goes on on
another one with the same numerics, under the same key: same tokens, same text, told once.

    >>> with Router(directory, ray_connect(config), config) as router:
    ...     router.generate([Request("a", prompt_ids, SamplingParams(max_tokens=20))])[0].text

Threads: two follow the directory's table, one a replica holds its poll, one a replica sends, and one tells the listeners, which
may therefore raise, submit and cancel; a slow one holds up the others' news, but no replica. All share the `Board` under one
lock that nobody holds while waiting.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from ragspec.cluster.board import Board
from ragspec.cluster.connection import Connect
from ragspec.cluster.directory import Directory, Member, Table
from ragspec.cluster.links import Link
from ragspec.cluster.routing import RoutingConfig
from ragspec.cluster.streams import Ear, Listener, Ticket
from ragspec.cluster.watching import Watch
from ragspec.core import Delta, Request
from ragspec.engine.admission import ModelLimits
from ragspec.engine.client import EngineClient
from ragspec.errors import EngineClosed, ReplicaLost

log = logging.getLogger(__name__)

_TICK_S = 0.25
_FLUSH_S = 2.0
_MAX_PURGED = 10_000

_Key = tuple[str, int]
_Told = tuple[Ticket, Ear, Delta]


class Router(EngineClient):
    """Use from any thread. A request is known by its id: submitted again with the same content, running or finished lately, it is
    told from its beginning and not run again. All tenants share the ids: who passes on those of
    clients puts the tenant in front."""

    def __init__(self, directory: Directory, connect: Connect, config: RoutingConfig | None = None) -> None:
        """Waits for all live replicas, of which there must be one. Raises: ReplicaLost if there is none for `start_timeout_s`."""
        self._watch, self._connect = Watch(directory), connect
        self._config = config or RoutingConfig()
        self._changed = threading.Condition()
        self._told: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
        self._board = Board(self._config, lambda *told: self._told.put(told))
        self._links: dict[_Key, Link] = {}
        self._shunned: dict[_Key, float] = {}  # until when
        self._purged: deque[str] = deque(maxlen=_MAX_PURGED)
        self._closed = False
        self._latest: Link | None = None
        self._teller = threading.Thread(target=self._tell_all, daemon=True, name="router-tell")
        self._teller.start()
        threading.Thread(target=self._follow, daemon=True, name="router-follow").start()
        atexit.register(self.close)
        with self._changed:
            self._changed.wait_for(lambda: self._latest and self._all_up, self._config.start_timeout_s)
            found = self._latest is not None
        if not found:
            self.close()
            raise ReplicaLost(f"no engine is live, and none became so within {self._config.start_timeout_s:g} s")

    # -- from any thread ---------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """The numerics ids of all live replicas; of the last one while there is none."""
        with self._changed:
            return "+".join(sorted({link.identity.fingerprint for link in self._live()}))

    @property
    def max_context_tokens(self) -> int:
        """What every live replica can hold."""
        with self._changed:
            return min(link.identity.max_context_tokens for link in self._live())

    def num_heard(self) -> int:
        """It rises as long as any replica goes on with a request of this router's."""
        with self._changed:
            return self._board.num_heard

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; the listener hears every Delta of every choice once, in one thread of the router's.

        Raises: InputError, PromptTooLong, Overloaded, EngineClosed.
        """
        self.submit_all([request], listener)

    def submit_all(self, requests: Sequence[Request], listener: Listener) -> None:
        with self._changed:
            bounds = self._bounds()
        for request in requests:
            bounds.limits(request)
        tickets = [Ticket.of(request, listener, time.monotonic()) for request in requests]
        with self._changed:
            if self._closed:
                raise EngineClosed("the router is closed")
            self._board.admit(tickets)

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._board.cancel(request_id)
            self._changed.notify_all()

    def leave(self, request_id: str, listener: Listener) -> None:
        """Why not `cancel`: others may listen to the same request."""
        with self._changed:
            self._board.leave(request_id, listener)
            self._changed.notify_all()

    def purge(self, salt: str) -> None:
        """Forget every cached prefix, earlier answer and finished request of one tenant, here and in every replica."""
        with self._changed:
            self._purged.append(salt)
            self._board.purge(salt)
            for link in self._links.values():
                link.purge(salt)

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, give those that run `drain_s` seconds to end, then cancel them. The replicas stay."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._board.idle, drain_s)
            self._board.cancel_all()
            links, self._links = list(self._links.values()), {}
        self._told.put(None)
        self._watch.close()
        for link in links:
            link.close()
        deadline = time.monotonic() + _FLUSH_S
        for link in links:
            link.join(deadline)
        if threading.current_thread() is not self._teller:
            self._teller.join(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    # -- what links say, in their threads ----------------------------------------------------------------------------

    def link_up(self, link: Link) -> None:
        with self._changed:
            if self._links.get(link.key) is link:
                self._latest = link
                self._board.link_up(link)
                self._changed.notify_all()

    def link_said(self, link: Link, deltas: Sequence[Delta]) -> None:
        with self._changed:
            if self._links.get(link.key) is link:
                self._board.hear(link, deltas)
                self._changed.notify_all()

    def link_refused(self, link: Link, request: Request, error: Exception) -> None:
        with self._changed:
            self._board.refuse(link, request.id, error)

    def link_down(self, link: Link, why: str, *, forgotten: bool) -> None:
        with self._changed:
            if self._links.get(link.key) is link:
                del self._links[link.key]
                self._shunned[link.key] = time.monotonic() + self._config.retry_s
                self._board.link_down(link)
                if forgotten and not self._closed:
                    self._link(link.member)
                self._changed.notify_all()

    # -- threads of its own ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Why also when nothing has changed: a replica is shunned, and a request waits, for some time only."""
        table = self._watch.table
        while not self._closed:
            self._link_to(table)
            with self._changed:
                self._board.expire()
                self._changed.notify_all()
            table = self._watch.wait(table.version, _TICK_S)

    def _link_to(self, table: Table) -> None:
        """Links to what is live now, and to nothing else."""
        live = {(member.name, member.epoch): member for member in table.of("engine")}
        with self._changed:
            for key in self._links.keys() - live.keys():
                link = self._links.pop(key)
                self._board.link_down(link)
                link.close()
            now = time.monotonic()
            self._shunned = {key: until for key, until in self._shunned.items() if key in live}
            for key in live.keys() - self._links.keys():
                if not self._closed and self._shunned.get(key, 0.0) <= now:
                    self._link(live[key])

    def _link(self, member: Member) -> None:
        """Why the purges: one that was linked before may have missed some, and keeps its caches."""
        link = Link(member, self._watch.report, self._connect, self._config, self)
        self._links[link.key] = link
        for salt in self._purged if link.key in self._shunned else ():
            link.purge(salt)
        link.start()

    def _tell_all(self) -> None:
        """All listeners hear in this thread, so each hears one thing at a time."""
        while (told := self._told.get()) is not None:
            self._tell(*told)

    def _tell(self, ticket: Ticket, ear: Ear, delta: Delta) -> None:
        """One that raises hears nothing more."""
        if ear.deaf:
            return
        try:
            ear.listener(delta)
        except Exception:
            log.exception("a listener of request %r failed", ticket.request.id)
            with self._changed:
                self._board.deafen(ticket, ear)

    # -- under the lock ----------------------------------------------------------------------------------------------

    @property
    def _all_up(self) -> bool:
        return len(self._links) == len(self._board.links)

    def _live(self) -> Sequence[Link]:
        assert self._latest is not None
        return self._board.links or (self._latest,)

    def _bounds(self) -> ModelLimits:
        bounds = [link.facts.bounds for link in self._live()]
        return min(bounds, key=lambda each: each.max_context_tokens)
