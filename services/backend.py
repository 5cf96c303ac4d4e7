"""The parts that routes share: engine, index, prompts, stores, metrics and limits.

Owns their order of construction and closing. Knows no HTTP.

>>> with Backend.embedded(config, retriever) as backend:      # one process
...     app = build_app(backend, SingleKey())
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ragspec.core import Request
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.sequence import Listener
from ragspec.rag.chat.chat import Chat
from ragspec.rag.chat.conversations import ConversationStore
from ragspec.rag.grammar.dictionaries import DictionaryStore
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, RetrieverLike
from ragspec.retrieval.batching_retriever import BatchingRetriever
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.retriever import Retriever
from services.limits import RateLimiter
from services.metrics import Metrics
from services.settings import ServiceConfig
from services.stores.library import Library, open_library
from services.telemetry import Telemetry


class ServedEngine(EngineLike, Protocol):
    """An `Engine`, or a `Router` over many."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def max_context_tokens(self) -> int: ...

    def submit(self, request: Request, listener: Listener) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def purge(self, salt: str) -> None: ...


@dataclass(frozen=True)
class Backend(AbstractContextManager["Backend"]):
    """`model` is the name that clients use. `closing` holds the callbacks that `close` calls, in order."""

    model: str
    engine: ServedEngine
    prompts: PromptBuilder
    retriever: RetrieverLike
    encoder: TextEncoder
    chat: Chat
    library: Library
    dictionaries: DictionaryStore
    config: ServiceConfig
    metrics: Metrics
    telemetry: Telemetry | None
    rate_limiter: RateLimiter
    closing: tuple[Callable[[], object], ...] = ()

    @classmethod
    def of(
        cls,
        engine: ServedEngine,
        tokenizer: Any,
        retriever: Retriever,
        config: ServiceConfig,
        *closing: Callable[[], object],
    ) -> Backend:
        """Builds a backend on a running engine and retriever. `closing` says how to close them, the engine first."""
        telemetry = Telemetry.of(config.service.telemetry, config.model_name)
        metrics = Metrics(config.model_name, telemetry)
        rate_limiter = RateLimiter(config.service.limits, metrics)
        metrics.watch("ragspec_requests_in_flight", "Requests that are being answered.", lambda: rate_limiter.running)
        if isinstance(engine, Engine):
            _watch(metrics, engine)
        prompts = PromptBuilder(tokenizer, engine.max_context_tokens)
        conversations = open_conversations(config)
        joined = None if retriever.is_elsewhere else BatchingRetriever(retriever)
        chat = Chat(joined or retriever, prompts, conversations, config.chat, engine)
        library = open_library(config, retriever.encoder, chat.forget)
        dictionaries = open_dictionaries(config)
        shared, last = [joined.close] if joined else [], [telemetry.close] if telemetry else []
        return cls(
            model=config.model_name,
            engine=engine,
            prompts=prompts,
            retriever=joined or retriever,
            encoder=retriever.encoder,
            chat=chat,
            library=library,
            dictionaries=dictionaries,
            config=config,
            metrics=metrics,
            telemetry=telemetry,
            rate_limiter=rate_limiter,
            closing=(library.close, *shared, *closing, conversations.close, dictionaries.close, *last),
        )

    @classmethod
    def embedded(cls, config: ServiceConfig, retriever: Retriever | None = None) -> Backend:
        """Loads everything into this process. `retriever` None: the configured one.

        Raises: ConfigError, StoreError, ModelError.
        """
        retriever = retriever or Retriever.from_config(config.retriever, config.encoder)
        engine = load_engine(config.target, config.engine, config.drafting)
        return cls.of(engine, engine.target.tokenizer, retriever, config, engine.close)

    def close(self) -> None:
        for close in self.closing:
            close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _watch(metrics: Metrics, engine: Engine) -> None:
    metrics.watch("vllm:num_requests_running", "Choices that are being written.", lambda: engine.load().num_running)
    metrics.watch("vllm:num_requests_waiting", "Choices that wait in the engine.", lambda: engine.load().num_waiting)
    metrics.watch("vllm:kv_cache_usage_perc", "KV slots in use by those, of 1.", lambda: engine.load().kv_usage)


def open_conversations(config: ServiceConfig) -> ConversationStore:
    """Raises: SaveError, StoreCorrupt."""
    folder, kept = config.service.data_dir, config.service.conversations
    path = Path(folder) / "conversations.sqlite" if folder else Path(":memory:")
    return ConversationStore(path, ttl_s=kept.ttl_s, max_bytes_per_tenant=kept.max_bytes)


def open_dictionaries(config: ServiceConfig) -> DictionaryStore:
    """Raises: SaveError, StoreCorrupt."""
    folder = config.service.data_dir
    return DictionaryStore(Path(folder) / "dictionaries.sqlite" if folder else Path(":memory:"))
