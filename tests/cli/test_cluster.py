"""`ragspec cluster` without a cluster: every wrong call ends at once, in one line, and starts nothing."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import exit_code

from ragspec.cluster.processes import Process

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Gives the exit code and what is said on stderr, in one line."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    return lambda *args: (exit_code("cluster", *args), " ".join(capfd.readouterr().err.split()))


@pytest.fixture
def nobody() -> str:
    """An address of this machine at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_wrong_address_is_told_at_once(run: Run, nobody: str, command: str) -> None:
    """Ray waits for minutes for a cluster that is not there, and then dies with a page of its log."""
    assert run(command, "--address", nobody) == (
        1,
        f"error: there is no Ray cluster at {nobody}: [Errno 111] Connection refused",
    )


def test_there_is_nothing_to_take_down_twice(run: Run) -> None:
    """`down` in a script fails where there is nothing left."""
    for _ in range(2):
        code, said = run("down", "--name", "nothing")
        assert code == 0 and "nothing to take down" in said


def test_where_nothing_runs_there_is_nothing_to_export(run: Run) -> None:
    """`eval` of an address at which nobody listens; the next program would wait for it."""
    code, said = run("env", "--name", "nothing")
    assert code == 1 and "no cluster was started here for 'nothing'" in said


def test_the_status_of_nothing_is_an_error(run: Run) -> None:
    """It waits for a cluster, or starts one."""
    code, said = run("status")
    assert code == 1 and "no cluster was started here for 'ragspec'" in said


@pytest.mark.parametrize("host", ["192.0.2.77", "localhost.example.org", "127.example.org"])
def test_a_cluster_for_everybody_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Whoever reaches the address of such a cluster runs code on it. The name of another machine may begin as this one's."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    code, said = run("up", "--address", f"{host}:6379")
    assert code == 1 and "give it a token (RAY_AUTH_MODE=token), or say --insecure" in said


def test_a_setting_that_cannot_be_is_told_before_anything_starts(run: Run, tmp_path: Path) -> None:
    """Ray is started first, and stays."""
    config = tmp_path / "cluster.yaml"
    config.write_text("topology:\n  replica: 2\n", encoding="utf-8")
    code, said = run("up", "--config", str(config))
    assert code == 1 and "topology.replica: Extra inputs are not permitted" in said
    code, said = run("up", "--tensor-parallel", "3")
    assert code == 1 and "topology.tensor_parallel_size" in said
    assert not (tmp_path / "state").exists()


def test_a_record_that_cannot_be_read_is_told(run: Run, tmp_path: Path) -> None:
    """A half written file ends in a traceback, or its cluster is forgotten and runs for ever."""
    folder = tmp_path / "state" / "ragspec" / "clusters" / "ragspec"
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text("{", encoding="utf-8")
    code, said = run("down")
    assert code == 1 and "cluster.json cannot be read" in said


@pytest.mark.parametrize("change", ["born later", "another boot"])
def test_a_record_of_a_dead_cluster_ends_nobody_elses_process(run: Run, tmp_path: Path, change: str) -> None:
    """After a crash or a reboot, recorded numbers are others' processes, and `down` kills them."""
    folder, temporary = tmp_path / "state" / "ragspec" / "clusters" / "ragspec", tmp_path / "ray"
    folder.mkdir(parents=True)
    temporary.mkdir()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        process = Process.of(stranger.pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        recorded = process._replace(started=process.started - 1) if change == "born later" else process
        state = {"address": "127.0.0.2:1", "temporary": str(temporary), "nodes": [["node-0", recorded]]}
        state["boot"] = boot if change == "born later" else "another"
        (folder / "cluster.json").write_text(json.dumps(state), encoding="utf-8")
        assert run("down")[0] == 0
        assert stranger.poll() is None and process.state()
        assert not folder.exists() and not temporary.exists()
    finally:
        stranger.kill()
        stranger.wait()
