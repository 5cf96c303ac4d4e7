"""Connects a command to Ray: to a given cluster, to one that `ragspec cluster up` started here, or to one of its own.

A missing cluster, a missing or wrong token and other versions are errors of one line.

    >>> with ray_session("10.0.0.1:6379"): ...
    >>> with ray_session(None, deployment="ragspec"): ...
"""

import contextlib
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ragspec.cluster.local_cluster import RAY_DEFAULTS, LocalCluster, is_loopback
from ragspec.errors import EngineError

_PROBE_S = 5.0
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN_FILE = Path(".ray") / "auth_token"
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
_TOKEN_HINT = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"


@contextlib.contextmanager
def ray_session(address: str | None, *, deployment: str = "") -> Iterator[None]:
    """Connect to `address`, else to RAY_ADDRESS (which `ray job submit` sets), else to the local cluster of `deployment`, else
    start Ray here. A process that is connected already stays so if it names no cluster.

    Raises: EngineError if there is no cluster at the address, or it cannot be used.

    Why the import is inside: Ray reads its mode of authentication once, when it is imported.
    """
    ray_module = sys.modules.get("ray")
    if address is None and not deployment and ray_module is not None and ray_module.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or (deployment and local_cluster_address(deployment)) or "local"
    prepare_token(address)
    import ray

    connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def clusters_folder() -> Path:
    """The records of local clusters: $XDG_STATE_HOME/ragspec/clusters, else below ~/.local/state."""
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if Path(named).is_absolute() else Path(os.path.expanduser("~/.local/state"))
    return base / "ragspec" / "clusters"


def local_cluster_address(deployment: str) -> str:
    """The address of the deployment's local cluster, or an empty string. Sets the environment that a client of it needs."""
    nodes = LocalCluster.recorded(clusters_folder() / deployment)
    if nodes is None or not nodes.running:
        return ""
    os.environ.pop("RAY_AUTH_TOKEN", None)  # Why: Ray prefers it to a path
    os.environ.update(nodes.environment)
    return nodes.address


def prepare_token(address: str) -> None:
    """Sets the token that Ray reads when it is imported.

    Why: without a setting, Ray writes a token into the home directory, which then breaks connections to other clusters.
    """
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" in os.environ:
        return
    if address == "local":
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    elif any(name in os.environ for name in _TOKEN_VARIABLES) or (Path.home() / _TOKEN_FILE).is_file():
        os.environ["RAY_AUTH_MODE"] = "token"


def has_token_auth(address: str) -> bool:
    """Whether the cluster asks for a token, or is only reachable from this machine."""
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]")
    return os.environ.get("RAY_AUTH_MODE") == "token" or address == "local" or is_loopback(host)


def connect(address: str) -> None:
    """`ray.init`, with errors of one line. Raises: EngineError."""
    import ray
    from ray.exceptions import AuthenticationError

    _probe(address)
    dashboard = False if address == "local" else None  # None: as the cluster has it
    try:
        ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.WARNING)
    except AuthenticationError as cause:
        raise EngineError(f"the Ray cluster at {address} asks for a token, and there is none: {_TOKEN_HINT}") from cause
    except ConnectionError as cause:
        mode = os.environ.get("RAY_AUTH_MODE")
        token = "the token is wrong" if mode == "token" else f"it asks for a token: {_TOKEN_HINT}"
        raise EngineError(f"something listens at {address}, but it is no Ray cluster, or {token}") from cause
    except Exception as cause:  # Why all: Ray raises plain exceptions, as for a node that does not start in time
        raise EngineError(f"cannot use the Ray cluster at {address}: {_reason(cause)}") from cause


def _probe(address: str) -> None:
    """Why: Ray waits for minutes for a cluster that does not exist."""
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
