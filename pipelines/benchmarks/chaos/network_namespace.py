"""A network namespace with one link into it, so that a real network is parted or slow. Needs root and iproute2.

    with network_namespace() as namespace:
        namespace.part(True)

No packet leaves the machine: the namespace has no route but that of the link. Namespace and link are gone after the block.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import secrets
import subprocess
from collections.abc import Collection, Iterator
from ipaddress import IPv4Network
from pathlib import Path

from ragspec.errors import EngineError

_NAMES = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000
_PRIVATE = IPv4Network("10.0.0.0/8")
_NUM_TRIES = 100


class NetworkNamespace:
    """`host`: the address inside. `link`: the end of the link inside."""

    def __init__(self, name: str, host: str, link: str) -> None:
        self.name, self.host, self.link = name, host, link

    def part(self, is_parted: bool) -> None:
        """Takes the link down: packets of both directions vanish, and neither end is told."""
        _run("ip", "-n", self.name, "link", "set", self.link, "down" if is_parted else "up")

    def delay(self, seconds: float) -> None:
        """Every packet out of the namespace takes so much longer. Raises: EngineError if the kernel lacks netem."""
        _run(
            "tc",
            "-n",
            self.name,
            "qdisc",
            "replace",
            "dev",
            self.link,
            "root",
            "netem",
            "delay",
            f"{seconds * 1e3:g}ms",
        )


@contextlib.contextmanager
def network_namespace() -> Iterator[NetworkNamespace]:
    """Raises: EngineError without root or iproute2."""
    token = secrets.token_hex(3)
    name, outer, inner = f"ragspec-{token}", f"rs-{token}-o", f"rs-{token}-i"
    outside, inside = free_network(_taken()).hosts()
    with contextlib.ExitStack() as stack:
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        stack.callback(_run, "ip", "link", "delete", outer)
        for end, where, address in ((outer, (), outside), (inner, ("-n", name), inside)):
            _run("ip", *where, "address", "add", f"{address}/30", "dev", end)
            _run("ip", *where, "link", "set", end, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        (found,) = json.loads(_run("ip", "-n", name, "-json", "link", "show", inner))
        # Why: a neighbour that is looked for in vain is an error at once, and nobody is to be told
        _run("ip", "neighbour", "replace", str(inside), "lladdr", found["address"], "dev", outer, "nud", "permanent")
        yield NetworkNamespace(name, str(inside), inner)


def enter(name: str) -> None:
    """Moves this thread, and the threads that it starts from now on, into the namespace. Raises: OSError."""
    with open(_NAMES / name, "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def free_network(taken: Collection[IPv4Network]) -> IPv4Network:
    """A private network for two hosts, which overlaps none that is taken. Raises: EngineError if none is found."""
    for _ in range(_NUM_TRIES):
        chosen = IPv4Network((int(_PRIVATE.network_address) + random.randrange(0, _PRIVATE.num_addresses, 4), 30))
        if not any(chosen.overlaps(other) for other in taken):
            return chosen
    raise EngineError(f"no network within {_PRIVATE} is free")


def _taken() -> list[IPv4Network]:
    """The networks of all routes of this machine, its own addresses among them."""
    routes = json.loads(_run("ip", "-4", "-json", "route", "show", "table", "all"))
    return [IPv4Network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]


def _run(*command: str) -> str:
    """Raises: EngineError."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as cause:
        reason = getattr(cause, "stderr", None) or cause
        raise EngineError(f"these faults need network namespaces: {' '.join(command)}: {reason}".strip()) from cause
