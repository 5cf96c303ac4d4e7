"""What is counted, and what spans tell: the numbers of the answers that were given, and nothing of what they said."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx2 as httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from service_parts import MODEL, Service, Serving, soon

from ragspec.core import GenerationStats
from ragspec.errors import ConfigError
from services.metrics import Metrics, Telemetry
from services.settings import TelemetryConfig

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "What is a xylophone?"}], "max_tokens": 8, "seed": 1}


def values(service: Service) -> dict[str, float]:
    """By name, without labels; of several the sum."""
    found: dict[str, float] = {}
    for line in service.metrics():
        if not line.startswith("#"):
            name, value = line.partition("{")[0], line.rpartition(" ")[2]
            found[name] = found.get(name, 0.0) + float(value)
    return found


@pytest.fixture(scope="module")
def answered(service: Service) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """A reply, and the counters before and after it."""
    before = values(service)
    with service.client() as client:
        reply = client.post("/v1/chat/completions", json={**ASKED, "metrics": True}).raise_for_status().json()
    return reply, before, values(service)


def test_counters_grow_by_what_the_reply_says(answered: tuple[dict[str, Any], ...]) -> None:
    """A dashboard and a bill disagree."""
    reply, before, after = answered
    usage, grown = reply["usage"], {name: value - before.get(name, 0.0) for name, value in answered[2].items()}
    assert grown["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert grown["vllm:generation_tokens_total"] == usage["completion_tokens"]
    assert grown["vllm:prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert grown["vllm:request_success_total"] == 1
    drafting = reply["metrics"]["speculative_decoding"]
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == drafting["num_accepted_draft_tokens"]
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == drafting["num_draft_tokens"]
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_prefill_time", "request_decode_time"):
        assert grown[f"vllm:{histogram}_seconds_count"] == 1
    assert grown["ragspec_retrieval_seconds_count"] == grown["ragspec_gateway_seconds_count"] == 1
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{gauge}"] == 0


def test_offloaded_prefixes_are_counted(serving: Serving, tmp_path: Path) -> None:
    """Nobody saw whether the disk given to KV offloading is of use, or broken."""
    options = {"num_kv_slots": 512, "kv_offload_bytes": 2**26, "kv_offload_dir": str(tmp_path)}
    with serving(engine=options) as service, service.client() as client:
        for word in ("river", "mill", "river"):
            messages = [{"role": "user", "content": f"{word} " * 100}]
            asked = {"model": MODEL, "messages": messages, "max_tokens": 2}
            usage = client.post("/v1/chat/completions", json=asked).raise_for_status().json()["usage"]
        now = values(service)
    assert 0 < now["ragspec_kv_offload_hits_total"] <= usage["prompt_tokens_details"]["cached_tokens"]
    assert now["ragspec_kv_offload_bytes"] > 0 == now["ragspec_kv_offload_errors"]


def test_a_full_or_draining_service_shows_what_runs(serving: Serving) -> None:
    """The service vanishes from every dashboard at the moment that somebody looks for it; a full engine looks idle; or requests
    pile up until the machine gives way, and nobody is told when to come back."""
    body = {**ASKED, "n": 3, "max_tokens": 900, "ignore_eos": True, "stream": True, "speculation": False}
    with (
        serving(engine={"max_num_seqs": 1}, **{"service.limits.max_in_flight": 1}) as service,
        service.client() as client,
        service.client(service.keys.ann) as other,
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        pieces = reply.iter_text()
        assert next(pieces)
        assert soon(lambda: values(service)["vllm:kv_cache_usage_perc"] > 0)
        now = values(service)
        assert now["vllm:num_requests_running"] == 1 and now["vllm:num_requests_waiting"] == 2
        assert 0 < now["vllm:kv_cache_usage_perc"] < 1 and now["ragspec_requests_in_flight"] == 1
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_overloaded")
        assert int(refused.headers["retry-after"]) >= 1 and client.get("/health/live").status_code == 200
        assert other.get("/metrics").status_code == 429 and client.get("/metrics").status_code == 200
        service.server.stop()
        assert soon(lambda: service.backend.rate_limiter.draining)
        assert client.get("/v1/models").status_code == 503 and client.get("/metrics").status_code == 200


def test_accepted_tokens_are_counted_by_position_over_all_drafters() -> None:
    """vLLM's counter by position: of an accepted node one drafter is the origin, so the sum over drafters counts it once."""
    metrics = Metrics("m")
    metrics.worked(GenerationStats(num_accepted=5, positions={"copy": ((4, 2), (2, 1)), "eagle": ((3, 2),)}))
    line = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="%d"} %.1f'
    assert {line % (0, 4), line % (1, 1)} <= set(metrics.text().decode().splitlines())


def test_accepted_tokens_by_position_add_up_to_all_of_them(service: Service, client: httpx.Client) -> None:
    """Panels by position and panels of totals disagree: positions were tested with made-up statistics alone."""
    before = values(service)
    for words in ("one two", "a rose is"):
        body = {"model": MODEL, "prompt": " ".join([words] * 20), "max_tokens": 128, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()
    by_position, in_total = (
        values(service)[name] - before.get(name, 0.0)
        for name in ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    assert by_position == in_total > 8


def test_reasons_begin_at_zero() -> None:
    """The first refusal creates its counter, and Prometheus sees no increase."""
    text = Metrics("m").text().decode()
    assert 'ragspec_gate_rejections_total{model_name="m",reason="queue"} 0.0' in text
    assert 'ragspec_aborts_total{model_name="m",reason="timeout"} 0.0' in text


def test_routes_are_counted_by_pattern(service: Service, client: httpx.Client) -> None:
    """Every address that somebody tries becomes a time series, until the memory is full; and it holds what was asked."""
    for number in range(5):
        client.get(f"/v1/files/quagmire-{number}")
        client.get(f"/quagmire-{number}")
        client.request(f"ODD{number}", "/v1/models")
    text = "\n".join(service.metrics())
    assert "quagmire" not in text and "ODD" not in text and 'method="other"' in text
    assert 'route="/v1/files/{' in text and 'route="none"' in text


@contextmanager
def traced(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Iterator[tuple[Service, InMemorySpanExporter]]:
    kept = InMemorySpanExporter()
    monkeypatch.setattr("services.metrics.ConsoleSpanExporter", lambda: kept)
    with serving(**{"service.telemetry.exporter": "console", **settings}) as service:
        yield service, kept


@pytest.mark.parametrize("content", [False, True])
def test_spans_tell_numbers_and_texts_only_if_asked_to(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, content: bool
) -> None:
    """Every question of every user goes to whoever collects traces; or the switch that says so does nothing."""
    headers = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "x-request-id": "r-1"}
    with traced(serving, monkeypatch, **{"service.telemetry.content": content}) as (service, kept):
        with service.client() as client:
            reply = client.post("/v1/chat/completions", json=ASKED, headers=headers).json()
            streamed = client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "a xylophone", "stream": True}
            ).text
            client.post("/v1/embeddings", json={"model": MODEL, "input": "a xylophone"}).raise_for_status()
            client.post("/v1/chat/completions", json={**ASKED, "model": "other"})
            client.get("/v1/models")
        service.backend.telemetry.close()  # type: ignore[union-attr]
    spans = kept.get_finished_spans()
    names = sorted(span.name for span in spans)
    assert names == ["chat tiny", "chat tiny", "embeddings tiny", "retrieval", "text_completion tiny"]
    told = " ".join(span.to_json() for span in spans)
    assert ("xylophone" in told) is content and streamed.startswith("data: ")
    good, bad = (span for span in spans if span.name == "chat tiny")
    assert good.attributes is not None and bad.attributes is not None
    assert good.attributes["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert good.attributes["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert good.attributes["gen_ai.request.max_tokens"] == 8 and good.attributes["gen_ai.request.seed"] == 1
    assert list(good.attributes["gen_ai.response.finish_reasons"]) == [reply["choices"][0]["finish_reason"]]  # type: ignore[arg-type]
    assert good.context.trace_id == int("ab" * 16, 16)
    (retrieval,) = (span for span in spans if span.name == "retrieval")
    assert retrieval.parent == good.context
    assert good.start_time <= retrieval.start_time < retrieval.end_time  # type: ignore[operator]
    assert good.attributes["ragspec.request_id"] == "r-1"
    assert bad.attributes["error.type"] == "ApiError" and not bad.status.is_ok


class Collector(BaseHTTPRequestHandler):
    """OpenTelemetry's, for traces over HTTP; keeps what came."""

    received: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_traces_arrive_at_a_collector(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is accepted and spans go nowhere, or without the trace of the client that asked."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="needs the extra otlp")
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    with serving(**{"service.telemetry.exporter": "otlp"}) as service, service.client() as client:
        client.post("/v1/embeddings", json={"model": MODEL, "input": "a xylophone"}).raise_for_status()
    collector.shutdown()
    collector.server_close()
    (group,) = [group for export in Collector.received for group in export.resource_spans]
    assert [each.value.string_value for each in group.resource.attributes if each.key == "service.name"] == ["ragspec"]
    (span,) = [span for scope in group.scope_spans for span in scope.spans]
    assert span.name == "embeddings tiny" and "xylophone" not in str(Collector.received)


def test_an_exporter_is_used_or_an_error(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request pays for a tracer that nobody reads; or months pass before somebody sees that there are no traces."""
    assert service.backend.telemetry is None and Telemetry.of(TelemetryConfig(), "m") is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-exporter-otlp-proto-http"):
        Telemetry.of(TelemetryConfig(exporter="otlp"), "m")


def test_names_are_those_of_vllm(service: Service) -> None:
    """A dashboard for vLLM stays empty."""
    ours = set(re.findall(r"^# TYPE (vllm:\w+)", "\n".join(service.metrics()), re.MULTILINE))
    expected = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total "
        "prompt_tokens_total generation_tokens_total request_success_total time_to_first_token_seconds "
        "inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds request_prompt_tokens request_generation_tokens spec_decode_num_drafts_total "
        "spec_decode_num_accepted_tokens_per_pos_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total"
    )
    assert {f"vllm:{name}" for name in expected.split()} <= ours
