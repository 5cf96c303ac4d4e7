"""Which replica a request goes to, and the settings of a router.

Requests that share a document go to the same replica, whose prefix cache knows it. Rendezvous hashing: every
replica has a score for a key and the greatest wins, so one replica more or less moves only the keys that it wins or won. Bounded
loads: a replica with more than its share passes its keys on to the next. Owns no state.

Sources: Thaler and Ravishankar 1998 (rendezvous); Mirrokni, Thorup and Zadimoghaddam 2018 (bounded loads).

    >>> choose_replica(affinity_key(request), {"engine-0": 3, "engine-1": 5}, load_factor=1.25)
"""

import hashlib
import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from ragspec.config import ConfigSection
from ragspec.core import Request
from ragspec.errors import InputError


class RoutingConfig(ConfigSection):
    """How requests find a replica, and what happens when a replica is lost. Units: seconds, tokens, requests.

    Choice of a replica. A request with an affinity goes where its hash points, unless that replica has more than `load_factor`
    times the mean load; without an affinity, to the least loaded replica. At most `max_num_seqs` choices are sent to a replica at
    once; beyond what can be sent, `max_queued` choices wait.

    Loss of a replica. A replica answers a poll within `poll_s` and then has `heartbeat_timeout_s`; after that its streams go to
    other replicas. A replica that does not answer a health check for `hang_s`, or whose step lasts longer than `step_timeout_s`,
    is killed, and Ray restarts it. A lost replica is connected to again after `retry_s`. A stream waits `replay_timeout_s` for
    a replica that can take it, then ends with an error; a stream that has begun needs a replica with the same numerics. A stream
    that was lost more than `max_vain_replays` times in a row without a token is not tried again: it may be what kills replicas.

    `call_timeout_s`: for a replica to accept a request. `start_timeout_s`: for a first replica to answer.
    """

    load_factor: float = Field(1.25, ge=1.0)
    max_num_seqs: int = Field(64, ge=1)
    max_queued: int = Field(10_000, ge=0)
    poll_s: float = Field(1.0, gt=0.0, le=30.0)
    heartbeat_timeout_s: float = Field(2.5, gt=0.0)
    hang_s: float = Field(8.0, gt=0.0)
    step_timeout_s: float = Field(60.0, gt=0.0)
    call_timeout_s: float = Field(30.0, gt=0.0)
    start_timeout_s: float = Field(60.0, gt=0.0)
    replay_timeout_s: float = Field(60.0, ge=0.0)
    retry_s: float = Field(0.5, gt=0.0)
    max_vain_replays: int = Field(5, ge=0)


def affinity_key(request: Request) -> bytes | None:
    """The hash that requests for one replica share; two tenants never share one. None: any replica will do.

    Raises: InputError for an affinity or salt that is no text.
    """
    if not (isinstance(request.affinity, str) and isinstance(request.salt, str)):
        raise InputError(f"affinity and salt must be strings, not {request.affinity!r} and {request.salt!r}")
    return _digest(request.salt, "affinity", request.affinity) if request.affinity else None


def rendezvous_order(key: bytes, names: Iterable[str]) -> list[str]:
    """The names by their score for the key, the best first."""
    return sorted(names, key=lambda name: _digest(name, "score", key.hex()), reverse=True)


def choose_replica(
    key: bytes | None, loads: Mapping[str, int], *, load_factor: float, max_load: int | None = None
) -> str | None:
    """The replica for one more choice, given the load of each. None: every replica would exceed `max_load`."""
    fitting = [name for name, load in loads.items() if max_load is None or load < max_load]
    if not fitting:
        return None
    share = math.ceil(load_factor * (sum(loads.values()) + 1) / len(loads))
    for name in rendezvous_order(key, fitting) if key is not None else ():
        if loads[name] < share:
            return name
    return min(fitting, key=lambda name: (loads[name], name))


def _digest(*parts: str) -> bytes:
    """Hashes the lengths too, so that no two lists of parts are one text."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()
