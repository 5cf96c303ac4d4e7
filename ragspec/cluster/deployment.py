"""A deployment: engines, shards and encoders on a Ray cluster, started and ended as one. Ray restarts its parts.

    >>> with Deployment.up(Topology(num_replicas=2), load_config("config.yaml")) as deployment, deployment.pipeline() as pipeline:
    ...     print(pipeline.ask("When is the mill open?").text)
    >>> Deployment.find("ragspec").status()

States: up -> down. Owns no actor's life beyond that, and no request.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import ray
from pydantic import BaseModel

from ragspec.cluster import registry
from ragspec.cluster.actors import Replica, wait_for_all
from ragspec.cluster.launch import check_nodes, start_replicas, wait_until_loaded, with_full_paths
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.cluster.routing.replica_client import ReplicaClient
from ragspec.cluster.routing.router import Router
from ragspec.cluster.topology import DeploymentSpec, Topology, check_fits
from ragspec.config import PipelineConfig, RetrieverConfig
from ragspec.errors import ConfigError
from ragspec.retrieval.encoder import Encoder

if TYPE_CHECKING:
    from ragspec.rag.pipeline import Pipeline
    from ragspec.rag.prompt import PromptBuilder

DEFAULT_NAME = "ragspec"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_WITHOUT_EFFECT_ON_TEXT = ("retriever.device", "retriever.gpu_memory_bytes", "retriever.fail_closed")
"""Settings that `check_agreement` ignores: they change no text, or the deployment decides them."""


class Deployment(AbstractContextManager["Deployment"]):
    """Needs Ray to be initialised. Safe to use from several threads."""

    def __init__(self, name: str, spec: DeploymentSpec, replicas: Sequence[Replica], record: Any = None) -> None:
        """`record`: of a deployment that ends with this object; Ray ends an actor that is not detached with its last handle."""
        self.name, (self.topology, self.config) = name, spec
        self._replicas, self._record = tuple(replicas), record

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
        """Returns when every replica is live; if anything fails, all of it is taken down again.

        A detached deployment stays until `down`; others end with this process, however that ends.
        Raises: ConfigError for an impossible topology or a folder that a node lacks; ModelError, StoreError; EngineError if the
        name is taken, or for any other failure of a start.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot name a deployment: 1 to 63 letters, digits, dots, dashes, underscores")
        registry.check_ray()
        check_fits(topology, registry.alive_nodes())
        if topology.num_shards and not config.retriever.index_dir:
            raise ConfigError("no index: name its folder as retriever.index_dir, or ask for 0 shards")
        spec = DeploymentSpec(topology, with_full_paths(config))
        lifetime = "detached" if detached else None
        record = registry.start_record(name, spec, lifetime)
        try:
            registry.teardown(name, keep_record=True)  # what an interrupted `down` left
            check_nodes(spec)
            replicas = start_replicas(name, spec, lifetime)
            wait_until_loaded(replicas, timeout_s)
            wait_for_all([record.set_up.remote()], registry.ANSWER_S, "the deployment's record")
        except BaseException:
            registry.teardown(name)
            raise
        return cls(name, spec, replicas, None if detached else record)

    @classmethod
    def find(cls, name: str = DEFAULT_NAME) -> Deployment:
        """A deployment that is up. Raises: EngineError."""
        spec = registry.find_spec(name)
        return cls(name, spec, registry.find_replicas(name, spec.topology))

    def replicas_of(self, kind: str) -> list[Replica]:
        """`kind`: "engine", "shard" or "encoder"."""
        return [replica for replica in self._replicas if registry.kind_of(replica.name) == kind]

    def engine(self, routing: RoutingConfig | None = None) -> Router:
        """All engines as one; the caller closes it. Raises: ReplicaLost if none is live."""
        routing = routing or RoutingConfig(max_num_seqs=self.config.engine.max_num_seqs, hang_s=self._hang_s)
        return Router(self.replicas_of("engine"), lambda replica: ReplicaClient(replica.actor, routing), routing)

    def retriever(self, config: RetrieverConfig | None = None) -> ClusterRetriever:
        """The index on the shards; the caller closes it. `config`: in place of the deployment's, say for one generation.

        Raises: ConfigError, ModelError, StoreError, RetrievalError.
        """
        topology = self.topology
        if not topology.num_shards:
            raise ConfigError(f"the deployment {self.name!r} has no shards, so it finds nothing")
        config = (config or self.config.retriever).model_copy(update={"fail_closed": self.config.retriever.fail_closed})
        encoder = self.config.encoder if topology.num_encoders else Encoder.load(self.config.encoder)
        shards, encoders = (self.replicas_of(kind) for kind in ("shard", "encoder"))
        num_each = topology.shard_replicas
        return ClusterRetriever(config, encoder, shards, encoders, shard_replicas=num_each, hang_s=self._hang_s)

    @contextmanager
    def parts(self, config: PipelineConfig) -> Iterator[tuple[Router, ClusterRetriever | None, PromptBuilder]]:
        """All engines as one, the index if `config` names it, and prompts, with the generation and the words of `config`.

        The imports are in here because they take seconds that nothing else of a deployment needs. Raises: as `retriever`.
        """
        from ragspec.engine.target import load_tokenizer
        from ragspec.rag.prompt import PromptBuilder

        with ExitStack() as stack:
            stack.enter_context(engine := self.engine())
            retriever = None
            if config.retriever.index_dir:
                retriever = stack.enter_context(closing(self.retriever(config.retriever)))
            yield engine, retriever, PromptBuilder.of(load_tokenizer(config.target), engine.max_context_tokens, config)

    @contextmanager
    def pipeline(self) -> Iterator[Pipeline]:
        """Questions in, cited answers out, as from one process. Raises: as `retriever`."""
        from ragspec.rag.pipeline import Pipeline

        with self.parts(self.config) as (engine, retriever, prompts):
            if retriever is None:
                raise ConfigError(f"the deployment {self.name!r} has no index")
            yield Pipeline.of(retriever, engine, prompts, self.config)

    def status(self) -> registry.Status:
        """Raises: EngineError if its record does not answer, which lasts some seconds when that died."""
        return registry.status_of(self.name)

    def down(self) -> None:
        """End every actor and placement group of it. Safe to repeat. Raises: EngineError if something does not end."""
        if ray.is_initialized():
            registry.teardown(self.name)

    def __exit__(self, *_: object) -> None:
        if self._record is not None:
            self.down()

    @property
    def _hang_s(self) -> float:
        """Twice the topology's, because a caller that is slow itself must not kill a healthy replica."""
        return 2 * self.topology.hang_s


def check_agreement(
    name: str, deployed: PipelineConfig, given: PipelineConfig, sections: Collection[str], own: Collection[str] = ()
) -> None:
    """Compare a client's configuration with the deployment's: a client that names another index must not be answered from this.

    `sections`: names of sections, or of single settings ("engine.max_kv_tokens"). `own`: settings the client decides for itself.
    Raises: ConfigError where the client set something that differs in deployment `name`.
    """
    for path, deployed_value, value in _differences(given, with_full_paths(given), deployed):
        if path.startswith(tuple(sections)) and path not in (*own, *_WITHOUT_EFFECT_ON_TEXT):
            raise ConfigError(
                f"the deployment {name!r} runs with {path} {deployed_value!r}, not {value!r}: leave that out, or use "
                "another deployment"
            )


def _differences(
    given: BaseModel, full: BaseModel, deployed: BaseModel, prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Each setting that `given` sets and that differs: its path, the deployment's value and the client's (of `full`)."""
    for field in sorted(given.model_fields_set & type(deployed).model_fields.keys()):
        inner, value, deployed_value = (getattr(section, field) for section in (given, full, deployed))
        if isinstance(inner, BaseModel):
            yield from _differences(inner, value, deployed_value, f"{prefix}{field}.")
        elif value != deployed_value:
            yield f"{prefix}{field}", deployed_value, value
