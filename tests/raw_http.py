"""Requests as bytes on a socket, for what no client library would send.

>>> reply = ask(service.url, b"GET / HTTP/1.1\\r\\n\\r\\n")
>>> reply.status, reply.json()
"""

import json
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_TIMEOUT_S = 300.0
"""Until a connection that is not closed fails its test; no test waits for it."""


class Raw(NamedTuple):
    """What came back; status 0: the connection was closed without a word."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def opened(url: str, source: str = "") -> socket.socket:
    """`source`: the address to come from."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return socket.create_connection((parts.hostname, parts.port), _TIMEOUT_S, (source, 0) if source else None)


def head(method: str, path: str, *lines: str, host: str = "localhost") -> bytes:
    """The head of a request that is the only one on its connection."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *lines, "", ""]).encode(
        "latin-1"
    )


def ask(url: str, *pieces: bytes) -> Raw:
    """Send the pieces, as far as the other side takes them, and read until it closes."""
    with opened(url) as connection:
        return exchange(connection, pieces)


def exchange(connection: socket.socket, pieces: Iterable[bytes]) -> Raw:
    try:
        for piece in pieces:
            connection.sendall(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return parsed(read_all(connection))


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def parsed(received: bytes) -> Raw:
    first, _, rest = received.partition(b"\r\n\r\n")
    if not first:
        return Raw(0, {}, b"")
    status, *lines = first.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Raw(int(status.split()[1]), headers, rest)
