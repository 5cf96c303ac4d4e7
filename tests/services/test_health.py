"""Whether a service says truly that it lives, that it is ready, and what it counted."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx2 as httpx
import pytest
from service_parts import Service, Serving

from ragspec.core import Delta, Request
from ragspec.errors import Overloaded
from services.health import Canary


def test_a_service_that_runs_lives_and_is_ready(service: Service) -> None:
    """A load balancer that has no key found no health check, or one that says nothing of the engine."""
    with service.client("") as client:
        assert client.get("/health/live").json() == {"status": "live"}
        assert client.get("/health/ready").json() == {"status": "ready"}
        assert client.get("/health").status_code == 200


def test_a_service_whose_engine_is_closed_lives_and_is_not_ready(serving: Serving) -> None:
    """Readiness that only says that the process answers."""
    with serving() as service, service.client("") as client:
        service.backend.target.engine.close()
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200


def test_metrics_are_for_trusted_keys_only(service: Service, client: httpx.Client) -> None:
    """Another tenant's traffic is read from the counters."""
    with service.client(service.keys.ann) as stranger:
        assert stranger.get("/metrics").status_code == 403
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert 'ragspec_http_requests_total{method="GET",model_name="tiny",route="/metrics",status="403"} 1.0' in page.text


class Busy:
    """A router whose replicas have others before whoever asks, or a full queue."""

    def __init__(self, error: Exception | None, *, goes_on: bool) -> None:
        self._error, self._goes_on, self._heard = error, goes_on, 0

    def num_heard(self) -> int:
        self._heard += self._goes_on
        return self._heard

    async def stream(self, request: Request) -> AsyncIterator[Delta]:
        if self._error is not None:
            raise self._error
        await asyncio.sleep(60)
        yield Delta(request.id, 0, (1,), "x", (), None)


@pytest.mark.parametrize("error", [None, Overloaded("full")])
@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_busy_deployment_is_no_dead_one(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: Exception | None, goes_on: bool
) -> None:
    """Gateways of a deployment under load were taken for dead, and killed with the answers they were streaming."""
    monkeypatch.setattr("services.health._FRESH_S", 0.0)
    monkeypatch.setattr("services.health.CANARY_S", 0.05)
    engine = Busy(error, goes_on=goes_on)
    canary = Canary(cast(Any, SimpleNamespace(engine=engine, prompts=service.backend.target.prompts)))
    await canary.check()
    assert await canary.check() == goes_on
