"""The service on Ray Serve, as `serve run` starts it: the same app, streamed, checked, drained."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from service_parts import MODEL

from ragspec.errors import ConfigError
from services.keys import add_key
from services.serving import ServeArgs, build_app, settings_of

SERVE = Path(__file__).parents[2] / "infra" / "serve"
DEPLOYED = {"config": {"service": {"keys_file": "k", "data_dir": "d"}}, "cluster": "c"}


@pytest.mark.parametrize("name", ["chat.yaml", "cluster.yaml"])
def test_the_files_for_serve_run_are_what_serve_and_the_service_read(name: str) -> None:
    """The files that people start from name an option that there is not."""
    given = yaml.safe_load((SERVE / name).read_text(encoding="utf-8"))
    (application,) = ServeDeploySchema.model_validate(given).applications
    assert application.import_path == "services.serving:build_app"
    settings, options = settings_of(ServeArgs.model_validate(application.args)), application.args["deployment_config"]
    assert settings.service.host == given["http_options"]["host"]
    assert options["max_ongoing_requests"] > settings.service.limits.max_in_flight, "Serve refuses before the service"
    assert options["max_queued_requests"] > 0
    build_app(application.args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "keys_file"),
        ({"config": {"service": {"keys_file": "k.json"}}}, "index_dir"),
        ({"config": {"service": {"kees_file": "k.json"}}}, "kees_file"),
        ({"confg": {}}, "Extra inputs"),
        (DEPLOYED | {"deployment_config": {"num_replica": 1}}, "num_replica"),
        (DEPLOYED | {"deployment_config": {"num_replicas": -1}}, "num_replicas"),
        (
            {"config": {"service": {"keys_file": "k"}}, "deployment_config": {"num_replicas": 2}, "cluster": "c"},
            "data_dir",
        ),
    ],
)
def test_args_that_cannot_be_meant_are_refused_before_anything_starts(args: dict[str, Any], said: str) -> None:
    """A replica fails again and again on a mistake that was there to be seen."""
    with pytest.raises(ConfigError, match=said):
        build_app(args)


def test_serve_s_options_are_passed_through() -> None:
    """Autoscaling that is written down and never happens."""
    options = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}, "max_ongoing_requests": 7}
    deployment = build_app(DEPLOYED | {"deployment_config": options})._bound_deployment
    assert deployment._deployment_config.autoscaling_config.max_replicas == 3
    assert deployment._deployment_config.max_ongoing_requests == 7
    assert deployment._deployment_config.graceful_shutdown_timeout_s >= 120


def test_the_service_refuses_before_serve_lets_requests_queue_without_end() -> None:
    """Serve handed a replica as many as it answers at once, so that it never refused one, and health waited behind them."""
    for config in ({}, {"limits": {"max_in_flight": 3}}):
        args = {"config": {"service": {"keys_file": "k", "data_dir": "d", **config}}, "cluster": "c"}
        options, most = (
            build_app(args)._bound_deployment._deployment_config,
            settings_of(ServeArgs(**args)).service.limits,
        )
        assert options.backpressure_config.status_code == 429
        assert options.max_ongoing_requests > most.max_in_flight == options.max_queued_requests


@pytest.fixture(scope="module")
def served(local_ray: None, tmp_path_factory: pytest.TempPathFactory, parts: Path) -> Iterator[tuple[str, str]]:
    """The address and a key of a service on Ray Serve."""
    folder = tmp_path_factory.mktemp("serve")
    key, _ = add_key(folder / "keys.json", "ann", trusted=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "target": {"model": str(parts / "model")},
        "engine": {"max_kv_tokens": 4096, "num_threads": 1},
        "retriever": {"index_dir": str(parts / "index")},
        "service": {"model": MODEL, "keys_file": str(folder / "keys.json"), "data_dir": str(folder / "data")},
    }
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app({"config": config}), route_prefix="/", name="chat")
        yield f"http://127.0.0.1:{port}", key
    finally:
        serve.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_an_answer_is_streamed_through_serve(served: tuple[str, str]) -> None:
    """Serve collects a stream and sends it at its end; or two runs of one seed differ there."""
    url, key = served
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the password of the mill?"}],
        "max_tokens": 24,
        "seed": 5,
        "temperature": 1.0,
    }
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120.0) as client:
        whole = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
        texts, num_reads = [], 0
        with client.stream(
            "POST", "/v1/chat/completions", json={**asked, "stream": True, "speculation": False}
        ) as reply:
            assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
            received = b""
            for piece in reply.iter_raw():
                received, num_reads = received + piece, num_reads + 1
        for event in received.decode().split("\n\n"):
            if event.startswith("data: {"):
                texts += [choice["delta"].get("content") or "" for choice in json.loads(event[6:])["choices"]]
    assert received.endswith(b"data: [DONE]\n\n") and num_reads > 3
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert "ann-1" in {passage["document_id"] for passage in whole["ragspec"]["passages"]}


@pytest.mark.slow
@pytest.mark.ray
def test_the_guard_stands_in_front_of_a_replica_too(served: tuple[str, str]) -> None:
    """What is refused in one process is served behind Serve."""
    url, key = served
    with httpx.Client(base_url=url, timeout=60.0) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health/ready").status_code == 200
        assert client.get("/health/live", headers={"Host": "evil.example"}).status_code == 403
        known = {"Authorization": f"Bearer {key}"}
        assert client.post("/v1/chat/completions", content=b"{", headers=known).status_code == 415
        broken = {**known, "Content-Type": "application/json"}
        assert client.post("/v1/chat/completions", content=b"{", headers=broken).status_code == 400
        assert "vllm:prompt_tokens_total" in client.get("/metrics", headers=known).text


@pytest.mark.slow
@pytest.mark.ray
def test_serve_asks_the_engine_whether_a_replica_is_well(served: tuple[str, str]) -> None:
    """A replica whose engine is dead stays in service."""
    (application,) = serve.status().applications.values()
    (deployment,) = application.deployments.values()
    assert deployment.status == "HEALTHY" and deployment.replica_states == {"RUNNING": 1}
