"""`ragspec doctor`: checks the installation, the machine, and the bitwise self-test of the target.

Owns the checks and their output; changes nothing but the cache folder, which it creates. A check is ok, a warning, or broken;
broken means that a command will not work.

    $ ragspec doctor --json
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragspec.cli.options import AsJson, Debug, Target
from ragspec.cli.terminal import cache_folder, one_line, safe, stay_offline, stdout_console
from ragspec.config import DEFAULT_TARGET, EncoderConfig, EngineConfig, TargetConfig

if TYPE_CHECKING:
    from ragspec.engine.target import Target as EngineTarget

Status = Literal["ok", "warning", "broken"]
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "broken": "bold red"}
_MARKS: dict[Status, str] = {"ok": "✓", "warning": "!", "broken": "✗"}
_PACKAGES = ("torch", "transformers", "tokenizers", "sentence-transformers", "numba", "numpy", "pyarrow", "ray")
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")
_KV_TOKENS = 4096
_MIN_MEMORY_GB, _MIN_DISK_GB = 3.5, 1.0


class Finding(NamedTuple):
    status: Status
    detail: str


def doctor(target: Target = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """What this machine can do; the bitwise self-test. Exits 1 if something needed is broken."""
    model = target or DEFAULT_TARGET
    stay_offline(TargetConfig(model=model))
    console, found = stdout_console(), {}
    for name, check in _checks(model):
        with console.status(Text(f"{name} …", "dim")) if not as_json else contextlib.nullcontext():
            try:
                found[name] = check()
            except Exception as cause:  # a check that raises is a finding; the other checks still run
                found[name] = Finding("broken", f"{type(cause).__name__}: {one_line(cause)}")
        if not as_json:
            _print_row(console, name, found[name])
    broken = [name for name, finding in found.items() if finding.status == "broken"]
    if as_json:
        print(json.dumps({"ok": not broken, "checks": {name: f._asdict() for name, f in found.items()}}))
    else:
        verdict = (f"broken: {', '.join(broken)}", "bold red") if broken else ("Everything needed works.", "green")
        console.print(Text(), Text(*verdict))
    raise typer.Exit(int(bool(broken)))


def _print_row(console: Console, name: str, finding: Finding) -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=16, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(_MARKS[finding.status], _STYLES[finding.status]), name, Text(safe(finding.detail)))
    console.print(grid)


def _checks(model: str) -> Iterator[tuple[str, Callable[[], Finding]]]:
    yield "python", _python
    yield "packages", _packages
    yield "processor", _processor
    yield "memory", _memory
    yield "cache folder", _cache
    yield "packed products", _packing
    yield "faiss", _faiss
    yield "encoder", _encoder
    yield "target", lambda: _target(model)
    yield "threads", _threads


def _python() -> Finding:
    return Finding("ok", f"{platform.python_version()} on {platform.platform()}")


def _packages() -> Finding:
    found, missing = [], []
    for name in ("ragspec", *_PACKAGES):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    detail = ", ".join(found) + (f"; missing: {', '.join(missing)}" if missing else "")
    return Finding("broken" if missing else "ok", detail)


def _processor() -> Finding:
    lines = _read("/proc/cpuinfo").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    known = " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "no known vector extensions"
    name = fields.get("model name") or platform.machine()
    return Finding("ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable, {name}: {known}")


def _memory() -> Finding:
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in _read("/proc/meminfo").splitlines()}
    total, available = (kilobytes.get(name, 0) / 1e6 for name in ("MemTotal", "MemAvailable"))
    status: Status = "ok" if available >= _MIN_MEMORY_GB else "warning"
    return Finding(status, f"{available:.1f} GB available of {total:.1f} GB; the demo needs up to {_MIN_MEMORY_GB} GB")


def _cache() -> Finding:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        free_gb = shutil.disk_usage(folder).free / 1e9
    status: Status = "ok" if free_gb >= _MIN_DISK_GB else "warning"
    return Finding(status, f"{folder} can be written, {free_gb:.1f} GB free")


def _packing() -> Finding:
    import torch

    from ragspec.numerics.linear import packing_available

    has = {name: packing_available(getattr(torch, name)) for name in ("float32", "bfloat16")}
    detail = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in has.items())
    status: Status = "ok" if all(has.values()) else "warning" if has["float32"] else "broken"
    return Finding(status, f"oneDNN's packed matrix product: {detail}")


def _faiss() -> Finding:
    if importlib.util.find_spec("faiss") is None:
        return Finding("warning", "not installed; exact search works without it (install the extra cpu or gpu)")
    import faiss

    return Finding("ok", f"faiss {faiss.__version__}")


def _encoder() -> Finding:
    from ragspec.retrieval.encoder import Encoder

    begin = perf_counter()
    encoder = Encoder.load(EncoderConfig())
    bitwise = encoder.max_batch_size > 1
    detail = f"{encoder.identity.id}, weights are the published ones, loaded in {perf_counter() - begin:.1f} s; "
    detail += "batches do not change a bit" if bitwise else "batches change bits here, so texts are encoded one by one"
    return Finding("ok" if bitwise else "warning", detail)


def _target(model: str) -> Finding:
    from ragspec.engine.loading import check_numerics
    from ragspec.engine.target import Target

    begin = perf_counter()
    target = Target.load(TargetConfig(model=model, exactness="fast"), _KV_TOKENS)
    loaded_s, begin = perf_counter() - begin, perf_counter()
    tested = check_numerics(target, max(1, len(os.sched_getaffinity(0))))
    detail = (
        f"{target.num_parameters / 1e6:.1f}M parameters, loaded in {loaded_s:.1f} s; {_context(target)}; "
        f"bitwise self-test {'passed' if tested.passed else 'FAILED'} in {perf_counter() - begin:.1f} s, "
        f"numerics id {tested.fingerprint}"
    )
    if not tested.passed:
        detail += f" ({'; '.join(map(str, tested.failures))}); only target.exactness: fast works here"
    return Finding("ok" if tested.passed else "broken", detail)


def _context(target: EngineTarget) -> str:
    """The longest context, and the memory of its keys and values and of the pool by default."""
    pool, longest, a_token = EngineConfig().max_kv_tokens, target.max_context_tokens, target.token_bytes
    return (
        f"context {longest} tokens, {a_token / 1024:.1f} KiB each: {longest * a_token / 2**20:.0f} MiB for a whole context, "
        f"{pool * a_token / 2**20:.0f} MiB for a pool of engine.max_kv_tokens {pool}"
    )


def _threads() -> Finding:
    import torch

    return Finding("ok", f"{torch.get_num_threads()} threads, at most, compute a step")


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
