"""The suite `attack`: one tenant does its worst while another chats. The service must live, answer, and share fairly.

    >>> run_attacks(settings, tick).result["attacks_survived"]

The attacker is `pipelines.benchmarks.attacker`, in a process that is killed after each attack. Attacks without load are checks in
this process.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks.clients import chat_body
from pipelines.benchmarks.service import Service, backend_of, service_here
from ragspec.errors import ConfigError
from ragspec.evaluation.report import Metric, Result, Table, at_least, at_most
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.timing import Tick

ATTACKER, VICTIM = "mallory", "bob"
_MAX_TOKENS, _BEGUN_S, _NUM_ROUNDS = 24, 1.0, 8
LOADS = ("bodies", "predictions", "streams", "connections", "forms", "embeddings", "records")
LASTING = ("deletions", "indexing")
"""Methods of `Attacker`. What the lasting ones leave to do would be measured as the next attack, so they come last."""


def private_files(service: Service) -> bool:
    """Nobody else on the machine reads what tenants store."""
    folder = Path(service.backend.config.service.data_dir)
    return all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))


def overwriting(service: Service) -> bool:
    """A process whose open index is overwritten lives on."""
    folder = Path(service.backend.config.service.data_dir) / "overwritten"
    shutil.copytree(service.backend.config.retriever.index_dir, folder)
    ended = _attacker({"attack": "overwriting", "folder": str(folder)})
    ended.communicate()
    return ended.returncode == 0


def clear_text(service: Service) -> bool:
    """A service for a network needs keys, and a certificate that cannot be used is refused before anything is loaded."""
    from ragspec.cli.serve import run_serve

    refused, index = 0, {"retriever.index_dir": service.backend.config.retriever.index_dir}
    for options in ({"service.host": "0.0.0.0"}, {"service.ssl_certfile": __file__, "service.keys_file": __file__}):
        with contextlib.suppress(SystemExit):
            try:
                run_serve(None, index | options, None, None, verbose=False)
            except ConfigError:
                refused += 1
    return refused == 2


def pages(service: Service) -> bool:
    """A page elsewhere does not have its visitor's service check a text."""
    request = urllib.request.Request(
        f"{service.url}/v2/check?language=en-US&text=a", headers={"Sec-Fetch-Site": "cross-site"}
    )
    try:
        with urllib.request.urlopen(request):
            return False
    except urllib.error.HTTPError as refused:
        return refused.code in (401, 403)


CHECKS: Mapping[str, Callable[[Service], bool]] = {
    "private_files": private_files,
    "overwriting": overwriting,
    "clear_text": clear_text,
    "pages": pages,
}


def run_attacks(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, ModelError, StoreError, EngineError."""
    names, num_chats = (*LOADS, *CHECKS, *LASTING), 2 if settings.quick else 6
    rows: dict[str, Result] = {}
    with (
        backend_of(settings, tick, languagetool_open=False) as (backend, listed),
        service_here(backend, (ATTACKER, VICTIM)) as service,
    ):
        bodies = [
            chat_body(backend.model, question.text, max_tokens=_MAX_TOKENS, ignore_eos=True, seed=1)
            for question in listed.questions[:num_chats]
        ] * _NUM_ROUNDS
        service.timed(bodies, tenant=VICTIM)  # the first answers fill the caches
        quiet = service.timed(bodies, tenant=VICTIM)
        for number, name in enumerate(names):
            tick("attacks", number, len(names))
            rows[name] = attacked(service, name, bodies, quiet)
        tick("attacks", len(names), len(names))
    return Outcome(
        {
            "attacks_survived": sum(row["survived"] for row in rows.values()),
            "health_max_s": max(row["health_s"] for row in rows.values()),
            "other_tenant_ratio_max": max(row["ratio"] for row in rows.values()),
            "quiet_s": statistics.median(answer["total_s"] for answer in quiet),
            "num_attacks": len(names),
            "label": listed.label,
            "rows": rows,
        }
    )


def attacked(
    service: Service, name: str, bodies: Sequence[Mapping[str, Any]], quiet: Sequence[Mapping[str, Any]]
) -> Result:
    """The victim's chats and the health check during one attack. `ratio`: of the time of the same chats when it is quiet."""
    with _health(service.url) as health, attacking(service, name):
        is_refused = CHECKS[name](service) if name in CHECKS else True
        answers = service.timed(bodies, tenant=VICTIM)
    is_whole = all(
        answer["ended"] and answer["text"] == one["text"] for answer, one in zip(answers, quiet, strict=True)
    )
    ratio = sum(answer["total_s"] for answer in answers) / sum(answer["total_s"] for answer in quiet)
    return {"survived": is_refused and is_whole, "health_s": max(health), "ratio": ratio}


@contextlib.contextmanager
def attacking(service: Service, name: str) -> Iterator[None]:
    """One of the attacks goes on until the block ends."""
    if name in CHECKS:
        yield
        return
    process = _attacker(
        {"attack": name, "url": service.url, "key": service.keys[ATTACKER], "model": service.backend.model}
    )
    time.sleep(_BEGUN_S)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def _attacker(orders: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.benchmarks.attacker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{json.dumps(orders)}\n".encode())
    process.stdin.flush()
    process.stdout.readline()  # it has begun
    return process


@contextlib.contextmanager
def _health(url: str) -> Iterator[list[float]]:
    """Seconds of each answer of the health check until the block ends; 30 for one that failed."""
    seconds, ended = list[float](), threading.Event()

    def watch() -> None:
        while not ended.is_set() or not seconds:
            begin = time.perf_counter()
            try:
                with urllib.request.urlopen(f"{url}/health/live", timeout=30.0):
                    seconds.append(time.perf_counter() - begin)
            except OSError:
                seconds.append(30.0)
            ended.wait(0.1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


def attack_tables(result: Result) -> dict[str, Table]:
    return {"attacks": result["rows"]}


METRICS = (
    Metric("attacks_survived", "attacks during which another tenant's chats ended with their own texts", at_least(13)),
    Metric("health_max_s", "seconds of the slowest health check during any attack", at_most(1)),
    Metric(
        "other_tenant_ratio_max", "time of another tenant's chats during an attack, of their quiet time", at_most(3)
    ),
    Metric("quiet_s", "seconds of a chat when it is quiet, median"),
)
SUITE = Suite("attack", run_attacks, METRICS, tables=attack_tables)
