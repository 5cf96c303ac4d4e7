"""A deployment: engines, shards and encoders on a Ray cluster, started and ended as one.

    >>> with Deployment.up(Topology(replicas=2), load_config("config.yaml")) as deployment, deployment.pipeline() as pipeline:
    ...     print(pipeline.ask("When is the mill open?").text)
    >>> Deployment.find("ragspec").status()

States: up -> down. Everything that a user can do wrong with a cluster ends in one error that says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, Any

import ray

from ragspec.cluster.answers import answers
from ragspec.cluster.connection import ray_connect
from ragspec.cluster.keeper import Versions
from ragspec.cluster.keepers import rooms
from ragspec.cluster.minder import MemberStatus
from ragspec.cluster.overview import ANSWER_S, Status, find_supervisor, status_of
from ragspec.cluster.plans import make_plan, with_full_paths
from ragspec.cluster.retrieving import ClusterRetriever
from ragspec.cluster.router import Router
from ragspec.cluster.routing import RoutingConfig
from ragspec.cluster.supervised import SupervisedDirectory
from ragspec.cluster.supervisor import start_supervisor
from ragspec.cluster.teardown import sweep
from ragspec.cluster.topology import Note, Topology, check_fits
from ragspec.config import PipelineConfig, RetrieverConfig
from ragspec.errors import ConfigError, EngineError
from ragspec.retrieval.encoder import Encoder

if TYPE_CHECKING:
    from ragspec.rag.pipeline import Pipeline

DEFAULT_NAME = "ragspec"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_BEGIN_S = 120.0
_SLICE_S = 2.0


class Deployment(AbstractContextManager["Deployment"]):
    """Needs Ray to be initialised. Safe to use from several threads."""

    def __init__(self, supervisor: Any, name: str, note: Note) -> None:
        self.name, self.topology, self.config = name, note.topology, note.config
        self._ends_here = bool(note.job) and note.job == ray.get_runtime_context().get_job_id()
        self.directory = SupervisedDirectory(supervisor)

    @classmethod
    def up(
        cls,
        topology: Topology,
        config: PipelineConfig,
        *,
        name: str = DEFAULT_NAME,
        detached: bool = False,
        timeout_s: float = 900.0,
    ) -> Deployment:
        """Returns when every member is live; whatever fails before is taken down again.

        A detached one stays until `down`; others end with this process, however that ends.
        Raises: ConfigError for what cannot be, or is missing on a node; ModelError, StoreError; EngineError if there is one of
        this name, or for what else keeps it from coming up.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a deployment: up to 63 letters, digits, dots, dashes and underscores"
            )
        _check_ray()
        nodes = rooms()
        check_fits(topology, nodes)
        job = "" if detached else ray.get_runtime_context().get_job_id()
        note = Note(topology, with_full_paths(config), job)
        plan = make_plan(name, note, len(nodes))
        try:
            supervisor = start_supervisor(plan)
        except ValueError as cause:  # Ray: the name is taken
            raise EngineError(f"there is a deployment {name!r} on this cluster already; take it down first") from cause
        try:
            _bring_up(supervisor, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            sweep(name)
            raise
        return cls(supervisor, name, note)

    @classmethod
    def find(cls, name: str = DEFAULT_NAME) -> Deployment:
        """One that is up. Raises: EngineError."""
        supervisor = find_supervisor(name)
        (note,) = answers([supervisor.note.remote()], ANSWER_S, f"the supervisor of {name}")
        return cls(supervisor, name, note)

    @staticmethod
    def remove(name: str = DEFAULT_NAME) -> None:
        """Take down whatever there is of that name, also what is left after a crash; nothing there: nothing happens."""
        _check_ray()
        sweep(name)

    def engine(self, routing: RoutingConfig | None = None) -> Router:
        """Many engines as one; the caller closes it. Raises: ReplicaLost if none is live."""
        routing = routing or RoutingConfig(max_running=self.config.engine.max_running)
        return Router(self.directory, ray_connect(routing), routing)

    def retriever(self, config: RetrieverConfig | None = None) -> ClusterRetriever:
        """The index on the shards; the caller closes it. `config`: another than the deployment's, say for one generation.

        Raises: ConfigError, ModelError, StoreError, RetrievalError.
        """
        if not self.topology.num_shards:
            raise ConfigError(f"the deployment {self.name!r} has no shards, so it finds nothing")
        config = config or self.config.retriever
        config = config.model_copy(update={"fail_closed": self.topology.fail_closed})
        encoder = self.config.encoder if self.topology.num_encoders else Encoder.load(self.config.encoder)
        return ClusterRetriever(config, encoder, self.directory, shard_replicas=self.topology.shard_replicas)

    def nodes(self) -> tuple[str, ...]:
        """The ids of the cluster's nodes, as Ray knows them."""
        return tuple(room.name for room in rooms())

    @contextmanager
    def pipeline(self) -> Iterator[Pipeline]:
        """Questions in, cited answers out, as from one process. Raises: as `engine` and `retriever`.

        Why the imports are in here: they take seconds, which nothing else of a deployment's owner needs.
        """
        from ragspec.engine.target import load_tokenizer
        from ragspec.rag.pipeline import Pipeline
        from ragspec.rag.prompt import PromptBuilder

        config = self.config
        with self.engine() as engine, closing(self.retriever()) as retriever:
            prompts = PromptBuilder(load_tokenizer(config.target.model), engine.max_context_tokens)
            num_passages = config.retriever.num_passages
            yield Pipeline(retriever, engine, prompts, num_passages=num_passages, generation=config.generation)

    def status(self) -> Status:
        """Raises: EngineError if the supervisor does not answer, which lasts some seconds when it died."""
        return status_of(self.name)

    def down(self) -> None:
        """End every actor, placement group and process of it. Safe to repeat. Raises: EngineError if something does not end."""
        if ray.is_initialized():
            sweep(self.name)

    def __exit__(self, *_: object) -> None:
        if self._ends_here:
            self.down()


def _bring_up(supervisor: Any, deadline: float, timeout_s: float) -> None:
    answers([supervisor.begin.remote(Versions.here())], _BEGIN_S, "the deployment's supervisor")
    while True:
        wait_s = min(_SLICE_S, max(0.0, deadline - time.monotonic()))
        (is_ready,) = answers([supervisor.ready.remote(wait_s)], wait_s + ANSWER_S, "the deployment's supervisor")
        if is_ready:
            return
        if time.monotonic() >= deadline:
            (members,) = answers([supervisor.status.remote()], ANSWER_S, "the deployment's supervisor")
            raise EngineError(f"not everything was up after {timeout_s:g} s: {_late(members)}")


def _late(members: Sequence[MemberStatus]) -> str:
    late = [f"{m.name} is {m.state}{f' ({m.error})' if m.error else ''}" for m in members if m.state != "live"]
    return "; ".join(late) or "one died just now"


def _check_ray() -> None:
    if not ray.is_initialized():
        raise EngineError("Ray is not initialised: ray.init(address) first, or pipelines.batch.ray_session.ray_session")
