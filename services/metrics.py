"""Prometheus metrics, with vLLM's names where the meaning is vLLM's, so that its dashboards work, else with `ragspec_`.

    >>> metrics = Metrics("qwen3")
    >>> metrics.first_token(0.041)
    >>> metrics.ended(completion.stats, completion.finish_reason, seconds=1.3)
    >>> metrics.text().decode()

Owns one registry, none of it global. No label holds a text, a tenant or a key. Safe to call from several threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from ragspec.core import FinishReason, GenerationStats
from services.telemetry import Telemetry

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    60.0,
    300.0,
)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_TOKENS = tuple(2**power for power in range(16))
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Metrics:
    """A service's counters and histograms. Units are in the names: seconds and tokens."""

    def __init__(self, model: str, telemetry: Telemetry | None = None) -> None:
        """`telemetry` also gets retrievals, first tokens and finished choices."""
        self._registry, self._model, self._telemetry = CollectorRegistry(), model, telemetry
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens read.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens written.")
        self._cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self._success = self._counter("vllm:request_success", "Choices written to their end.", "finished_reason")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Decode steps, with or without a draft.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Tokens drafted and accepted.")
        self._first_token = self._seconds("vllm:time_to_first_token", "From the request to its first token.")
        self._gaps = self._seconds("vllm:inter_token_latency", "Between two tokens of an answer.", _GAPS)
        self._per_token = self._seconds("vllm:request_time_per_output_token", "An answer's mean.", _GAPS)
        self._whole = self._seconds("vllm:e2e_request_latency", "From the request to its last token.")
        self._queue = self._seconds("vllm:request_queue_time", "Waiting in the engine.")
        self._prefill = self._seconds("vllm:request_prefill_time", "Reading the prompt.")
        self._decode = self._seconds("vllm:request_decode_time", "Writing the answer.")
        self._prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_lengths = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._retrieval = self._seconds("ragspec_retrieval", "Finding passages for one request.")
        self._gateway = self._seconds("ragspec_gateway", "A request before the engine has it, retrieval left out.")
        self._by_drafter = self._counter("ragspec_drafter_accepted_tokens", "Accepted, by who drafted.", "drafter")
        self._guesses = self._counter("ragspec_drafter_guesses", "Guesses of a next token.", "drafter", "position")
        self._right = self._counter("ragspec_drafter_right", "Those that were right.", "drafter", "position")
        self._replays = self._counter("ragspec_replays", "Answers taken up again on another replica.")
        self._near_ties = self._counter(
            "ragspec_near_ties", "Tokens that other roundings could have decided otherwise."
        )
        self._rejected = self._counter("ragspec_gate_rejections", "Requests refused at the gate.", "reason")
        self._aborted = self._counter("ragspec_aborts", "Answers that nobody waited for any more.", "reason")
        self._http = self._counter("ragspec_http_requests", "Requests.", "method", "route", "status")

    def first_token(self, seconds: float) -> None:
        """`seconds` from the request to its first token."""
        self._of(self._first_token).observe(seconds)
        if self._telemetry:
            self._telemetry.first_token(seconds)

    def gap(self, seconds: float, num_tokens: int = 1) -> None:
        """`seconds` between two deltas of a stream, the later with `num_tokens` tokens."""
        self._of(self._gaps).observe(seconds / max(1, num_tokens))

    def retrieved(self, seconds: float) -> None:
        self._of(self._retrieval).observe(seconds)
        if self._telemetry:
            self._telemetry.retrieved(seconds)

    def handed_over(self, seconds: float) -> None:
        """`seconds` from the request to its submission, without retrieval."""
        self._of(self._gateway).observe(seconds)

    def ended(self, stats: GenerationStats, finish_reason: FinishReason, seconds: float) -> None:
        """One choice was written to its end, `seconds` after the request came."""
        if self._telemetry:
            self._telemetry.ended(stats, finish_reason)
        self._of(self._success, finish_reason.value).inc()
        self._of(self._whole).observe(seconds)
        self.worked(stats)
        self._of(self._queue).observe(stats.queue_s)
        self._of(self._prefill).observe(stats.prefill_s)
        self._of(self._decode).observe(stats.decode_s)
        self._of(self._prompt_lengths).observe(stats.num_prompt_tokens)
        self._of(self._answer_lengths).observe(stats.num_output_tokens)
        if (decoded := stats.num_output_tokens - stats.num_first_tokens) > 0:
            self._of(self._per_token).observe(stats.decode_s / decoded)

    def worked(self, stats: GenerationStats) -> None:
        """Counts the computed tokens, also of requests that were given up."""
        self._of(self._prompt_tokens).inc(stats.num_prompt_tokens)
        self._of(self._generation_tokens).inc(stats.num_output_tokens)
        self._of(self._cache_queries).inc(stats.num_prompt_tokens)
        self._of(self._cache_hits).inc(stats.num_cached_tokens)
        self._of(self._drafts).inc(stats.num_steps)
        self._of(self._drafted).inc(stats.num_drafted)
        self._of(self._accepted).inc(stats.num_accepted)
        self._of(self._replays).inc(stats.num_replays)
        self._of(self._near_ties).inc(stats.num_near_ties)
        for drafter, count in stats.accepted_by_drafter.items():
            self._of(self._by_drafter, drafter).inc(count)
        for drafter, counts in stats.positions.items():
            for position, (guessed, right) in enumerate(counts):
                self._of(self._guesses, drafter, str(position)).inc(guessed)
                self._of(self._right, drafter, str(position)).inc(right)

    def aborted(self, reason: str) -> None:
        """`reason`: client_gone, client_too_slow or timeout."""
        self._of(self._aborted, reason).inc()

    def rejected(self, reason: str) -> None:
        """`reason`: queue, concurrency, requests, tokens, draining or key."""
        self._of(self._rejected, reason).inc()

    def answered(self, method: str, route: str, status: int) -> None:
        """`route` is the route's pattern, never the requested path."""
        self._of(self._http, method if method in _METHODS else "other", route, str(status)).inc()

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a gauge that calls `value` for every scrape."""
        self._of(Gauge(name, text, ["model_name"], registry=self._registry)).set_function(value)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self._registry)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return self._histogram(f"{name}_seconds", text, buckets)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)

    def _of(self, metric: _Metric, *labels: str) -> _Metric:
        return metric.labels(self._model, *labels)
