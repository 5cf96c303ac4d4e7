"""A deployment on a Ray cluster of this machine, and a gateway in front of it, which faults strike: by the commands of users.

with deployment(folder) as environment, GatewayProcess(options, environment) as gateway:
    gateway.start()
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from pipelines.benchmarks.chaos.faulty_service import ServiceOptions
from pipelines.benchmarks.chaos.service_process import ServiceProcess
from pipelines.benchmarks.small_service import DOCUMENTS, MODEL
from ragspec.config import EncoderConfig
from ragspec.errors import EngineError
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import build_index

_NAME = "gateway-faults"
_LEFT_S = 120.0
_RAGSPEC = (sys.executable, "-m", "ragspec.cli")
_ENGINES = {"topology": {"replicas": 2}, "engine": {"num_threads": 1, "max_kv_tokens": 16_384}}


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Mapping[str, str]]:
    """Two engines with the default target. Gives the environment of commands that shall find them. Raises: EngineError."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["XDG_STATE_HOME"] = str(folder / "state")
    config = folder / "cluster.yaml"
    config.write_text(yaml.safe_dump(_ENGINES))
    try:
        _output(environment, "cluster", "up", "--name", _NAME, "--config", str(config))
        yield environment
    finally:
        _output(environment, "cluster", "down", "--name", _NAME)


def num_left_running(environment: Mapping[str, str]) -> int:
    """Requests that engines still answer for gateways that are gone. Raises: EngineError unless every engine is live."""
    deadline = time.monotonic() + _LEFT_S
    while True:
        status = json.loads(_output(environment, "cluster", "status", "--name", _NAME, "--json"))
        num_running = sum(replica["load"] for replica in status["replicas"])
        if not num_running or time.monotonic() > deadline:
            return num_running


class GatewayProcess(ServiceProcess):
    """`ragspec serve --cluster`, which searches an index of its own. Its disk and its clock are those of the machine."""

    def __init__(self, options: ServiceOptions, environment: Mapping[str, str]) -> None:
        super().__init__(options)
        self._environment = environment
        self._config = options.folder / "service.yaml"
        index = options.disk / "index"
        build_index(DOCUMENTS, index, Encoder.load(EncoderConfig()))
        service = {"model": MODEL, "data_dir": str(options.disk / "data"), "host": options.host, "port": options.port}
        settings = {"retriever": {"index_dir": str(index)}, "service": service | {"keys_file": str(options.keys)}}
        self._config.write_text(yaml.safe_dump(settings))

    def begin(self) -> None:
        command = [*_RAGSPEC, "serve", "--cluster", _NAME, "--config", str(self._config)]
        with (self.options.folder / "gateway.log").open("ab") as log:
            self._process = _Started(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


class _Started(subprocess.Popen[bytes]):
    """With the methods of a process of `multiprocessing`."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


def _output(environment: Mapping[str, str], *command: str) -> str:
    ended = subprocess.run([*_RAGSPEC, *command], env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EngineError(f"ragspec {' '.join(command)}: {ended.stderr.strip()[-500:]}")
    return ended.stdout
