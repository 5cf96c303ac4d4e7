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
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks.clients import chat_body
from pipelines.benchmarks.service import Service, backend_of, service_here
from pipelines.benchmarks.small_service import small_backend
from ragspec.errors import ConfigError
from ragspec.evaluation.report import Metric, Result, Table, at_least, at_most
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.timing import Tick

ATTACKER, VICTIM = "mallory", "bob"
_MAX_TOKENS, _NUM_ROUNDS, _MOST_S = 24, 8, 60.0
LOADS = {
    "bodies": 4,
    "predictions": 2,
    "streams": 4,
    "connections": 1000,
    "forms": 40,
    "embeddings": 4,
    "records": 40,
}
LASTING = {"deletions": 46, "indexing": 1}
"""Methods of `Attacker`, and how many requests take effect before an attack is measured. What the lasting ones leave to do would
be measured as the next attack, so they come last."""


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


def pages(_: Service) -> bool:
    """A page elsewhere does not have its visitor's service check a text, although that service asks nobody for a key."""
    with (
        tempfile.TemporaryDirectory(prefix="ragspec-") as folder,
        small_backend(Path(folder), languagetool_open=True) as backend,
        service_here(backend) as opened,
    ):
        return (_checked_from("none", opened.url), _checked_from("cross-site", opened.url)) == (200, 403)


def _checked_from(site: str, url: str) -> int:
    """The status of a keyless check of a text by a page of that site."""
    request = urllib.request.Request(f"{url}/v2/check?language=en-US&text=+", headers={"Sec-Fetch-Site": site})
    try:
        with urllib.request.urlopen(request) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as refused:
        return refused.code


CHECKS: Mapping[str, Callable[[Service], bool]] = {
    "private_files": private_files,
    "overwriting": overwriting,
    "clear_text": clear_text,
    "pages": pages,
}


def run_attacks(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, ModelError, StoreError, EngineError."""
    names = (*LOADS, *CHECKS, *LASTING)
    num_chats, least_s = (2, 5.0) if settings.quick else (6, 20.0)
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
            rows[name] = attacked(service, name, bodies, quiet, least_s)
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
    service: Service,
    name: str,
    bodies: Sequence[Mapping[str, Any]],
    quiet: Sequence[Mapping[str, Any]],
    least_s: float = 0.0,
    most_s: float = _MOST_S,
) -> Result:
    """The victim's chats and the health check during one attack. `ratio`: of the time of the same chats when it is quiet.

    Measures for `least_s` from when the attack takes effect. An attack without effect after `most_s` is not survived.
    """
    needed, rounds = (LOADS | LASTING).get(name, 0), list[Sequence[Mapping[str, Any]]]()
    with _health(service.url) as health, attacking(service, name) as effects:
        _wait_until(lambda: len(effects) >= needed, most_s)
        is_refused = CHECKS[name](service) if name in CHECKS else len(effects) >= needed
        end_s = time.monotonic() + (least_s if needed else 0.0)
        while not rounds or time.monotonic() < end_s:
            rounds.append(service.timed(bodies, tenant=VICTIM))
    pairs = [pair for answers in rounds for pair in zip(answers, quiet, strict=True)]
    return {
        "survived": is_refused and all(answer["ended"] and answer["text"] == one["text"] for answer, one in pairs),
        "health_s": max(health),
        "ratio": sum(answer["total_s"] for answer, _ in pairs) / sum(one["total_s"] for _, one in pairs),
        "num_effects": len(effects),
    }


def _wait_until(is_so: Callable[[], bool], most_s: float) -> None:
    end_s = time.monotonic() + most_s
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.05)


@contextlib.contextmanager
def attacking(service: Service, name: str) -> Iterator[Sequence[bytes]]:
    """One of the attacks goes on until the block ends. Yields a list that grows with each request that takes effect."""
    effects = list[bytes]()
    if name in CHECKS:
        yield effects
        return
    orders = {"attack": name, "url": service.url, "key": service.keys[ATTACKER], "model": service.backend.model}
    with _attacker(orders) as process:
        thread = threading.Thread(target=lambda: [effects.append(line) for line in process.stdout or ()])
        thread.start()
        try:
            yield effects
        finally:
            process.kill()
            thread.join()


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
