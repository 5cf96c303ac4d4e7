"""The service in one process: uvicorn in this thread, the engine in its own.

Owns the socket, the timeouts of connections, and shutdown. States: serving -> draining (after SIGTERM or SIGINT: not ready, new
requests are refused, running ones may end) -> ended. A second signal ends the process at once.

    >>> with listening(settings) as listener, ServiceBackend.embedded(config) as backend:
    ...     Server(build_app(backend, keys), backend, listener).run()
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import logging
import os
import resource
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragspec.errors import ConfigError
from ragspec.numerics.threads import num_processors, started_threads
from services.errors import ApiError
from services.limits import HEADER_BYTES, HEADER_S, network_of
from services.settings import ServiceSettings

if TYPE_CHECKING:  # both take seconds, and the socket opens first
    from fastapi import FastAPI

    from services.backend import ServiceBackend

log = logging.getLogger(__name__)

_BACKLOG = 512
_KEEP_ALIVE_S = 30
_CUT_OFF_S = 5.0
"""Time for streams that are cut off to send their error."""
_MAX_DESCRIPTORS = 65_536
_OTHER_DESCRIPTORS = 256
"""Files, sockets and pipes of the process beside its clients' connections."""
_EXIT_S = 60.0
"""After this a thread that hangs no longer keeps the process alive."""
_SILENT_S = 30
"""After this an event loop that runs nothing ends the process."""
_MOST_THREADS = 32


class TimedProtocol(H11Protocol):
    """Also limits the number of connections, the time for a request's head, and for a client that reads nothing.

    Why h11 and not the faster httptools: it limits a head's size, reads the requests of a connection one after the other, and
    reads the body of a request that asks for another protocol.
    """

    header_s = HEADER_S
    stalled_s = 60.0
    most = most_of_address = 2**31
    open_connections: Counter[str]
    """By network."""

    def connection_made(self, transport: Any) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._network = network_of(transport.get_extra_info("peername"))
        self.open_connections[self._network] += 1
        super().connection_made(transport)
        num_of_address = self.open_connections[self._network]
        if num_of_address > self.most_of_address or self.open_connections.total() > self.most:
            transport.abort()
            return
        self._head_timer = self.loop.call_later(self.header_s, self._close_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.header_s, self._close_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._end_stall()
        self.open_connections -= Counter((self._network,))  # drops zeros
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall_timer = self.loop.call_later(self.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP and heads that are too large."""
        has_begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not has_begun:
            error = ApiError(400, "this is no valid HTTP request, or its head is too large")
            response = error.response("")
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=error.status, headers=headers)
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _close_late(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class Server(uvicorn.Server):
    """`say` gets messages about the shutdown."""

    def __init__(
        self, app: FastAPI, backend: ServiceBackend, listener: socket.socket, say: Callable[[str], None] = log.info
    ) -> None:
        settings = backend.config.service
        timeouts = {"header_s": min(HEADER_S, settings.timeouts.client_s), "stalled_s": 2 * settings.timeouts.client_s}
        most = min(settings.limits.connections, max(1, raised_descriptor_limit() - _OTHER_DESCRIPTORS))
        counts = {"most": most, "most_of_address": settings.limits.address_connections, "open_connections": Counter()}
        protocol = type("ConfiguredProtocol", (TimedProtocol,), timeouts | counts)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=HEADER_BYTES,
                ssl_certfile=settings.ssl_certfile or None,
                ssl_keyfile=settings.ssl_keyfile or None,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(_CUT_OFF_S),
            )
        )
        self._backend, self._listener, self._say = backend, listener, say
        self.loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._is_stopping = self._is_signalled = self.has_ticked = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns after a signal or `stop`, when all requests have ended."""
        super().run(sockets or [self._listener])

    async def on_tick(self, counter: int) -> bool:
        """Also ends a service that can compute nothing any more, so that a supervisor starts it again."""
        self.has_ticked = True
        if self._backend.lost:
            self._begin_draining()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        # Why now: the loop would begin its threads under load, and a thread that lacks memory stops the loop (`started_threads`)
        self.loop.set_default_executor(started_threads(min(_MOST_THREADS, num_processors() + 4), "ragspec-requests"))
        threading.Thread(target=self.watch_loop, name="ragspec-watchdog", daemon=True).start()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_stopping or self.loop is None:
            os._exit(128 + sig)  # Why not sys.exit: it waits for threads
        self._is_signalled = True
        self.stop()

    def stop(self) -> None:
        """Stops as the first signal does. Callable from any thread."""
        self._is_stopping = True
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._begin_draining)

    def watch_loop(self) -> None:
        """Ends the process with status 1 if the event loop runs nothing for long: it hangs, and so do all requests.

        Why looks are counted and not seconds: a process that was stopped, or waited for its processor, has not looked either.
        """
        num_silent = 0
        while not self.should_exit:
            time.sleep(1.0)
            num_silent = 0 if self.has_ticked else num_silent + 1
            self.has_ticked = False
            if num_silent == _SILENT_S:
                os.write(2, f"error: the event loop has run nothing for {_SILENT_S} s; all threads:\n".encode())
                faulthandler.dump_traceback(2)
                os._exit(1)

    def _begin_draining(self) -> None:
        self._draining = self._draining or asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        limiter, drain_s = self._backend.rate_limiter, self._backend.config.service.drain_s
        if limiter.running:
            self._say(f"stopping: {limiter.running} requests may go on for {drain_s:g} s; again stops at once")
        if not await limiter.drained(drain_s):
            self._say(f"stopping: {limiter.running} requests are cut off")
            # Closing an engine ends streams with an error. Why in new threads: an engine that hangs blocks its caller
            for model in self._backend.models.values():
                threading.Thread(target=model.engine.close, daemon=True).start()
            await limiter.drained(_CUT_OFF_S)
        if self._is_signalled:
            exit_in_time()
        self.should_exit = True


def exit_in_time() -> None:
    """Ends the process, which is about to end, with status 1 if a thread keeps it alive for long."""
    last = threading.Timer(_EXIT_S, os._exit, (1,))
    last.daemon = True
    last.start()


@contextlib.contextmanager
def listening(settings: ServiceSettings) -> Iterator[socket.socket]:
    """Opens the socket, before anything is loaded. Raises: ConfigError."""
    where = f"{settings.host}:{settings.port}"
    try:
        (family, *_, address), *_ = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
    except OSError as cause:
        raise ConfigError(f"{settings.host!r} is no address of this machine: {cause.strerror}") from cause
    try:
        is_ipv6 = family == socket.AF_INET6
        listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_ipv6)
    except OSError as cause:
        if cause.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where} is in use by another process: choose another --port") from cause
        raise ConfigError(f"cannot listen on {where}: {os.strerror(cause.errno or 0)}") from cause
    with contextlib.closing(listener):
        yield listener


def raised_descriptor_limit() -> int:
    """Raises the soft limit of open files as far as the hard one and `_MAX_DESCRIPTORS` let it, and returns it."""
    soft, hard = (limit if limit >= 0 else 2**31 for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    wanted = max(soft, min(hard, _MAX_DESCRIPTORS))
    with contextlib.suppress(OSError, ValueError):  # macOS refuses more than its own limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        soft = wanted
    return soft


def check_certificate(settings: ServiceSettings) -> None:
    """Raises: ConfigError unless the certificate and its key can be used, or neither is given."""
    if not settings.ssl_certfile and not settings.ssl_keyfile:
        return
    if not settings.ssl_certfile:
        raise ConfigError("service.ssl_keyfile needs service.ssl_certfile")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as cause:
        raise ConfigError(f"{settings.ssl_certfile} and its key cannot be used: {cause}") from cause


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """http://host:port"""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
