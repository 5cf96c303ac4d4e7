"""Where a batch job's engines and index run: in its own process, or in a deployment on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pipelines.batch.ray_session import ray_session
from ragspec.cluster.topology import Topology
from ragspec.config import PipelineConfig
from ragspec.errors import ConfigError

if TYPE_CHECKING:  # Why: seconds of imports that a job with nothing to do needs none of
    from ragspec.cluster.deployment import Deployment
    from ragspec.rag.prompt import PromptBuilder
    from ragspec.rag.steps import EngineLike, RetrieverLike

_IN_FLIGHT_PER_RUNNING = 1.5
"""Requests given to engines for each that they run: enough that the next one is there when one ends, wherever it is routed."""


@dataclass(frozen=True, slots=True)
class Machines:
    """What a job asks for. `cluster` names a deployment that is up, in place of the topology; `address` is a Ray cluster's."""

    topology: Topology = field(default_factory=Topology)
    cluster: str = ""
    address: str | None = None

    @property
    def in_process(self) -> bool:
        """Whether the job needs no Ray: one engine, one index, and nobody named a cluster."""
        topology = self.topology
        alone = (topology.replicas, topology.tensor_parallel, topology.num_shards, topology.shard_replicas) == (
            1,
            1,
            1,
            1,
        )
        named = self.cluster or self.address or os.environ.get("RAY_ADDRESS") or "local"
        return alone and named == "local"


_CLIENTS_END_S = 5.0
"""Longer than a watch's poll of its directory."""


class Serving(NamedTuple):
    """What answers. No `retriever` where the job has no index."""

    engine: EngineLike
    retriever: RetrieverLike | None
    prompts: PromptBuilder
    num_machines: int
    max_in_flight: int


class Used(ABC):
    """Machines that a job has, before anything is loaded."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        """The job's, with what the machines have decided already."""

    @abstractmethod
    def serving(self, config: PipelineConfig) -> contextlib.AbstractContextManager[Serving]:
        """Everything loaded, for as long as the context lasts; an index only if the configuration names one.

        Raises: ConfigError, StoreError, ModelError, EngineError.
        """


@contextlib.contextmanager
def used(machines: Machines, config: PipelineConfig, sections: Collection[str] = ("target",)) -> Iterator[Used]:
    """`sections` of the configuration decide what the job writes. Raises: ConfigError, EngineError if there is no cluster."""
    if not machines.topology.replicas:
        raise ConfigError("a job needs an engine: topology.replicas is 0")
    if machines.in_process:
        yield _ThisProcess(config)
    elif not machines.cluster:
        yield _OwnDeployment(config, machines)
    else:
        with _ray(machines):
            yield _NamedDeployment(config, machines.cluster, sections)


class _ThisProcess(Used):
    @contextlib.contextmanager
    def serving(self, config: PipelineConfig) -> Iterator[Serving]:
        from ragspec.engine.loading import load_engine
        from ragspec.rag.prompt import PromptBuilder
        from ragspec.retrieval.retriever import Retriever

        with_index = bool(config.retriever.index_dir)
        retriever = Retriever.from_config(config.retriever, config.encoder) if with_index else None
        with load_engine(config.target, config.engine, config.drafting) as engine:
            prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
            yield Serving(engine, retriever, prompts, 1, _in_flight(config, 1))


class _OwnDeployment(Used):
    """Brought up for the job, and taken down with it."""

    def __init__(self, config: PipelineConfig, machines: Machines) -> None:
        super().__init__(config)
        self._machines = machines

    @contextlib.contextmanager
    def serving(self, config: PipelineConfig) -> Iterator[Serving]:
        with _ray(self._machines):
            from ragspec.cluster.deployment import Deployment

            topology = self._machines.topology
            if not config.retriever.index_dir:
                topology = topology.model_copy(update={"num_shards": 0, "num_encoders": 0})
            name = f"batch-{secrets.token_hex(4)}"
            with Deployment.up(topology, config, name=name) as deployment, _served(deployment, config) as served:
                yield served


class _NamedDeployment(Used):
    """One that is up, and stays so; it decides target, encoder and engines, and which index there is."""

    def __init__(self, config: PipelineConfig, name: str, sections: Collection[str]) -> None:
        """Raises: ConfigError, also for a target or an index that the deployment does not have; EngineError."""
        from ragspec.cluster.agreement import check_agreement
        from ragspec.cluster.deployment import Deployment

        self._deployment = Deployment.find(name)
        its, wanted = self._deployment.config, config.retriever
        check_agreement(name, its, config, sections, own=("retriever.num_passages", "retriever.pointer"))
        update = {"num_passages": wanted.num_passages, "pointer": wanted.pointer or its.retriever.pointer}
        index = its.retriever.model_copy(update=update)
        parts = {"target": its.target, "encoder": its.encoder, "engine": its.engine, "retriever": index}
        super().__init__(config.model_copy(update=parts))

    @contextlib.contextmanager
    def serving(self, config: PipelineConfig) -> Iterator[Serving]:
        with _served(self._deployment, config) as served:
            yield served


@contextlib.contextmanager
def _ray(machines: Machines) -> Iterator[None]:
    """Why stdout is taken away: Ray prints there what it notices of dead processes, and a job's stdout is its summary."""
    with (
        ray_session(machines.address, deployment=machines.cluster),
        contextlib.redirect_stdout(sys.stderr),
    ):
        try:
            yield
        finally:
            _await_clients()


def _await_clients() -> None:
    """Why: a thread that still asks Ray for something while Ray is shut down ends the whole process, as if it had failed."""
    deadline = time.monotonic() + _CLIENTS_END_S
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("ragspec-") and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _served(deployment: Deployment, config: PipelineConfig) -> Iterator[Serving]:
    """What a deployment has, as clients of it; the index in the generation that the configuration names."""
    from ragspec.engine.target import load_tokenizer
    from ragspec.rag.prompt import PromptBuilder

    with contextlib.ExitStack() as stack:
        stack.enter_context(engine := deployment.engine())
        retriever = None
        if config.retriever.index_dir:
            retriever = stack.enter_context(contextlib.closing(deployment.retriever(config.retriever)))
        prompts = PromptBuilder(load_tokenizer(config.target.model), engine.max_context_tokens)
        in_flight = _in_flight(config, deployment.topology.replicas)
        yield Serving(engine, retriever, prompts, len(deployment.status().nodes), in_flight)


def _in_flight(config: PipelineConfig, num_replicas: int) -> int:
    return int(_IN_FLIGHT_PER_RUNNING * config.engine.max_running * num_replicas) + 1
