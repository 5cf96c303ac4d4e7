"""Whether a service says truly that it lives, that it is ready, and what it counted."""

from __future__ import annotations

import httpx2 as httpx
from service_parts import Service, Serving


def test_a_service_that_runs_lives_and_is_ready(service: Service) -> None:
    """A load balancer that has no key found no health check, or one that says nothing of the engine."""
    with service.client("") as client:
        assert client.get("/health/live").json() == {"status": "live"}
        assert client.get("/health/ready").json() == {"status": "ready"}
        assert client.get("/health").status_code == 200


def test_a_service_whose_engine_is_closed_lives_and_is_not_ready(serving: Serving) -> None:
    """Readiness that only says that the process answers."""
    with serving() as service, service.client("") as client:
        service.backend.engine.close()
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200


def test_metrics_are_for_trusted_keys_only(service: Service, client: httpx.Client) -> None:
    """Another tenant's traffic is read from the counters."""
    with service.client(service.keys.ann) as stranger:
        assert stranger.get("/metrics").status_code == 403
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert 'ragspec_http_requests_total{method="GET",model_name="tiny",route="/metrics",status="403"} 1.0' in page.text
