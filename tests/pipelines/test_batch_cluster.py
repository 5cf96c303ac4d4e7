"""Batch jobs on Ray: replicas of their own, a deployment that is up, a guarded cluster; parts that are killed change nothing."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_files import ASKED, SEED, read_lines, texts_of, uneven_rows, write_lines
from job_processes import alive, children
from stand_ins import until

from pipelines.batch.backend import BackendSpec
from pipelines.batch.job import Job, run_job
from pipelines.batch_rag import RagTask
from ragspec.config import load_config

pytestmark = [pytest.mark.slow, pytest.mark.ray]

NUM_ROWS = 60


@pytest.fixture(scope="module")
def straight(place: Path) -> dict[str, str]:
    """Rows answered in one process, without interruption."""
    inputs = write_lines(place / "many.jsonl", uneven_rows(NUM_ROWS))
    config = load_config(place / "config.yaml")
    run_job(Job(inputs, place / "many", config, SEED, backend=BackendSpec(address="local")), RagTask())
    return texts_of(place / "many")


def command(place: Path, out: Path, *more: str) -> list[str]:
    options = ["--config", str(place / "config.yaml"), "--input", str(place / "many.jsonl"), "--out", str(out), *more]
    return [sys.executable, "-m", "pipelines.batch_rag", "--address", "local", *options]


def num_lines(out: Path) -> int:
    return sum(part.read_bytes().count(b"\n") for part in out.glob("answers-*"))


_MEMBERS = (b"ray::Engine", b"ray::Shard", b"ray::Encoder")
_PARTS = (*_MEMBERS, b"ray::Deployment")
"""Processes of the job's deployment. Ray's own agents stay for a minute without it."""


def started(pids: list[int], names: tuple[bytes, ...]) -> list[int]:
    """The processes whose command line begins with one of the names."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(names) else []
    return found


@pytest.mark.parametrize("victim", ["driver", "member"])
def test_what_is_killed_changes_no_text(place: Path, straight: dict[str, str], tmp_path: Path, victim: str) -> None:
    """Rows are lost, answered twice, or answered differently."""
    out = tmp_path / "out"
    log = open(out.with_suffix(".log"), "ab")  # noqa: SIM115 - the process keeps it
    with log:
        arguments = command(place, out, "--replicas", "2")
        process = subprocess.Popen(arguments, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    everyone: list[int] = []
    try:
        until(lambda: num_lines(out) >= 4 or process.poll() is not None, "the first answers")
        everyone = children(process.pid)
        members, parts = started(everyone, _MEMBERS), started(everyone, _PARTS)
        assert process.poll() is None and len(members) >= 4, out.with_suffix(".log").read_text()
        os.kill(process.pid if victim == "driver" else members[0], signal.SIGKILL)
        code = process.wait(300)
        until(lambda: not alive(parts), "the end of all its parts", 60)
    finally:
        for pid in alive([process.pid, *everyone]):
            os.kill(pid, signal.SIGKILL)
    assert code == (0 if victim == "member" else -signal.SIGKILL), out.with_suffix(".log").read_text()
    if victim != "member":
        whole = num_lines(out)
        assert 0 < whole < NUM_ROWS, "killed too late to show anything"
        again = subprocess.run(command(place, out), check=True, cwd=tmp_path, stdout=subprocess.PIPE)
        summary = json.loads(again.stdout.splitlines()[-1])
        assert (summary["skipped"], summary["answered"], summary["failed"]) == (whole, NUM_ROWS - whole, 0)
    assert texts_of(out) == straight
    assert not read_lines(out / "errors.jsonl")


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """A head of its own, guarded by a token: the environment of a client. Stopped by the ids of its processes."""
    folder = tempfile.mkdtemp(prefix="rs")  # Why not tmp_path: a socket's path may have 107 bytes
    gcs, dashboard, agent, agent_grpc, client, metrics = free_ports(6)
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment.pop("RAY_ADDRESS", None)
    ports = f"--port={gcs} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
    more = f"--dashboard-agent-grpc-port={agent_grpc} --ray-client-server-port={client} --metrics-export-port={metrics}"
    head = subprocess.Popen(
        ["ray", "start", "--head", "--block", f"--temp-dir={folder}", *ports.split(), *more.split(), "--num-cpus=2"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=folder,
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        until(lambda: _jobs_answer(address, environment), "a head that takes jobs", 120)
        yield environment | {"ADDRESS": address, "HEAD": f"127.0.0.1:{gcs}"}
    finally:
        everyone = [*children(head.pid), head.pid]
        head.terminate()
        for pid in alive(everyone):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.wait(30)
        until(lambda: not alive(everyone), "the end of the head", 30)
        shutil.rmtree(folder, ignore_errors=True)


def _jobs_answer(address: str, environment: dict[str, str]) -> bool:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))):
            return False
    listed = subprocess.run(["ray", "job", "list", "--address", address], env=environment, capture_output=True)
    return listed.returncode == 0


def test_a_job_uses_a_deployment_that_is_up(
    cluster: dict[str, str], place: Path, straight: dict[str, str], tmp_path: Path
) -> None:
    """A job that starts its own engines beside those that are there, takes them down, or knows another target or index."""
    config, head = tmp_path / "cluster.yaml", cluster["HEAD"]
    config.write_text((place / "config.yaml").read_text() + "topology: {cpus_per_rank: 0.3}\n")

    def deployment(*order: str) -> None:
        """Fails where `ragspec cluster` does, which is for a status that is not complete, too."""
        call = ["-m", "ragspec.cli", "cluster", *order, "--name", "shared", "--address", head]
        subprocess.run([sys.executable, *call], env=cluster, check=True, cwd=tmp_path)

    deployment("up", "--config", str(config))
    (tmp_path / "bare.yaml").write_text(
        "retriever: {num_passages: 2}\ngeneration: {max_tokens: 24, temperature: 0.8, seed: 5}\n"
    )
    bare = ["--config", str(tmp_path / "bare.yaml"), "--input", str(place / "many.jsonl"), "--cluster", "shared"]
    job = [sys.executable, "-m", "pipelines.batch_rag", "--address", head, *bare]
    done = subprocess.run([*job, "--out", "out"], env=cluster, check=True, cwd=tmp_path, stdout=subprocess.PIPE)
    summary = json.loads(done.stdout)
    assert (summary["answered"], summary["machines"]) == (NUM_ROWS, 1)
    assert texts_of(tmp_path / "out") == straight
    unknown = subprocess.run(
        [*job, "--cluster", "nobody", "--out", "no"], env=cluster, cwd=tmp_path, capture_output=True, text=True
    )
    assert unknown.returncode == 1 and "there is no deployment 'nobody'" in unknown.stderr
    deployment("status")  # the job did not take it down
    deployment("down")


def test_a_job_is_submitted_to_a_guarded_cluster(cluster: dict[str, str], place: Path, tmp_path: Path) -> None:
    """The token, the installed package or the uploaded folder are not found; or half a gigabyte is uploaded."""
    work = tmp_path / "work"
    work.mkdir()
    write_lines(work / "q.jsonl", [{"id": f"q{n}", "question": question} for n, question in enumerate(ASKED[:6])])
    submit = ["ray", "job", "submit", "--address", cluster["ADDRESS"], "--working-dir", str(work), "--"]
    arguments = ["--config", str(place / "config.yaml"), "--input", "q.jsonl"]
    job_command = [*submit, "python", "-m", "pipelines.batch_rag", *arguments]

    relative = subprocess.run([*job_command, "--out", "out"], env=cluster, capture_output=True, text=True)
    assert relative.returncode == 1
    assert "must be absolute in a submitted job" in relative.stdout + relative.stderr

    done = subprocess.run(
        [*job_command, "--out", str(tmp_path / "out")], env=cluster, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(texts_of(tmp_path / "out")) == 6

    stranger = cluster | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    refused = subprocess.run(
        [*job_command, "--out", str(tmp_path / "no")], env=stranger, capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert not (tmp_path / "no").exists()
