"""The actors of a deployment by name: find them, ask for their status, end them.

A deployment is a set of named actors in one Ray namespace: its record, which holds the specification, and its replicas. Ray
restarts each of them. Imports neither engines nor indexes.

    >>> status_of("ragspec").is_complete
    >>> teardown("ragspec")        # nothing there: nothing happens
"""

import functools
import hashlib
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ragspec.cluster.actors import Replica, ignore_dead_actors, ragspec_error, wait_for_all
from ragspec.cluster.topology import DeploymentSpec, NodeResources, Topology
from ragspec.errors import EngineError

NAMESPACE = "ragspec"
KINDS = ("engine", "shard", "encoder")
ANSWER_S = 15.0
_STATUS_S = 2.0
_END_S = 30.0
_PAUSE_S = 0.1

State = Literal["starting", "live", "lost"]


class ReplicaStatus(NamedTuple):
    """`epoch`: Unix time at which its process started, 0 if unknown. `load`: requests of an engine, None for others. `error`: why
    it did not answer."""

    name: str
    kind: str
    state: State
    epoch: float
    node: str
    pids: tuple[int, ...]
    fingerprint: str
    load: int | None
    error: str


class Status(NamedTuple):
    """`nodes`: the ids of the nodes that Ray considers alive. `weights`: the type in which every engine holds the target's."""

    name: str
    nodes: tuple[str, ...]
    replicas: tuple[ReplicaStatus, ...]
    weights: str = ""

    @property
    def is_complete(self) -> bool:
        return all(replica.state == "live" for replica in self.replicas)


class DeploymentRecord:
    """The actor that holds a deployment's specification. Its name reserves the deployment's name."""

    def __init__(self, spec: DeploymentSpec, version: str = "unknown") -> None:
        """A restarted record is of a deployment that was up. `version` as from `own_version`."""
        self._spec, self.version = spec, version
        self._is_up = bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def state(self) -> tuple[DeploymentSpec, bool]:
        """The specification, and whether every replica has been live once."""
        return self._spec, self._is_up

    def set_up(self) -> None:
        self._is_up = True


@functools.cache
def own_version() -> str:
    """The version of ragspec, and a hash of its source files as this process first found them."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.toml")]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{version('ragspec')} ({digest.hexdigest()[:12]})"


def start_record(deployment: str, spec: DeploymentSpec, lifetime: str | None) -> Any:
    """On this node if possible, which usually is the head. Raises: EngineError if the name is taken."""
    remote: Any = ray.remote
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"name": actor_name(deployment, "record"), "namespace": NAMESPACE, "lifetime": lifetime}
    record = remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(DeploymentRecord)
    try:
        return record.options(scheduling_strategy=here, **options).remote(spec, own_version())
    except ValueError as cause:  # Ray: the name is taken
        raise EngineError(f"there is a deployment {deployment!r} on this cluster; take it down first") from cause


def find_spec(deployment: str) -> DeploymentSpec:
    """Raises: EngineError, also while the deployment is being started."""
    spec, is_up = _recorded(deployment)
    if not is_up:
        raise EngineError(f"the deployment {deployment!r} is still being started")
    return spec


def _recorded(deployment: str) -> tuple[DeploymentSpec, bool]:
    """The specification, and whether every replica has been live once.

    Raises: EngineError without such a deployment, and for a deployment of another version. Why: clients and actors exchange
    records of Python, which another version may not read.
    """
    check_ray()
    try:
        record = ray.get_actor(actor_name(deployment, "record"), namespace=NAMESPACE)
    except ValueError as cause:
        raise EngineError(f"there is no deployment {deployment!r} on this cluster") from cause
    name, here = f"the record of {deployment}", own_version()
    # Records of earlier versions hold none
    asked: Any = record.__ray_call__.remote(lambda own: getattr(own, "version", sys.modules["ragspec"].__version__))
    (there,) = wait_for_all([asked], ANSWER_S, name)
    if there != here:
        raise EngineError(
            f"the deployment {deployment!r} runs ragspec {there}, and this is ragspec {here}: restart it with "
            f"`ragspec cluster down --name {deployment}` and `ragspec cluster up --name {deployment}`"
        )
    ((spec, is_up),) = wait_for_all([record.state.remote()], ANSWER_S, name)
    return spec, is_up


def replica_names(topology: Topology) -> list[str]:
    counts = (topology.num_replicas, topology.num_shards * topology.shard_replicas, topology.num_encoders)
    return [f"{kind}-{number}" for kind, count in zip(KINDS, counts, strict=True) for number in range(count)]


def kind_of(replica_name: str) -> str:
    return replica_name.rpartition("-")[0]


def actor_name(deployment: str, name: str) -> str:
    return f"{deployment}/{name}"


def find_replicas(deployment: str, topology: Topology) -> list[Replica]:
    """Raises: EngineError if one of them has ended."""
    found = []
    for name in replica_names(topology):
        try:
            found.append(Replica(name, ray.get_actor(actor_name(deployment, name), namespace=NAMESPACE)))
        except ValueError as cause:
            raise EngineError(f"{name} of deployment {deployment!r} has ended: take it down and up again") from cause
    return found


def status_of(deployment: str) -> Status:
    """Asks every replica. Raises: EngineError if there is no deployment of that name."""
    spec, is_up = _recorded(deployment)
    actors: dict[str, Any] = {}
    for name in replica_names(spec.topology):
        with ignore_dead_actors():
            actors[name] = ray.get_actor(actor_name(deployment, name), namespace=NAMESPACE)
    answers = {name: actor.status.remote() for name, actor in actors.items()}
    if answers:
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=_STATUS_S)
    replicas = (_replica_status(name, answers.get(name), is_up) for name in replica_names(spec.topology))
    weights = spec.config.target.weight_dtype
    return Status(deployment, tuple(node.name for node in alive_nodes()), tuple(replicas), weights)


def _replica_status(name: str, call: Any, is_up: bool) -> ReplicaStatus:
    state: State = "lost"
    if call is None:
        error = "its actor has ended" if is_up else "its actor is not there yet"
    elif not ray.wait([call], timeout=0)[0]:
        state, error = ("lost", f"it did not answer within {_STATUS_S:g} s") if is_up else ("starting", "")
    else:
        try:
            status = ray.get(call)
            fingerprint, load = getattr(status, "fingerprint", ""), getattr(status, "num_running", None)
            started = status.started_s, status.node_id, status.pids
            return ReplicaStatus(name, kind_of(name), "live", *started, fingerprint, load, "")
        except ActorUnavailableError:
            state, error = "starting", "Ray is restarting it"
        except RayError as cause:
            error = str(ragspec_error(cause, name))
    return ReplicaStatus(name, kind_of(name), state, 0.0, "", (), "", None, error)


def alive_nodes() -> list[NodeResources]:
    """The nodes that Ray considers alive; Ray notices the death of a node after about 15 s."""
    nodes = [(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [NodeResources(name, float(has.get("CPU", 0.0)), float(has.get("GPU", 0.0))) for name, has in nodes]


def teardown(deployment: str, *, keep_record: bool = False) -> None:
    """End every actor and placement group of it; safe to repeat, also after a crash.

    Raises: EngineError if something of it remains.
    """
    kept = actor_name(deployment, "record") if keep_record else ""
    deadline = time.monotonic() + _END_S
    while names := [name for name in actors_of(deployment) if name != kept]:
        if time.monotonic() > deadline:
            raise EngineError(f"{len(names)} actors of {deployment} cannot be ended, the first is {names[0]}")
        for name in names:
            with ignore_dead_actors():
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        time.sleep(_PAUSE_S)
    groups: dict[str, dict[str, Any]] = placement_group_table()
    for identity, group in groups.items():
        if group["name"].startswith(f"{NAMESPACE}/{deployment}/") and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity))))


def actors_of(deployment: str) -> list[str]:
    """The names of its actors that Ray knows."""
    actors: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    prefix = f"{deployment}/"
    return [each["name"] for each in actors if each["namespace"] == NAMESPACE and each["name"].startswith(prefix)]


def check_ray() -> None:
    """Raises: EngineError."""
    if not ray.is_initialized():
        raise EngineError("Ray is not initialised: ray.init(address) first, or pipelines.batch.ray_session.ray_session")
