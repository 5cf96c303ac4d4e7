"""A backend on a deployment that is up, as `ragspec cluster up` starts one: a dead engine or shard costs no answer.

>>> with clustered("ragspec", config) as backend: ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from ragspec.cluster.deployment import Deployment, check_agreement
from ragspec.config import PipelineConfig
from ragspec.engine.target import load_tokenizer
from ragspec.retrieval.retriever import Retriever
from services.backend import ServiceBackend
from services.settings import ServiceConfig


@contextmanager
def clustered(name: str, config: ServiceConfig) -> Iterator[ServiceBackend]:
    """Target, index and encoder are the deployment's; service and chat are `config`'s. Needs Ray to be initialised.

    Without shards in the deployment, this process searches the index that `config` names.
    Raises: ConfigError, also where `config` contradicts the deployment; EngineError, ModelError, StoreError.
    """
    deployment = Deployment.find(name)
    searched_there = ("encoder", "retriever") if deployment.topology.num_shards else ()
    check_agreement(
        name,
        deployment.config,
        config,
        ("target", "engine.max_kv_tokens", *searched_there),
        own=("retriever.num_passages",),
    )
    settled = settled_config(deployment.config, config)
    with ExitStack() as stack:
        if deployment.topology.num_shards:
            retriever: Retriever = stack.enter_context(closing(deployment.retriever()))
        else:
            settled = settled.model_copy(update={"retriever": config.retriever, "encoder": config.encoder})
            retriever = Retriever.from_config(config.retriever, config.encoder)
        engine = deployment.engine()
        stack.callback(engine.close)
        tokenizer = load_tokenizer(settled.target)
        yield stack.enter_context(ServiceBackend(engine, tokenizer, retriever, settled))


def settled_config(deployed: PipelineConfig, given: ServiceConfig) -> ServiceConfig:
    """The deployment's configuration, with the service, chat, sampling, prompts and number of passages of `given`."""
    parts = {name: getattr(deployed, name) for name in PipelineConfig.model_fields}
    said = {name: getattr(given.generation, name) for name in given.generation.model_fields_set}
    parts["generation"] = deployed.generation.model_copy(update=said)
    words = {name: getattr(given.prompts, name) for name in given.prompts.model_fields_set}
    parts["prompts"] = deployed.prompts.model_copy(update=words)
    if "num_passages" in given.retriever.model_fields_set:
        update = {"num_passages": given.retriever.num_passages}
        parts["retriever"] = deployed.retriever.model_copy(update=update)
    return given.model_copy(update=parts)
