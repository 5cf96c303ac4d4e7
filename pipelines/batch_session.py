"""The Ray cluster of a job: the one it was submitted to, or one of its own for as long as it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator

from ragspec.errors import EngineError


@contextlib.contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connect to `address`, or else to RAY_ADDRESS (which `ray job submit` sets), or else start Ray here.

    Raises: EngineError if there is no cluster at the address.

    Why the import is in here: Ray reads its mode of authentication once, when it is imported.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        _guard_with_token()
    import ray

    dashboard = False if address == "local" else None  # None: whatever that cluster has
    try:
        ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as cause:
        raise EngineError(f"cannot use the Ray cluster at {address}: {_first_line(cause)}") from cause
    try:
        yield
    finally:
        ray.shutdown()


def _guard_with_token() -> None:
    """Why: a Ray that nobody told about tokens leaves one in the home directory, which then confuses other clusters."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
