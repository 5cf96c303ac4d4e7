"""`ragspec doctor`: checks the installation, the machine, the configured index, and the target with a bitwise self-test.

Owns the checks and their output; changes nothing but the cache folder, which it creates. A check is ok, a warning, or broken;
broken means that a command will not work. Without `--full` it ends within seconds: the self-test is short, and a target that no
start has prepared is not loaded.

    $ ragspec doctor --json
"""

import importlib.util
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from ragspec.cli.options import Adapter, AsJson, Config, IndexOrLibrary, Target, overrides
from ragspec.cli.terminal import cache_folder, one_line, stage, stay_offline, stdout_console
from ragspec.config import PipelineConfig, TargetConfig, load_config
from ragspec.core import Say
from ragspec.engine.checkpoints.target_files import check_target

Status = Literal["ok", "warning", "broken"]
_MARKS = {"ok": ("✓ ", "green"), "warning": ("! ", "yellow"), "broken": ("✗ ", "bold red")}
_PACKAGES = "ragspec torch transformers tokenizers sentence-transformers numba numpy pyarrow ray".split()
_CPU_FLAGS = "avx2 fma avx512f avx512_vnni avx512_bf16 amx_bf16 asimd bf16".split()
_KV_TOKENS = 4096
_MIN_MEMORY_GB, _MIN_DISK_GB = 3.5, 1.0


class Finding(NamedTuple):
    status: Status
    detail: str


def doctor(
    config: Config = None,
    index: IndexOrLibrary = None,
    target: Target = None,
    adapter: Adapter = None,
    full: Annotated[
        bool, typer.Option("--full", help="Prepare the target and test whole contexts; takes minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What this machine can do, in ten seconds. Exits 1 if something needed is broken."""
    settings = load_config(config, **overrides(index=index, target=target, adapter=adapter))
    stay_offline(settings.target)
    console = Console(quiet=True) if as_json else stdout_console()
    found: dict[str, Finding] = {}
    checks: list[Callable[[PipelineConfig, Say], Finding]] = [_packages, _processor, _memory, _cache, _products]
    checks += [_encoder, *([_index] if settings.retriever.index_dir else []), _target]
    for check in checks:
        name = check.__name__.removeprefix("_")
        with stage(console, name, f"checking: {name}") as shown:
            try:
                found[name] = _target(settings, shown, full=full) if check is _target else check(settings, shown)
            except Exception as cause:  # a check that raises is a finding; the other checks still run
                found[name] = Finding("broken", f"{type(cause).__name__}: {one_line(cause)}")
            shown.mark, shown.detail = Text(*_MARKS[found[name].status]), found[name].detail
    broken = [name for name, finding in found.items() if finding.status == "broken"]
    if as_json:
        print(json.dumps({"ok": not broken, "checks": {name: f._asdict() for name, f in found.items()}}))
    else:
        verdict = (f"broken: {', '.join(broken)}", "bold red") if broken else ("Everything needed works.", "green")
        console.print(Text(), Text(*verdict))
    raise typer.Exit(int(bool(broken)))


def _packages(*_: object) -> Finding:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    system = f"Python {platform.python_version()} on {platform.platform()}"
    detail = ", ".join([system, *found]) + (f"; missing: {', '.join(missing)}" if missing else "")
    if importlib.util.find_spec("faiss") is None:
        detail += "; no faiss, so every search is exact (the extras cpu and gpu bring it)"
    return Finding("broken" if missing else "ok", detail)


def _processor(*_: object) -> Finding:
    import torch

    fields = _table("/proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    known = " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "no known vector extensions"
    name = fields.get("model name") or platform.machine()
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"
    return Finding("ok", f"{cores}, {torch.get_num_threads()} threads at most compute a step, {name}: {known}")


def _memory(*_: object) -> Finding:
    fields = _table("/proc/meminfo")
    total, available = (int(fields[name].split()[0]) / 1e6 for name in ("MemTotal", "MemAvailable"))
    status: Status = "ok" if available >= _MIN_MEMORY_GB else "warning"
    return Finding(status, f"{available:.1f} GB available of {total:.1f} GB; the demo needs up to {_MIN_MEMORY_GB} GB")


def _table(path: str) -> dict[str, str]:
    """A file of `name: value` lines; of equal names the last counts."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _cache(*_: object) -> Finding:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        free_gb = shutil.disk_usage(folder).free / 1e9
    status: Status = "ok" if free_gb >= _MIN_DISK_GB else "warning"
    return Finding(status, f"{folder} can be written, {free_gb:.1f} GB free")


def _products(*_: object) -> Finding:
    import torch

    from ragspec.numerics.linear import packing_available

    has = {name: packing_available(getattr(torch, name)) for name in ("float32", "bfloat16")}
    if not has["float32"]:
        return Finding("broken", "float32: no; this build of torch lacks oneDNN's packed product, so install another")
    if not has["bfloat16"]:
        return Finding("ok", "float32: yes; bfloat16: no; large models run in int8 (target.quantization: auto)")
    return Finding("ok", "float32 and bfloat16: yes")


def _encoder(settings: PipelineConfig, _: object) -> Finding:
    from ragspec.retrieval.encoder import Encoder

    encoder = Encoder.load(settings.encoder)
    bitwise = encoder.max_batch_size > 1
    batches = "batches do not change a bit" if bitwise else "batches change bits here, so texts are encoded one by one"
    return Finding("ok" if bitwise else "warning", f"{encoder.identity.id}, the published weights; {batches}")


def _index(settings: PipelineConfig, _: object) -> Finding:
    from ragspec.retrieval.index.manifest import read_generation
    from ragspec.retrieval.index.pointer import read_pointer

    folder = Path(settings.retriever.index_dir)
    _, manifest = read_generation(folder, settings.retriever.pointer or read_pointer(folder))
    return Finding("ok", f"{folder}: {manifest.num_documents} documents, {manifest.num_passages} passages")


def _target(settings: PipelineConfig, say: Say, *, full: bool = False) -> Finding:
    """Also the longest context, and the memory of its keys and values and of the configured pool."""
    from ragspec.engine.checkpoints.saved_model import is_prepared
    from ragspec.engine.loading import check_numerics
    from ragspec.engine.target import Target, with_available_dtype
    from ragspec.numerics.self_test import QUICK_CHUNKS, QUICK_ROWS, self_test

    check_target(settings.target)
    config = with_available_dtype(settings.target).model_copy(update={"exactness": "fast"})
    if not full and not is_prepared(config):
        return Finding(
            "ok", f"{config.model}: its files are here; the first start prepares them, or ragspec doctor --full"
        )
    target = Target.load(config, _KV_TOKENS, say=say)
    say("testing the numerics")
    num_threads = max(1, len(os.sched_getaffinity(0)))
    if full:
        tested = check_numerics(target, num_threads)
    else:
        num_rows = min(QUICK_ROWS, target.max_context_tokens)
        tested = self_test(target, num_rows, config.numerics_dtype, num_threads, QUICK_CHUNKS, say)
    pool, longest, a_token = settings.engine.max_kv_tokens, target.max_context_tokens, target.token_bytes
    detail = (
        f"{target.num_parameters / 1e6:.1f}M parameters; context {longest} tokens, {a_token / 1024:.1f} KiB each: "
        f"{longest * a_token / 2**20:.0f} MiB for a whole context, {pool * a_token / 2**20:.0f} MiB for a pool of "
        f"engine.max_kv_tokens {pool}; {'whole' if full else 'short'} bitwise self-test "
        f"{'passed' if tested.passed else 'FAILED'}, numerics id {tested.fingerprint}"
    )
    if not tested.passed:
        detail += f" ({'; '.join(map(str, tested.failures))}); only target.exactness: fast works here"
    # Why not always: it loads transformers' modules of the model, a second and more
    ignored = _undefined_keys(config) if full else []
    if ignored:
        detail += f"; transformers does not define these keys of its config.json: {', '.join(ignored)}"
    return Finding("broken" if not tested.passed else "warning" if ignored else "ok", detail)


def _undefined_keys(config: TargetConfig) -> list[str]:
    from transformers import AutoConfig

    from ragspec.engine.checkpoints.target_files import target_folder
    from ragspec.engine.checkpoints.weights import undefined_keys

    folder = target_folder(config)
    return undefined_keys(AutoConfig.from_pretrained(folder), folder)
