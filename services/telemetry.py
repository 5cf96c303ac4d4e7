"""Traces with OpenTelemetry's conventions for generative AI: spans chat, text_completion, embeddings and retrieval.

Owns the tracer; off unless an exporter is configured. Spans hold texts of users and answers only with `telemetry.content`.

    >>> telemetry = Telemetry.of(TelemetryConfig(exporter="otlp"), "qwen3")
    >>> app.add_middleware(TracingMiddleware, telemetry=telemetry)
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragspec.core import FinishReason, GenerationStats
from ragspec.errors import ConfigError
from services.settings import TelemetryConfig

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_REQUEST_ATTRIBUTES = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
    "max_num_results": "gen_ai.request.top_k",
}
_MAX_CONTENT_BYTES = 2**20


class Telemetry:
    """Owns a tracer that is not global, so that two services in one process do not mix their spans."""

    def __init__(self, exporter: SpanExporter, model: str, *, content: bool = False) -> None:
        self.content = content
        self._model = model
        resource = Resource.create({"service.name": "ragspec"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("ragspec")

    @classmethod
    def of(cls, config: TelemetryConfig, model: str) -> Telemetry | None:
        """None without an exporter. Raises: ConfigError if the exporter's package is missing."""
        if config.exporter == "none":
            return None
        if config.exporter == "console":
            return cls(ConsoleSpanExporter(), model, content=config.content)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as cause:
            raise ConfigError(
                "service.telemetry.exporter is otlp, which needs: pip install opentelemetry-exporter-otlp-proto-http"
            ) from cause
        return cls(OTLPSpanExporter(), model, content=config.content)

    def begin(self, operation: str, headers: Headers, request_id: str) -> Span:
        """A span under the client's span, if the headers name one."""
        context = TraceContextTextMapPropagator().extract(headers)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "ragspec",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "ragspec.request_id": request_id,
        }
        return self.tracer.start_span(f"{operation} {self._model}", context, SpanKind.SERVER, attributes)

    def retrieved(self, seconds: float) -> None:
        """Records a retrieval of the running request that ends now."""
        end = time.time_ns()
        attributes = {"gen_ai.operation.name": "retrieval", "gen_ai.provider.name": "ragspec"}
        span = self.tracer.start_span("retrieval", attributes=attributes, start_time=end - int(seconds * 1e9))
        span.end(end)

    def first_token(self, seconds: float) -> None:
        trace.get_current_span().set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def ended(self, stats: GenerationStats, finish_reason: FinishReason) -> None:
        """Adds a finished choice of the running request."""
        span = trace.get_current_span()
        known: Mapping[str, Any] = getattr(span, "attributes", None) or {}
        reasons = (*known.get("gen_ai.response.finish_reasons", ()), finish_reason.value)
        written = known.get("gen_ai.usage.output_tokens", 0) + stats.num_output_tokens
        span.set_attributes(
            {
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
                "gen_ai.usage.output_tokens": written,
                "ragspec.acceptance_length": stats.acceptance_length,
            }
        )

    def close(self) -> None:
        """Exports the remaining spans."""
        self._provider.shutdown()


class TracingMiddleware:
    """ASGI middleware inside `AuthMiddleware`: one span around each request that a model or an index answers."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = operation_of(scope)
        if operation is None:
            await self._app(scope, receive, send)
            return
        span = self._telemetry.begin(operation, Headers(scope=scope), scope["state"]["request_id"])
        answer, has_content = bytearray(), self._telemetry.content

        async def traced_receive() -> Message:
            message = await receive()
            _record_request(span, message.get("body", b""), has_content)
            return message

        async def traced_send(message: Message) -> None:
            nonlocal answer
            await send(message)
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            elif has_content and len(answer) < _MAX_CONTENT_BYTES:
                answer += message.get("body", b"")

        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                await self._app(scope, traced_receive, traced_send)
            except BaseException as error:  # without its message, which may quote a user's text
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise
            finally:
                if answer:
                    text = answer[:_MAX_CONTENT_BYTES].decode("utf-8", "replace")
                    span.set_attribute("gen_ai.output.messages", text)


def operation_of(scope: Scope) -> str | None:
    """The conventions' name of a request's operation; None for other requests."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path: str = scope["path"]
    if path.startswith("/v1/vector_stores/") and path.endswith("/search"):
        return "retrieval"
    return _OPERATIONS.get(path)


def _record_request(span: Span, body: bytes, has_content: bool) -> None:
    try:
        fields = json.loads(body)
    except ValueError:
        return
    if not isinstance(fields, dict):
        return
    for name, attribute in _REQUEST_ATTRIBUTES.items():
        if isinstance(value := fields.get(name), int | float):
            span.set_attribute(attribute, value)
    if has_content:
        given = [fields[name] for name in ("messages", "prompt", "input", "query") if name in fields]
        span.set_attribute("gen_ai.input.messages", json.dumps(given[0] if given else None))
