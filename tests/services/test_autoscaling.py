"""Replicas come and go with the work of their engines, and no stream notices."""

from __future__ import annotations

import json
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from ray import serve
from service_parts import MODEL

from services.keys import add_key
from services.serving import build_app, replicas_wanted

POLICY = {"policy_function": "services.serving:replicas_wanted"}
PATIENCE_S = 300.0


@pytest.mark.parametrize(("choices", "wanted"), [([0.0], 1), ([4.0], 1), ([5.0], 2), ([9.0, 3.5], 4), ([0.0, 0.0], 1)])
def test_replicas_follow_the_choices_of_their_engines(choices: list[float], wanted: int) -> None:
    """One request of eight choices counted as little as one of one, and an upload as much."""
    reported = {f"replica-{i}": each for i, each in enumerate(choices)}
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 4.0)
    context: Any = SimpleNamespace(aggregated_metrics={"choices": reported}, config=config, target_num_replicas=3)
    assert replicas_wanted(context)[0] == wanted == max(1, math.ceil(sum(choices) / 4))
    context.aggregated_metrics = {}
    assert replicas_wanted(context)[0] == 3, "a replica that has not reported yet ends none"


def running() -> int:
    (deployment,) = serve.status().applications["chat"].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


def until(count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while running() != count:
        assert time.monotonic() < deadline, f"there are {running()} replicas, not {count}"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.ray
def test_no_stream_ends_when_replicas_are_added_and_removed(local_ray: None, tmp_path: Path, parts: Path) -> None:
    """A replica that ended under load took its streams along, or a new one got none."""
    key, _ = add_key(tmp_path / "keys.json", "ann", trusted=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "target": {"model": str(parts / "model")},
        "engine": {"max_kv_tokens": 4096, "num_threads": 1},
        "retriever": {"index_dir": str(parts / "index")},
        "service": {"model": MODEL, "keys_file": str(tmp_path / "keys.json"), "data_dir": str(tmp_path / "data")},
    }
    delays = {"look_back_period_s": 11.0, "upscale_delay_s": 1.0, "downscale_delay_s": 3.0}
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "policy": POLICY, **delays}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "When is the mill open?"}], "max_tokens": 400}
    asked |= {"n": 2, "seed": 5, "temperature": 1.0, "logit_bias": {"1": -100}, "stream": True, "retrieval": False}
    texts = set[str]()

    def ask(client: httpx.Client) -> None:
        with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]", "a stream was cut off"
        choices = [choice for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]
        texts.add("".join(each["delta"].get("content") or "" for each in choices if each["index"] == 0))

    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app({"config": config, "deployment_config": {"autoscaling_config": scaling}}), name="chat")
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE_S) as client:
            until(1)
            with ThreadPoolExecutor(4) as threads:
                streams, deadline = [threads.submit(ask, client) for _ in range(4)], time.monotonic() + PATIENCE_S
                while running() < 2:
                    assert time.monotonic() < deadline, "no replica was added"
                    streams += [threads.submit(ask, client)]
                    streams[-4].result()
                streams += [threads.submit(ask, client) for _ in range(4)]
            while running() > 1:  # one stream at a time, of one choice more than a replica is for
                assert time.monotonic() < deadline + PATIENCE_S, "no replica was removed"
                ask(client)
            for stream in streams:
                stream.result()
    finally:
        serve.shutdown()
    assert len(texts) == 1, "every replica writes the same text"
