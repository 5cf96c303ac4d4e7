"""Which replica a request goes to: where its like went before, so that their common prefix is known there.

Rendezvous hashing: every replica has a score for a key and the greatest wins, so one replica more or less moves only the keys
that it wins or had won. Bounded loads: one that has more than its share passes its keys on to the next.

Sources: Thaler and Ravishankar 1998 (rendezvous); Mirrokni, Thorup and Zadimoghaddam 2018 (bounded loads).

    >>> choose(key_of(request), {"engine-0": 3, "engine-1": 5}, load_factor=1.25)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

from ragspec.core import Request
from ragspec.errors import InputError


def key_of(request: Request, prefix_tokens: int = 0) -> bytes | None:
    """What requests that belong together have in common; two tenants never share one. None: it belongs anywhere.

    Raises: InputError for an affinity or salt that is no text.
    """
    if not (isinstance(request.affinity, str) and isinstance(request.salt, str)):
        raise InputError(f"affinity and salt must be strings, not {request.affinity!r} and {request.salt!r}")
    if request.affinity:
        return _hashed(request.salt, "affinity", request.affinity)
    if prefix_tokens and len(request.prompt_ids) >= prefix_tokens:
        return _hashed(request.salt, "prefix", ",".join(map(str, request.prompt_ids[:prefix_tokens])))
    return None


def ranked(key: bytes, names: Iterable[str]) -> list[str]:
    """The best place for a key first."""
    return sorted(names, key=lambda name: _hashed(name, "score", key.hex()), reverse=True)


def choose(
    key: bytes | None, loads: Mapping[str, int], *, size: int = 1, load_factor: float, most: int | None = None
) -> str | None:
    """The replica for `size` more choices, from what each has already. None: every one would have more than `most`.

    A replica without any load takes whatever comes.
    """
    fitting = [name for name, load in loads.items() if most is None or not load or load + size <= most]
    if not fitting:
        return None
    share = math.ceil(load_factor * (sum(loads.values()) + size) / len(loads))
    for name in ranked(key, fitting) if key is not None else ():
        if loads[name] + size <= share:
            return name
    return min(fitting, key=lambda name: (loads[name], name))


def _hashed(*parts: str) -> bytes:
    """Lengths go in as well: no two lists of parts are one text."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()
