"""Where a batch job's engines and index run: in the job's process, in a deployment of its own on Ray, or in one that is up.

>>> with open_backend(BackendSpec(topology), config) as backend, backend.load(backend.config) as runtime: ...
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pipelines.batch.ray_session import ray_session
from ragspec.cluster.topology import Topology
from ragspec.config import PipelineConfig
from ragspec.errors import ConfigError

if TYPE_CHECKING:  # Why: these imports take seconds, and a job whose rows are all answered needs none of them
    from ragspec.cluster.deployment import Deployment
    from ragspec.rag.prompt import PromptBuilder
    from ragspec.rag.steps import EngineLike, RetrieverLike

_IN_FLIGHT_PER_RUNNING = 1.5
"""Requests in flight per sequence that the engines run: an engine that finishes one finds the next in its queue."""

_THREADS_END_S = 5.0


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a job asks for. `cluster` names a deployment that is up, in place of the topology; `address` is a Ray cluster's."""

    topology: Topology = field(default_factory=Topology)
    cluster: str = ""
    address: str | None = None

    @property
    def in_process(self) -> bool:
        """Whether the job needs no Ray: one engine, one index, and no cluster is named."""
        topology = self.topology
        counts = {topology.num_replicas, topology.tensor_parallel_size, topology.num_shards, topology.shard_replicas}
        address = self.cluster or self.address or os.environ.get("RAY_ADDRESS") or "local"
        return counts == {1} and address == "local"


class Runtime(NamedTuple):
    """Loaded engines and index. `retriever` is None if the job has no index."""

    engine: EngineLike
    retriever: RetrieverLike | None
    prompts: PromptBuilder
    num_machines: int
    max_in_flight: int


class Backend(NamedTuple):
    """`config` is the job's, with the settings that a running deployment decides. `load` loads engines, and the index if the
    configuration names one, for as long as its context lasts. It raises ConfigError, StoreError, ModelError, EngineError.
    """

    config: PipelineConfig
    load: Callable[[PipelineConfig], contextlib.AbstractContextManager[Runtime]]


@contextlib.contextmanager
def open_backend(
    spec: BackendSpec, config: PipelineConfig, sections: Collection[str] = ("target",)
) -> Iterator[Backend]:
    """`sections`: the parts of the configuration that must agree with a running deployment's.

    Raises: ConfigError, EngineError if there is no cluster.
    """
    if not spec.topology.num_replicas:
        raise ConfigError("a job needs an engine: topology.num_replicas is 0")
    if spec.in_process:
        yield Backend(config, _load_in_process)
    elif not spec.cluster:
        yield Backend(config, partial(_load_own_deployment, spec))
    else:
        with _ray(spec):
            from ragspec.cluster.deployment import Deployment

            deployment = Deployment.find(spec.cluster)
            deployed = _deployed_config(deployment, config, spec.cluster, sections)
            yield Backend(deployed, partial(_connect, deployment))


@contextlib.contextmanager
def _load_in_process(config: PipelineConfig) -> Iterator[Runtime]:
    from ragspec.engine.loading import load_engine
    from ragspec.rag.prompt import PromptBuilder
    from ragspec.retrieval.retriever import Retriever

    retriever = Retriever.from_config(config.retriever, config.encoder) if config.retriever.index_dir else None
    with load_engine(config.target, config.engine, config.drafting) as engine:
        prompts = PromptBuilder.of(engine.target.tokenizer, engine.max_context_tokens, config)
        yield Runtime(engine, retriever, prompts, 1, _max_in_flight(config, 1))


@contextlib.contextmanager
def _load_own_deployment(spec: BackendSpec, config: PipelineConfig) -> Iterator[Runtime]:
    """A deployment that lives as long as the job."""
    with _ray(spec):
        from ragspec.cluster.deployment import Deployment

        topology = spec.topology
        if not config.retriever.index_dir:
            topology = topology.model_copy(update={"num_shards": 0, "num_encoders": 0})
        name = f"batch-{secrets.token_hex(4)}"
        with Deployment.up(topology, config, name=name) as deployment, _connect(deployment, config) as runtime:
            yield runtime


def _deployed_config(
    deployment: Deployment, config: PipelineConfig, name: str, sections: Collection[str]
) -> PipelineConfig:
    """The deployment decides target, encoder, engine and index; the job decides the generation and the number of passages.

    Raises: ConfigError, also for a target or an index that the deployment does not have.
    """
    from ragspec.cluster.deployment import check_agreement

    deployed = deployment.config
    check_agreement(name, deployed, config, sections, own=("retriever.num_passages", "retriever.pointer"))
    pointer = config.retriever.pointer or deployed.retriever.pointer
    said = config.retriever.model_dump(include=config.retriever.model_fields_set & {"num_passages"})
    parts = {part: getattr(deployed, part) for part in ("target", "encoder", "engine")}
    retriever = deployed.retriever.model_copy(update={"pointer": pointer, **said})
    return config.model_copy(update={**parts, "retriever": retriever}).suit_target()


@contextlib.contextmanager
def _connect(deployment: Deployment, config: PipelineConfig) -> Iterator[Runtime]:
    """Clients of a deployment; the index in the generation that the configuration names."""
    with deployment.parts(config) as (engine, retriever, prompts):
        in_flight = _max_in_flight(config, deployment.topology.num_replicas)
        yield Runtime(engine, retriever, prompts, len(deployment.status().nodes), in_flight)


def _max_in_flight(config: PipelineConfig, num_replicas: int) -> int:
    return int(_IN_FLIGHT_PER_RUNNING * config.engine.max_num_seqs * num_replicas) + 1


@contextlib.contextmanager
def _ray(spec: BackendSpec) -> Iterator[None]:
    """Why stdout is redirected: Ray reports dead processes there, and a job's stdout is its summary."""
    with ray_session(spec.address, deployment=spec.cluster), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            _join_client_threads()


def _join_client_threads() -> None:
    """Why: a thread that calls Ray while Ray shuts down aborts the whole process."""
    deadline = time.monotonic() + _THREADS_END_S
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("ragspec-") and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
