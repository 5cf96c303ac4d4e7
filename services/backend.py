"""The parts that routes share: engine, index, prompts, stores, metrics and limits.

Owns their order of construction and closing. Knows no HTTP.

>>> with ServiceBackend.embedded(config, retriever) as backend:      # one process
...     app = build_app(backend, SingleKey())
>>> with clustered("ragspec", config) as backend: ...                # on a deployment of `ragspec cluster up`
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ragspec.config import PipelineConfig
from ragspec.core import Request, Say, log_progress
from ragspec.disk import keep_private
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.sequence import Listener
from ragspec.engine.target import load_tokenizer
from ragspec.rag.chat.chat import Chat
from ragspec.rag.chat.conversations import ConversationStore
from ragspec.rag.grammar.dictionaries import DictionaryStore
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, RetrieverLike, default_params
from ragspec.retrieval.batching_retriever import BatchingRetriever
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.retriever import Retriever
from services.limits import RateLimiter
from services.metrics import Metrics, Telemetry
from services.settings import ServiceConfig
from services.stores.library import open_library

ENGINE_GAUGES = (
    ("vllm:num_requests_running", "Choices that are being written.", "num_running"),
    ("vllm:num_requests_waiting", "Choices that wait in the engine.", "num_waiting"),
    ("ragspec_engine_steps", "Steps since the start.", "num_steps"),
    ("vllm:kv_cache_usage_perc", "KV slots in use by those, of 1.", "kv_usage"),
    ("ragspec_kv_offload_bytes", "Offloaded keys and values.", "kv_offload_bytes"),
    ("ragspec_kv_offload_errors", "Copies of blocks out of the pool or back that failed.", "num_kv_offload_errors"),
)
"""A gauge, its help text, and the field of the engine's load that it shows."""


class ServedEngine(EngineLike, Protocol):
    """An `Engine`, or a `Router` over many."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def max_context_tokens(self) -> int: ...

    def submit(self, request: Request, listener: Listener) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def purge(self, salt: str) -> None: ...


class ServiceBackend(AbstractContextManager["ServiceBackend"]):
    """The running parts of one service. `model` is the name that clients use."""

    def __init__(
        self,
        engine: ServedEngine,
        tokenizer: Any,
        retriever: Retriever,
        config: ServiceConfig,
        *closing: Callable[[], object],
    ) -> None:
        """On a running engine and retriever. `closing` says how to close them, the engine first.

        Raises: ConfigError, SaveError, StoreError.
        """
        keep_private(config.service.data_dir)
        self.config, self.model, self.engine = config, config.model_name, engine
        self.default_params = default_params(config.generation)
        self.telemetry = Telemetry.of(config.service.telemetry, self.model)
        self.metrics = Metrics(self.model, self.telemetry)
        self.rate_limiter = RateLimiter(config.service.limits, self.metrics)
        self._watch_load()
        self.conversations = ConversationStore(
            _database_of(config, "conversations"), ttl_s=config.service.conversations.ttl_s
        )
        batching = None if retriever.is_elsewhere else BatchingRetriever(retriever)
        self.retriever: RetrieverLike = batching or retriever
        self.encoder: TextEncoder = retriever.encoder
        self.prompts = PromptBuilder(tokenizer, engine.max_context_tokens, config.wording)
        self.chat = Chat(self.retriever, self.prompts, self.conversations, config.chat, engine)
        self.library = open_library(config, self.encoder, self.chat.forget)
        self.dictionaries = DictionaryStore(_database_of(config, "dictionaries"))
        self._closing = [
            self.library.close,
            *([batching.close] if batching else []),
            *closing,
            self.conversations.close,
            self.dictionaries.close,
            *([self.telemetry.close] if self.telemetry else []),
        ]

    @classmethod
    def embedded(
        cls, config: ServiceConfig, retriever: Retriever | None = None, say: Say = log_progress
    ) -> ServiceBackend:
        """Loads everything into this process. `retriever` None: the configured one. `say`: as for `load_engine`.

        Raises: ConfigError, StoreError, ModelError.
        """
        retriever = retriever or Retriever.from_config(config.retriever, config.encoder)
        engine = load_engine(config.target, config.engine, config.drafting, say=say)
        return cls(engine, engine.target.tokenizer, retriever, config, engine.close)

    @property
    def lost(self) -> str:
        """Why the engine or the encoder of this process is lost; empty as long as they compute."""
        parts = self.engine, self.encoder
        return next((part.lost for part in parts if isinstance(part, Engine | Encoder) and part.lost), "")

    def close(self) -> None:
        for close in self._closing:
            close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch_load(self) -> None:
        watch, limiter, engine = self.metrics.watch, self.rate_limiter, self.engine
        watch("ragspec_requests_in_flight", "Requests that are being answered.", lambda: limiter.running)
        if folder := self.config.service.data_dir:
            text = "Room on the disk of the data folder."
            watch("ragspec_data_free_bytes", text, lambda: shutil.disk_usage(folder).free)
        if isinstance(engine, Engine):
            for name, text, field in ENGINE_GAUGES:
                watch(name, text, partial(_load_of, engine, field))


def _load_of(engine: Engine, field: str) -> float:
    return float(getattr(engine.load(), field))


def _database_of(config: ServiceConfig, name: str) -> Path:
    """The file of a database in the data folder; without one, SQLite's name for a database in memory."""
    folder = config.service.data_dir
    return Path(folder) / f"{name}.sqlite" if folder else Path(":memory:")


@contextmanager
def clustered(name: str, config: ServiceConfig) -> Iterator[ServiceBackend]:
    """Target, index and encoder are the deployment's; service and chat are `config`'s. Needs Ray to be initialised.

    A dead engine or shard of the deployment costs no answer. Without shards in the deployment, this process searches the index
    that `config` names.
    Raises: ConfigError, also where `config` contradicts the deployment; EngineError, ModelError, StoreError.
    """
    from ragspec.cluster.deployment import Deployment, check_agreement  # imports Ray, which other services do without

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
