"""Self-test results and cost tables of earlier starts, kept on disk so that the next start takes seconds.

A file's name has the numerics id (a hash of the target's own logits and of all versions), the threads, and hashes of the
processor's model and of the kernels' source: another kernel may give the same first rows and other large batches. A short
self-test confirms a kept one, or a whole one runs. Kept costs are not measured again at once: a few forwards tell the speed of
today, and every start measures one number of rows more in each context, so that costs first measured beside other load come
right.

>>> tested = kept_self_test(target, num_threads)
>>> costs = kept_costs(target, tested.numerics_id, num_threads, forward_s, lambda: measure_costs(target, 512))
"""

import functools
import hashlib
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel

from ragspec import numerics
from ragspec.core import Say, log_progress
from ragspec.disk import make_folder, write_atomically
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.target import Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.self_test import CHUNKS, QUICK_CHUNKS, QUICK_ROWS, SelfTest, self_test

log = logging.getLogger(__name__)

_CPU_INFO = Path("/proc/cpuinfo")

_CHECKED_ROWS, _CHECKED_TIMES = (1, 16), 3
_MOST_CORRECTED = 64
"""Forwards of more rows would take a tenth of a second."""
_MOST_CHANGE = 2.0


class _Measurements(BaseModel):
    """`num_rows`: of the self-test that passed, 0 if none. `rows`, `seconds`: of the cost table, `num_starts`: with it."""

    num_rows: int = 0
    rows: list[int] = []
    seconds: dict[int, list[float]] = {}
    num_starts: int = 0


def kept_self_test(target: Target, num_threads: int, say: Say = log_progress) -> SelfTest:
    """The result of an earlier start's self-test if a short one confirms it, else of a whole one."""
    longest, dtype = target.max_context_tokens, target.config.numerics_dtype
    quick = self_test(target, min(longest, QUICK_ROWS), dtype, num_threads, QUICK_CHUNKS, say)
    path = _path(target, quick.numerics_id, num_threads)
    if quick.passed and (num_rows := _read(path).num_rows):
        return quick._replace(num_rows=num_rows)
    tested = self_test(target, longest, dtype, num_threads, CHUNKS, say)
    if tested.passed:
        _write(path, _read(path).model_copy(update={"num_rows": tested.num_rows}))
    return tested


def kept_costs(
    target: Target,
    numerics_id: str,
    num_threads: int,
    forward_s: Callable[[int, int], float],
    measure: Callable[[], CostTable],
) -> CostTable:
    """The cost table of an earlier start at today's speed, or `measure()`. `forward_s(rows, context)`: seconds of one forward.

    `num_threads`: the most that the engine may use. Why not the number in use: that follows other load.
    """
    path = _path(target, numerics_id, num_threads)
    kept = _read(path)
    if kept.rows and kept.seconds:
        today = _at_the_speed_of_today(CostTable(kept.seconds, kept.rows), forward_s)
        chosen = kept.num_starts % sum(n <= _MOST_CORRECTED for n in kept.rows)
        changes = _changes(today, kept.rows[chosen], forward_s)
        seconds = _changed(kept.seconds, chosen, changes)
        _write(path, kept.model_copy(update={"seconds": seconds, "num_starts": kept.num_starts + 1}))
        return CostTable(_changed(today.measured[1], chosen, changes), kept.rows)
    table = measure()
    rows, seconds = table.measured
    _write(path, _read(path).model_copy(update={"rows": rows, "seconds": seconds}))
    return table


def forward_s(
    target: Target,
    num_rows: int,
    context: int,
    parents: Sequence[int] = (-1,),
    layers: Sequence[int] = (),
    taps: Sequence[int] = (),
) -> float:
    """Seconds of one forward of arbitrary tokens, the last as nodes of a tree, over a context of arbitrary content.

    `layers`: through these layers and the output layer alone; empty: all. `taps`: see `Target.forward_tapped`.
    """
    slots = SequenceSlots(target.pool)
    try:
        slots.keep(*slots.reserve(context), list(range(context)))
        batch = Batch([ScheduledSequence(slots, np.arange(num_rows, dtype=np.int32) % target.vocab_size, parents)])
        begin = time.perf_counter()
        if layers:
            target.logits_of(target.states_through(layers, batch.token_ids, batch.metadata))
        else:
            target.forward_tapped(batch.token_ids, batch.metadata, np.arange(num_rows, dtype=np.int32), taps)
        target.backend.wait()
        return time.perf_counter() - begin
    finally:
        slots.release()


def _at_the_speed_of_today(kept: CostTable, forward_s: Callable[[int, int], float]) -> CostTable:
    """`kept` times the change of a few rows; between them the change is interpolated.

    Why no new measurement, however large the change: other load of a moment looks like a change of the machine.
    """
    rows, seconds = kept.measured
    context, checked = min(seconds), [n for n in _CHECKED_ROWS if n <= rows[-1]]
    rounds = [[forward_s(n, context) for n in checked] for _ in range(_CHECKED_TIMES)]
    changes = [
        min(times) / kept.cost_s(n, context) for n, times in zip(checked, zip(*rounds, strict=True), strict=True)
    ]
    factors = np.interp(rows, checked, changes).tolist()
    return CostTable({c: [s * f for s, f in zip(column, factors, strict=True)] for c, column in seconds.items()}, rows)


def _changes(today: CostTable, num_rows: int, forward_s: Callable[[int, int], float]) -> dict[int, float]:
    """By what factor the cost of so many rows is to change, by context: half-way to the fastest forward there."""
    ratios = {
        c: min(forward_s(num_rows, c) for _ in range(_CHECKED_TIMES)) / today.cost_s(num_rows, c)
        for c in today.measured[1]
    }
    return {c: math.sqrt(min(_MOST_CHANGE, max(1 / _MOST_CHANGE, ratio))) for c, ratio in ratios.items()}


def _changed(seconds: dict[int, list[float]], at: int, factors: dict[int, float]) -> dict[int, list[float]]:
    return {c: [s * factors[c] if i == at else s for i, s in enumerate(column)] for c, column in seconds.items()}


def _path(target: Target, numerics_id: str, num_threads: int) -> Path:
    folder = Path(target.config.cache_dir).expanduser() / "measurements"
    size = f"{target.pool.num_slots}-{target.max_context_tokens}-{target.ranks.size}"
    if most := target.config.max_weight_bytes:
        size += f"-{most}"
    return folder / f"{numerics_id}-{_kernels_digest()}-{_processor_digest()}-{num_threads}-{size}.json"


@functools.cache
def _processor_digest() -> str:
    """The processor's model and features, never the machine's name."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    features = [
        line for line in lines if line.startswith(("model name", "flags", "CPU implementer", "CPU part", "Features"))
    ]
    known = (
        *dict.fromkeys(features),
        platform.machine(),
        platform.processor(),
        torch.backends.cpu.get_cpu_capability(),
    )
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


@functools.cache
def _kernels_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(numerics.__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _read(path: Path) -> _Measurements:
    """An unreadable file counts as none: everything in it can be measured again."""
    try:
        return _Measurements.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return _Measurements()


def _write(path: Path, measurements: _Measurements) -> None:
    try:
        make_folder(path.parent)
        write_atomically(path, measurements.model_dump_json())
    except OSError as cause:
        log.warning("measurements are not kept: cannot write %s: %s", path, cause.strerror or cause)
