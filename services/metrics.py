"""Metrics for Prometheus and traces for OpenTelemetry.

`Metrics` uses vLLM's names where the meaning is vLLM's, so that its dashboards work, else names with `ragspec_`. `Telemetry`
writes spans by the conventions for generative AI: chat, text_completion, embeddings and retrieval. It is off without an exporter,
and spans hold texts of users and answers only with `telemetry.content`.

    >>> metrics = Metrics("qwen3")
    >>> metrics.first_token(0.041)
    >>> metrics.ended(completion.stats, completion.finish_reason, seconds=1.3)
    >>> metrics.text().decode()

Owns one registry and one tracer, neither global. No label holds a text, a tenant or a key. Safe to call from several threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragspec.core import FinishReason, GenerationStats
from ragspec.errors import ConfigError
from services.settings import TelemetryConfig

_BELOW_A_SECOND = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_SECONDS = (*_BELOW_A_SECOND, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 60.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKENS = tuple(2**power for power in range(16))
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_STATS_COUNTERS = (
    ("num_prompt_tokens", "vllm:prompt_tokens", "Tokens read."),
    ("num_output_tokens", "vllm:generation_tokens", "Tokens written."),
    ("num_prompt_tokens", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("num_cached_tokens", "vllm:prefix_cache_hits", "Prompt tokens found there."),
    ("num_restored_tokens", "ragspec_kv_offload_hits", "Tokens read back from KV offloading, again after preemption."),
    ("num_steps", "vllm:spec_decode_num_drafts", "Decode steps, with or without a draft."),
    ("num_drafted", "vllm:spec_decode_num_draft_tokens", "Tokens drafted."),
    ("num_accepted", "vllm:spec_decode_num_accepted_tokens", "Tokens drafted and accepted."),
    ("draft_s", "ragspec_draft_seconds", "Time of the drafters."),
    ("num_replays", "ragspec_replays", "Answers taken up again on another replica."),
    ("num_near_ties", "ragspec_near_ties", "Tokens that other roundings could have decided otherwise."),
)
"""A field of `GenerationStats`, the counter that sums it, and the counter's help text."""
_ABORTED = ("client_gone", "client_too_slow", "timeout")
_REJECTED = ("queue", "concurrency", "requests", "tokens", "draining", "key")
"""Reasons of refusals. Why named here: a counter that begins with its first event hides that event from `rate`."""
_STATS_HISTOGRAMS = (
    ("queue_s", "vllm:request_queue_time_seconds", "Waiting in the engine.", _SECONDS),
    ("prefill_s", "vllm:request_prefill_time_seconds", "Reading the prompt.", _SECONDS),
    ("decode_s", "vllm:request_decode_time_seconds", "Writing the answer.", _SECONDS),
    ("num_prompt_tokens", "vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    ("num_output_tokens", "vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS),
)
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


class Metrics:
    """A service's counters and histograms. Units are in the names: seconds and tokens."""

    def __init__(self, model: str, telemetry: Telemetry | None = None) -> None:
        """`telemetry` also gets retrievals, first tokens and finished choices."""
        self._registry, self._telemetry, self._gauges = CollectorRegistry(), telemetry, dict[str, Gauge]()
        counter, histogram = self._counter, self._histogram
        self._totals = [(field, counter(name, text)) for field, name, text in _STATS_COUNTERS]
        self._per_choice = [(field, histogram(name, text, buckets)) for field, name, text, buckets in _STATS_HISTOGRAMS]
        self._first_token = histogram("vllm:time_to_first_token_seconds", "From the request to its first token.")
        self._gaps = histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", _GAPS)
        self._per_token = histogram("vllm:request_time_per_output_token_seconds", "An answer's mean.", _GAPS)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its last token.")
        self._retrieval = histogram("ragspec_retrieval_seconds", "Finding passages for one request.")
        self._encoding = histogram("ragspec_encode_seconds", "Encoding a question, if it is not answered from memory.")
        self._search = histogram("ragspec_search_seconds", "Searching the index for one request, likewise.")
        self._gateway = histogram("ragspec_gateway_seconds", "A request before the engine has it, retrieval left out.")
        self._success = counter("vllm:request_success", "Choices written to their end.", "finished_reason")
        self._per_position = counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by depth.", "position")
        self._by_drafter = counter("ragspec_drafter_accepted_tokens", "Accepted, by who drafted.", "drafter")
        self._guesses = counter("ragspec_drafter_guesses", "Guesses of a next token.", "drafter", "position")
        self._right = counter("ragspec_drafter_right", "Those that were right.", "drafter", "position")
        self._sentences = counter("ragspec_answer_sentences", "Sentences of answers over passages.", "label")
        self._rejected = counter("ragspec_gate_rejections", "Requests refused at the gate.", "reason")
        self._aborted = counter("ragspec_aborts", "Answers that nobody waited for any more.", "reason")
        self._http = counter("ragspec_http_requests", "Requests.", "method", "route", "status")
        ProcessCollector(registry=self._registry)
        self._show(model)

    def of_model(self, model: str) -> Metrics:
        """The same counters under the name of another model."""
        other = copy(self)
        other._show(model)
        return other

    def _show(self, model: str) -> None:
        """Counts for this model from now on; its counters begin at 0 before the first event."""
        self._model = model
        for _, total in self._totals:
            total.labels(model)
        for family, values in ((self._success, FinishReason), (self._rejected, _REJECTED), (self._aborted, _ABORTED)):
            for value in values:
                family.labels(model, value)

    def first_token(self, seconds: float) -> None:
        """`seconds` from the request to its first token."""
        self._first_token.labels(self._model).observe(seconds)
        if self._telemetry:
            self._telemetry.first_token(seconds)

    def gap(self, seconds: float, num_tokens: int = 1) -> None:
        """`seconds` between two deltas of a stream, the later with `num_tokens` tokens."""
        self._gaps.labels(self._model).observe(seconds / max(1, num_tokens))

    def retrieved(self, seconds: float, encode_s: float, search_s: float) -> None:
        self._retrieval.labels(self._model).observe(seconds)
        if search_s:
            self._encoding.labels(self._model).observe(encode_s)
            self._search.labels(self._model).observe(search_s)
        if self._telemetry:
            self._telemetry.retrieved(seconds)

    def handed_over(self, seconds: float) -> None:
        """`seconds` from the request to its submission, without retrieval."""
        self._gateway.labels(self._model).observe(seconds)

    def ended(self, stats: GenerationStats, finish_reason: FinishReason, seconds: float) -> None:
        """One choice was written to its end, `seconds` after the request came."""
        if self._telemetry:
            self._telemetry.ended(stats, finish_reason)
        self._success.labels(self._model, finish_reason.value).inc()
        self._whole.labels(self._model).observe(seconds)
        self.worked(stats)
        for field, histogram in self._per_choice:
            histogram.labels(self._model).observe(getattr(stats, field))
        if (decoded := stats.num_output_tokens - stats.num_first_tokens) > 0:
            self._per_token.labels(self._model).observe(stats.decode_s / decoded)

    def worked(self, stats: GenerationStats) -> None:
        """Counts the computed tokens, also of requests that were given up."""
        for field, counter in self._totals:
            if count := getattr(stats, field):
                counter.labels(self._model).inc(count)
        for drafter, count in stats.accepted_by_drafter.items():
            self._by_drafter.labels(self._model, drafter).inc(count)
        for drafter, counts in stats.positions.items():
            for position, (guessed, right) in enumerate(counts):
                self._guesses.labels(self._model, drafter, str(position)).inc(guessed)
                self._right.labels(self._model, drafter, str(position)).inc(right)
                self._per_position.labels(self._model, str(position)).inc(right)

    def labelled(self, labels: Sequence[str]) -> None:
        """The labels of an answer's sentences: quoted, supported or unsupported."""
        for label in labels:
            self._sentences.labels(self._model, label).inc()

    def aborted(self, reason: str) -> None:
        """`reason`: of `_ABORTED`."""
        self._aborted.labels(self._model, reason).inc()

    def rejected(self, reason: str) -> None:
        """`reason`: of `_REJECTED`."""
        self._rejected.labels(self._model, reason).inc()

    def answered(self, method: str, route: str, status: int) -> None:
        """`route` is the route's pattern, never the requested path."""
        self._http.labels(self._model, method if method in _METHODS else "other", route, str(status)).inc()

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a gauge that calls `value` for every scrape."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, ["model_name"], registry=self._registry)
        self._gauges[name].labels(self._model).set_function(value)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)


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
            needed = "pip install opentelemetry-exporter-otlp-proto-http"
            raise ConfigError(f"service.telemetry.exporter is otlp, which needs: {needed}") from cause
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
