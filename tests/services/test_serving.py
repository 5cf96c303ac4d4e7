"""The service on Ray Serve, as `serve run` starts it: the same app, streamed, checked, drained, in as many replicas as needed."""

import json
import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from service_parts import MODEL

from ragspec.errors import ConfigError
from services.keys import add_key
from services.serving import ServeArgs, build_app, replicas_wanted, settings_of

SERVE = Path(__file__).parents[2] / "infra" / "serve"
PATIENCE_S = 300.0
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
        (DEPLOYED | {"config": {"service": {"keys_file": "k"}}, "deployment_config": {"num_replicas": 2}}, "data_dir"),
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
        most = settings_of(ServeArgs(**args)).service.limits
        options = build_app(args)._bound_deployment._deployment_config
        assert options.backpressure_config.status_code == 429
        assert options.max_ongoing_requests > most.max_in_flight == options.max_queued_requests


@pytest.mark.parametrize(("choices", "wanted"), [([0.0], 1), ([4.0], 1), ([5.0], 2), ([9.0, 3.5], 4), ([0.0, 0.0], 1)])
def test_replicas_follow_the_choices_of_their_engines(choices: list[float], wanted: int) -> None:
    """One request of eight choices counted as little as one of one, and an upload as much."""
    reported = {f"replica-{i}": each for i, each in enumerate(choices)}
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 4.0)
    context: Any = SimpleNamespace(aggregated_metrics={"choices": reported}, config=config, target_num_replicas=3)
    assert replicas_wanted(context)[0] == wanted == max(1, math.ceil(sum(choices) / 4))
    context.aggregated_metrics = {}
    assert replicas_wanted(context)[0] == 3, "a replica that has not reported yet ends none"


@contextmanager
def on_serve(folder: Path, parts: Path, **options: Any) -> Iterator[httpx.Client]:
    """A client with a trusted key of a service on Ray Serve. `options`: of the deployment."""
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
        serve.run(build_app({"config": config, "deployment_config": options}), route_prefix="/", name="chat")
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE_S) as client:
            yield client
    finally:
        serve.shutdown()


def first_text(events: str) -> str:
    """The text of a stream's first choice."""
    lines = [line for line in events.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", "a stream was cut off"
    choices = [choice for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]
    return "".join(each["delta"].get("content") or "" for each in choices if each["index"] == 0)


def num_running() -> int:
    (deployment,) = serve.status().applications["chat"].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


@pytest.mark.slow
@pytest.mark.ray
def test_no_stream_ends_when_replicas_are_added_and_removed(local_ray: None, tmp_path: Path, parts: Path) -> None:
    """A replica that ended under load took its streams along, or a new one got none.

    Runs before `served` begins, because one Ray has one Serve at a time.
    """
    policy = {"policy_function": "services.serving:replicas_wanted"}
    delays = {"look_back_period_s": 11.0, "upscale_delay_s": 1.0, "downscale_delay_s": 3.0}
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "policy": policy, **delays}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "When is the mill open?"}], "max_tokens": 400}
    asked |= {"n": 2, "seed": 5, "temperature": 1.0, "logit_bias": {"1": -100}, "stream": True, "retrieval": False}

    with on_serve(tmp_path, parts, autoscaling_config=scaling) as client, ThreadPoolExecutor(4) as threads:
        deadline = time.monotonic() + PATIENCE_S

        def ask() -> str:
            return first_text(client.post("/v1/chat/completions", json=asked).text)

        while num_running() != 1:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        streams = [threads.submit(ask) for _ in range(4)]
        while num_running() < 2:
            assert time.monotonic() < deadline, "no replica was added"
            streams += [threads.submit(ask)]
            streams[-4].result()
        texts = {stream.result() for stream in streams}
        while num_running() > 1:  # one stream at a time, of one choice more than a replica is for
            assert time.monotonic() < deadline + PATIENCE_S, "no replica was removed"
            texts.add(ask())
    assert len(texts) == 1, "every replica writes the same text"


@pytest.fixture(scope="module")
def served(local_ray: None, tmp_path_factory: pytest.TempPathFactory, parts: Path) -> Iterator[httpx.Client]:
    with on_serve(tmp_path_factory.mktemp("serve"), parts) as client:
        yield client


@pytest.mark.slow
@pytest.mark.ray
def test_an_answer_is_streamed_through_serve(served: httpx.Client) -> None:
    """Serve collects a stream and sends it at its end; or two runs of one seed differ there."""
    messages = [{"role": "user", "content": "What is the password of the mill?"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 24, "seed": 5, "temperature": 1.0}
    whole = served.post("/v1/chat/completions", json=asked).raise_for_status().json()
    streamed = {**asked, "stream": True, "speculation": False}
    with served.stream("POST", "/v1/chat/completions", json=streamed) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        pieces = list(reply.iter_raw())
    assert len(pieces) > 3
    assert first_text(b"".join(pieces).decode()) == whole["choices"][0]["message"]["content"]
    assert "ann-1" in {passage["document_id"] for passage in whole["ragspec"]["passages"]}
    (deployment,) = serve.status().applications["chat"].deployments.values()
    assert deployment.status == "HEALTHY", "Serve asks the engine whether a replica is well"


@pytest.mark.slow
@pytest.mark.ray
def test_the_guard_stands_in_front_of_a_replica_too(served: httpx.Client) -> None:
    """What is refused in one process is served behind Serve."""
    with httpx.Client(base_url=served.base_url, timeout=60.0) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health/ready").status_code == 200
        assert client.get("/health/live", headers={"Host": "evil.example"}).status_code == 403
    broken = {"Content-Type": "application/json"}
    assert served.post("/v1/chat/completions", content=b"{", headers=broken).status_code == 400
    assert "vllm:prompt_tokens_total" in served.get("/metrics").text
