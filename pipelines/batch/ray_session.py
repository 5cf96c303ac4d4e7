"""The Ray cluster that a command works on: one it is told of, one that `ragspec cluster up` started here, or one of its own.

What can be wrong with it ends in one line: no cluster at the address, no token or a wrong one, other versions.

    >>> with ray_session("10.0.0.1:6379"): ...
    >>> with ray_session(None, deployment="ragspec"): ...
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ragspec.errors import EngineError

_PROBE_S = 5.0
_GUARDS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_RAYS_OWN_TOKEN = Path(".ray") / "auth_token"
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
_HOW_TO_GUARD = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"


@contextlib.contextmanager
def ray_session(address: str | None, *, deployment: str = "") -> Iterator[None]:
    """Connect to `address`, or else to RAY_ADDRESS (which `ray job submit` sets), or else to the cluster that was started here
    for the deployment of that name, or else start Ray here. A process that is connected already, and names no other, stays so.

    Raises: EngineError if there is no cluster at the address, or it cannot be used.

    Why the import is in here: Ray reads its mode of authentication once, when it is imported.
    """
    if address is None and not deployment and is_connected():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or (deployment and started_here(deployment)) or "local"
    prepare_guard(address)
    import ray

    connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def is_connected() -> bool:
    """Whether this process uses a cluster already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def clusters_folder() -> Path:
    """Where clusters that were started here are recorded: $XDG_STATE_HOME/ragspec/clusters, else below ~/.local/state."""
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if Path(named).is_absolute() else Path(os.path.expanduser("~/.local/state"))
    return base / "ragspec" / "clusters"


def started_here(deployment: str) -> str:
    """The address of the cluster that runs here for that deployment, with the way into it set up; empty if there is none."""
    from ragspec.cluster.nodes import LocalNodes

    nodes = LocalNodes.found(clusters_folder() / deployment)
    if nodes is None or not nodes.running:
        return ""
    os.environ.pop("RAY_AUTH_TOKEN", None)  # Why: Ray prefers it to a path
    os.environ.update(nodes.environment)
    return nodes.address


def prepare_guard(address: str) -> None:
    """The token that Ray is to use, before it is imported.

    Why: a Ray that nobody told about tokens leaves one in the home directory, which then confuses other clusters.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_MODE" in os.environ:
        return
    if address == "local":
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif any(name in os.environ for name in _GUARDS) or (Path.home() / _RAYS_OWN_TOKEN).is_file():
        os.environ["RAY_AUTH_MODE"] = "token"


def is_guarded(address: str) -> bool:
    """Whether a token is asked of everybody who connects, or nobody can from elsewhere."""
    host = address.removeprefix("ray://").rpartition(":")[0]
    return os.environ.get("RAY_AUTH_MODE") == "token" or address == "local" or host.startswith(("127.", "localhost"))


def connect(address: str) -> None:
    """`ray.init`, with its errors in one line. Raises: EngineError."""
    import ray
    from ray.exceptions import AuthenticationError

    _probe(address)
    dashboard = False if address == "local" else None  # None: whatever that cluster has
    try:
        ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.WARNING)
    except AuthenticationError as cause:
        raise EngineError(f"the Ray cluster at {address} wants a token, and there is none: {_HOW_TO_GUARD}") from cause
    except ConnectionError as cause:
        mode = os.environ.get("RAY_AUTH_MODE")
        token = "the token is a wrong one" if mode == "token" else f"it wants a token: {_HOW_TO_GUARD}"
        raise EngineError(f"something listens at {address}, but it is no Ray cluster, or {token}") from cause
    except Exception as cause:  # Why all: Ray raises plain ones, say for a node that does not start in time
        raise EngineError(f"cannot use the Ray cluster at {address}: {_reason(cause)}") from cause


def _probe(address: str) -> None:
    """Why: Ray itself waits for minutes for a cluster that is not there."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError, OverflowError) as cause:
        raise EngineError(f"there is no Ray cluster at {address}: {_first_line(cause)}") from cause


def _reason(error: Exception) -> str:
    found = _VERSIONS.findall(str(error)) if "mismatch" in str(error) else []
    if len(found) != 2:
        return _first_line(error)
    theirs, ours = ("Ray {} on Python {}".format(*versions) for versions in found)
    return f"it runs {theirs}, and this is {ours}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
