"""Whatever is sent, the service answers with a result or with an error of the client's, and goes on."""

import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from service_parts import MODEL, Service

NUM_EACH = 60


@pytest.mark.slow
def test_two_thousand_requests_blame_nobody_but_the_client(service: Service) -> None:
    """A generated request met a 500. Of every route, requests that keep to its schema and as many that do not."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (extra dev)")
    statuses: Counter[int] = Counter()
    with service.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            options: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "phases": (Phase.generate,)}

            @seed(0)
            @settings(max_examples=NUM_EACH, database=None, deadline=None, **options)
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                answer = case.call(base_url=service.url, headers=service.headers(), timeout=60.0)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, (case.as_curl_command(), answer.text[:500])

            with contextlib.suppress(Unsatisfiable):  # a route without a body or a parameter cannot be asked wrongly
                send()
    assert 200 in statuses and 400 in statuses and sum(statuses.values()) >= 2_000
    with service.client() as client:
        body = {"model": MODEL, "prompt": "Who built the bridge?", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health/ready").status_code == 200
    assert service.backend.rate_limiter.running == 0
