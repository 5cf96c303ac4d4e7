"""What a deployment consists of, kept in Ray's own key-value store, where it outlives the supervisor.

Written before a process is started and once it is known, so that whoever comes later (a supervisor that was started again,
`down` after a crash) finds every actor, placement group and process. It is gone with the cluster.

    >>> ledger = Ledger("ragspec")
    >>> ledger.write("engine-0", Entry(epoch=1, actors=("ragspec/engine-0.0@1",)))
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ray.experimental import internal_kv as kv

from ragspec.cluster.processes import Process
from ragspec.cluster.shell import Place

NAMESPACE = "ragspec"
SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Entry:
    """One member, keeper or spare: what there is of it, or is about to be.

    `actors` are names; rank 0 comes first. `places` are in the order of the actors, and empty until they are known. `group` is
    the id of its placement group. `live`: its object is loaded. `identity`: of the supervisor's entry, which deployment of that
    name it is.
    """

    epoch: int
    actors: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    group: str = ""
    live: bool = False
    identity: str = ""


class Ledger:
    """One deployment's entries by name."""

    def __init__(self, deployment: str) -> None:
        """Needs Ray to be initialised."""
        self._prefix = f"{deployment}/".encode()

    def write(self, name: str, entry: Entry) -> None:
        kv._internal_kv_put(self._key(name), json.dumps(asdict(entry)).encode(), overwrite=True, namespace=NAMESPACE)

    def read(self, name: str) -> Entry | None:
        found = kv._internal_kv_get(self._key(name), namespace=NAMESPACE)
        return None if found is None else _entry(json.loads(found))

    def entries(self) -> dict[str, Entry]:
        keys = kv._internal_kv_list(self._prefix, namespace=NAMESPACE)
        names = sorted(key[len(self._prefix) :].decode() for key in keys)
        return {name: entry for name in names if (entry := self.read(name)) is not None}

    def remove(self, name: str) -> None:
        kv._internal_kv_del(self._key(name), namespace=NAMESPACE)

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()


def _entry(fields: dict[str, Any]) -> Entry:
    places = tuple(Place(Process(*process), node) for process, node in fields.pop("places"))
    return Entry(actors=tuple(fields.pop("actors")), places=places, **fields)
