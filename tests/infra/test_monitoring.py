"""Prometheus' own programs read what the service tells: scrapes, alerts, and every query of the dashboard."""

import contextlib
import math
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from infra_parts import ALERTS, FOLDER, queries, ran
from service_parts import DOCUMENTS, MODEL, ServeProcess, serve_process, soon

ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": DOCUMENTS[0].text}],
    "max_tokens": 24,
    "ignore_eos": True,
    "seed": 1,
}


def program(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"{name} is not installed (Debian's package prometheus has it)")


def test_the_rules_are_valid_and_every_alert_fires_on_its_fault_alone() -> None:
    """Bug guarded: an alert that is never seen firing, and does not when the night comes."""
    promtool = program("promtool")
    ran(promtool, "check", "rules", FOLDER / "alerts.yaml")
    ran(promtool, "test", "rules", "alerts_test.yaml", cwd=FOLDER)
    tested = (FOLDER / "alerts_test.yaml").read_text()
    assert not [rule["alert"] for rule in ALERTS if f"alertname: {rule['alert']}\n" not in tested]


@contextlib.contextmanager
def prometheus(folder: Path, started: ServeProcess) -> Iterator[httpx.Client]:
    """With the repository's configuration, but this service's address and key, and a second between scrapes."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [started.url.removeprefix("http://")]}]
    job["authorization"]["credentials_file"] = str(started.key_file)
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "alerts.yaml", folder)
    ran(program("promtool"), "check", "config", folder / "prometheus.yaml")
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"]
    with (
        (folder / "prometheus.log").open("wb") as log,
        httpx.Client(base_url=f"http://{where}", timeout=30.0) as client,
    ):
        process = subprocess.Popen([*command, f"--web.listen-address={where}"], stdout=log, stderr=log)
        try:
            yield client
        finally:
            process.kill()
            process.wait()


def samples(client: httpx.Client, query: str) -> list[float]:
    with contextlib.suppress(httpx.TransportError):  # it has not begun to listen
        reply = client.get("/api/v1/query", params={"query": query}).json()
        assert reply["status"] == "success", reply
        return [value for series in reply["data"]["result"] if not math.isnan(value := float(series["value"][1]))]
    return []


def firing(client: httpx.Client) -> set[str]:
    alerts = client.get("/api/v1/alerts").json()["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def answered(client: httpx.Client, **body: Any) -> httpx.Response:
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply


def ask(client: httpx.Client) -> None:
    """An answer, its repetition with the answer as a draft, a stream, and a refusal."""
    answer = answered(client, **ASKED)
    said = {"type": "content", "content": answer.json()["choices"][0]["message"]["content"].replace("\0", " ")}
    answered(client, **ASKED, prediction=said)
    answered(client, **ASKED, stream=True)
    client.get("/v1/models", headers={"Authorization": "Bearer rs-none"})


def refuse_for_load(client: httpx.Client, least: int) -> int:
    """How many requests were refused because two answers, the most of this service, were being written."""
    body, num_refused = {**ASKED, "max_tokens": 600, "stream": True, "speculation": False}, 0
    for _ in range(50):
        with (
            client.stream("POST", "/v1/chat/completions", json=body),
            client.stream("POST", "/v1/chat/completions", json=body),
        ):
            num_refused += [client.get("/v1/models").status_code for _ in range(30)].count(429)
            assert client.get("/metrics").status_code == 200, "a full service is not seen"
        if num_refused >= least:
            break
    return num_refused


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_data_and_alerts_fire(parts: Path, tmp_path: Path) -> None:
    """Bug guarded: a renamed metric empties a panel, or an alert, and nobody sees it."""
    program("prometheus")
    limits = {"max_in_flight": 2}
    with serve_process(parts, limits=limits) as started, prometheus(tmp_path, started) as client:
        with started.client() as asking:

            def is_complete() -> bool:
                ask(asking)
                return all(samples(client, query) for query in queries().values())

            assert soon(is_complete, 120.0), [name for name, query in queries().items() if not samples(client, query)]
            accepted = samples(client, 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}')
            assert accepted[0] > 0 and not firing(client)
            unknown = asking.headers | {"Authorization": "Bearer rs-none"}
            assert all(asking.get("/v1/models", headers=unknown).status_code == 401 for _ in range(600))
            assert refuse_for_load(asking, 100) >= 100
            assert soon(lambda: {"RagspecKeysRefused", "RagspecOverloaded"} <= firing(client), 60.0)
        started.process.kill()
        assert soon(lambda: "RagspecDown" in firing(client), 180.0)
