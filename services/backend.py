"""The parts that routes share: engine, index, prompts, stores, metrics and limits.

Owns their order of construction and closing. Knows no HTTP.

>>> with ServiceBackend.embedded(config) as backend:                 # one process
...     app = build_app(backend, SingleKey())
>>> with clustered("ragspec", config) as backend: ...                # on a deployment of `ragspec cluster up`
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ragspec.config import PipelineConfig, RetrieverConfig
from ragspec.core import Say, log_progress
from ragspec.disk import keep_private
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.target import load_tokenizer
from ragspec.rag.chat.chat import Chat
from ragspec.rag.chat.conversations import ConversationStore
from ragspec.rag.grammar.dictionaries import DictionaryStore
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Closeable, RetrieverLike, default_params
from ragspec.retrieval.batching_retriever import BatchingRetriever, CachingRetriever
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.pointer import configured_index_dir
from ragspec.retrieval.retriever import Retriever
from services.limits import RateLimiter
from services.metrics import Metrics, Telemetry
from services.openai.answer_fields import TokenTexts
from services.settings import ServiceConfig
from services.stores.document_view import DocumentViews
from services.stores.library import open_library

if TYPE_CHECKING:
    from ragspec.cluster.routing.router import Router  # imports Ray, which a service in one process does without

ServedEngine: TypeAlias = "Engine | Router"

ENGINE_GAUGES = (
    ("vllm:num_requests_running", "Choices that are being written.", "num_running"),
    ("vllm:num_requests_waiting", "Choices that wait in the engine.", "num_waiting"),
    ("ragspec_engine_steps", "Steps since the start.", "num_steps"),
    ("vllm:kv_cache_usage_perc", "KV slots in use by those, of 1.", "kv_usage"),
    ("ragspec_kv_offload_bytes", "Offloaded keys and values.", "kv_offload_bytes"),
    ("ragspec_kv_offload_errors", "Copies of blocks out of the pool or back that failed.", "num_kv_offload_errors"),
)
"""A gauge, its help text, and the field of the engine's load that it shows."""


class LoadedModel(NamedTuple):
    """An engine and its target's tokenizer."""

    engine: ServedEngine
    tokenizer: Any


@dataclass(frozen=True)
class ServedModel:
    """A model under the `name` that clients use: prompts in its layout, chat in its prompts, counters under its name.

    `retriever`: how passages are found for it.
    """

    name: str
    retriever: RetrieverConfig
    engine: ServedEngine
    prompts: PromptBuilder
    chat: Chat
    metrics: Metrics
    token_texts: TokenTexts


class ServiceBackend(Closeable):
    """The running parts of one service. `models` are its models by name; `target` is the first of them, which answers."""

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        retriever: Retriever,
        config: ServiceConfig,
        *closing: Callable[[], object],
    ) -> None:
        """On running engines, `config.model_name`'s first, and a retriever. `closing` says how to close them, the engines first.

        Raises: ConfigError, SaveError, StoreError.
        """
        keep_private(config.service.data_dir)
        self.config, self.model = config, config.model_name
        self.default_params = default_params(config.generation)
        self.telemetry = Telemetry.of(config.service.telemetry, self.model)
        self.metrics = Metrics(self.model, self.telemetry)
        self.rate_limiter = RateLimiter(config.service.limits, self.metrics)
        ttl_s = config.service.conversations.ttl_s
        self.conversations = ConversationStore(_database_of(config, "conversations"), ttl_s=ttl_s)
        batching = None if retriever.is_elsewhere else BatchingRetriever(retriever)
        self.retriever: RetrieverLike = CachingRetriever(batching or retriever, lambda: retriever.generation)
        self.encoder: TextEncoder = retriever.encoder
        self.models = {name: self._served(name, loaded) for name, loaded in models.items()}
        self.target = self.models[self.model]
        self.corrector = self.models[config.service.grammar.model or self.model]
        self._watch_load()
        self.library = open_library(config, self.encoder, self._forget)
        self.documents = DocumentViews(configured_index_dir(config.retriever), self.library, retriever)
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
    def embedded(cls, config: ServiceConfig) -> ServiceBackend:
        """Loads everything into this process. Raises: ConfigError, StoreError, ModelError."""
        retriever = Retriever.from_config(config.retriever, config.encoder)
        with ExitStack() as stack:
            return cls(load_models(config, stack), retriever, config, stack.pop_all().close)

    @property
    def lost(self) -> str:
        """Why an engine or the encoder of this process is lost; empty as long as they compute."""
        parts = (*(model.engine for model in self.models.values()), self.encoder)
        return next((part.lost for part in parts if isinstance(part, Engine | Encoder) and part.lost), "")

    def close(self) -> None:
        """Closes all parts, also where one of them fails."""
        with ExitStack() as parts:
            for close in reversed(self._closing):
                parts.callback(close)

    def _watch_load(self) -> None:
        watch, limiter = self.metrics.watch, self.rate_limiter
        watch("ragspec_requests_in_flight", "Requests that are being answered.", lambda: limiter.running)
        if folder := self.config.service.data_dir:
            text = "Room on the disk of the data folder."
            watch("ragspec_data_free_bytes", text, lambda: shutil.disk_usage(folder).free)
        for name, text, field in ENGINE_GAUGES:
            for model in self.models.values():
                if isinstance(model.engine, Engine):
                    model.metrics.watch(name, text, partial(_load_of, model.engine, field))

    def _served(self, name: str, loaded: LoadedModel) -> ServedModel:
        engine, config = loaded.engine, self.config.for_model(name)
        prompts = PromptBuilder.of(loaded.tokenizer, engine.max_context_tokens, config)
        if isinstance(engine, Engine) and 0 < len(prompts.beginning) < engine.max_context_tokens:
            engine.pin(prompts.beginning)
        chat = Chat(self.retriever, prompts, self.conversations, self.config.chat, engine)
        counters, texts = self.metrics.of_model(name), TokenTexts(loaded.tokenizer)
        return ServedModel(name, config.retriever, engine, prompts, chat, counters, texts)

    def _forget(self, tenant: str, documents: Sequence[str]) -> None:
        """As `Chat.forget`, in the caches of every model. Raises: the first error, once every cache is empty."""
        with ExitStack() as stack:
            for model in self.models.values():
                stack.callback(model.chat.forget, tenant, documents)


def load_models(
    config: ServiceConfig, stack: ExitStack, say: Say = log_progress, quiet: Callable[[], object] = lambda: None
) -> dict[str, LoadedModel]:
    """All models of `config`, the target first; `stack` closes them. Several engines run their steps in one thread, in turn.

    `say`, `quiet`: as for `load_engine`. Raises: ConfigError, ModelError, SaveError.
    """
    steps = stack.enter_context(ThreadPoolExecutor(1, "ragspec-steps")) if config.service.models else None
    loaded: dict[str, LoadedModel] = {}
    for name in (config.model_name, *config.service.models):
        own = config.for_model(name)
        named = partial(_say_of, say, name) if steps else say
        engine = load_engine(own.target, own.engine, own.drafting, say=named, quiet=quiet, step_thread=steps)
        stack.callback(engine.close)
        loaded[name] = LoadedModel(engine, engine.target.tokenizer)
    return loaded


def _say_of(say: Say, name: str, stage: str, done: int = 0, total: int = 0, /) -> None:
    say(f"{name}: {stage}", done, total)


def _load_of(engine: Engine, field: str) -> float:
    return float(getattr(engine.load(), field))


def _database_of(config: ServiceConfig, name: str) -> Path:
    """The file of a database in the data folder; without one, SQLite's name for a database in memory."""
    folder = config.service.data_dir
    return Path(folder) / f"{name}.sqlite" if folder else Path(":memory:")


@contextmanager
def clustered(name: str, config: ServiceConfig) -> Iterator[ServiceBackend]:
    """Target, index and encoder are the deployment's; service and chat are `config`'s. Each of `config.service.models` is the
    target of the deployment of its name. Needs Ray to be initialised.

    A dead engine or shard of the deployment costs no answer. Without shards in the deployment, this process searches the index
    that `config` names.
    Raises: ConfigError, also where `config` contradicts the deployment; EngineError, ModelError, StoreError.
    """
    from ragspec.cluster.deployment import Deployment, check_agreement  # imports Ray, which other services do without

    deployment = Deployment.find(name)
    searched_there = ("encoder", "retriever") if deployment.topology.num_shards else ()
    sections = ("target", "engine.max_kv_tokens", *searched_there)
    check_agreement(name, deployment.config, config, sections, own=("retriever.num_passages",))
    settled = settled_config(deployment.config, config)
    with ExitStack() as stack:
        if deployment.topology.num_shards:
            retriever: Retriever = stack.enter_context(closing(deployment.retriever()))
        else:
            own = {"retriever": config.retriever, "encoder": config.encoder}
            settled = settled.model_copy(update=own).suit_target()
            retriever = Retriever.from_config(config.retriever, config.encoder)
        models = {}
        for model_name in (settled.model_name, *settled.service.models):
            if model_name in settled.service.models:
                deployment = Deployment.find(model_name)
                check_agreement(model_name, deployment.config, settled.for_model(model_name), ("target",))
            engine = deployment.engine()
            stack.callback(engine.close)
            models[model_name] = LoadedModel(engine, load_tokenizer(deployment.config.target))
        yield stack.enter_context(ServiceBackend(models, retriever, settled))


def settled_config(deployed: PipelineConfig, given: ServiceConfig) -> ServiceConfig:
    """The deployment's configuration, with the service, chat, sampling, prompts and number of passages of `given`."""
    parts = {name: getattr(deployed, name) for name in PipelineConfig.model_fields if name != "chat"}
    parts["generation"] = given.generation.over(deployed.generation)
    parts["prompts"] = given.prompts.over(deployed.prompts)
    if "num_passages" in given.retriever.model_fields_set:
        update = {"num_passages": given.retriever.num_passages}
        parts["retriever"] = deployed.retriever.model_copy(update=update)
    return given.model_copy(update=parts).suit_target()
