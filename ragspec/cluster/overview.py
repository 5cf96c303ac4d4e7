"""How a deployment is, for whoever wants to know no more: imports neither engines nor indexes.

>>> status_of("ragspec").is_complete
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ray

from ragspec.cluster.answers import answers
from ragspec.cluster.keepers import rooms
from ragspec.cluster.ledger import NAMESPACE, SUPERVISOR
from ragspec.cluster.minder import MemberStatus
from ragspec.errors import EngineError

ANSWER_S = 15.0


class Status(NamedTuple):
    """`nodes`: the ids of the nodes that Ray believes in."""

    name: str
    nodes: tuple[str, ...]
    members: tuple[MemberStatus, ...]

    @property
    def is_complete(self) -> bool:
        return all(member.state == "live" for member in self.members)


def find_supervisor(name: str) -> Any:
    """Raises: EngineError if there is no deployment of that name."""
    if not ray.is_initialized():
        raise EngineError("Ray is not initialised: ray.init(address) first, or pipelines.batch.ray_session.ray_session")
    try:
        return ray.get_actor(f"{name}/{SUPERVISOR}", namespace=NAMESPACE)
    except ValueError as cause:
        raise EngineError(f"there is no deployment {name!r} on this cluster") from cause


def status_of(name: str) -> Status:
    """Raises: EngineError also if the supervisor does not answer, which lasts some seconds when it died."""
    (members,) = answers([find_supervisor(name).status.remote()], ANSWER_S, f"the supervisor of {name}")
    return Status(name, tuple(room.name for room in rooms()), tuple(members))
