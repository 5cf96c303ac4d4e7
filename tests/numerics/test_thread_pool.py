"""An error inside a compiled step ends the step with that error: no thread goes on waiting for a chunk that nobody computes.

Each case runs in a process of its own, which a hang would outlive.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from ragspec.numerics.cpu.kernels import Column, Kind, number_chunks
from ragspec.numerics.cpu.phases import make_table

PROGRAM = """
import sys, threading
from pathlib import Path
import numpy as np
import torch
sys.path.insert(0, sys.argv[3])
from tiny_target import save_model, target_config
from ragspec.engine.target import Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.cpu import thread_pool
from ragspec.numerics.cpu.llvm_code import TAKEN
from ragspec.numerics.kv_cache import SequenceSlots

torch.set_num_threads(2)
thread_pool.LEAST_SHARED = 0
target = Target.load(target_config(str(save_model("llama", Path(sys.argv[2]))), "int8"), num_kv_slots=1024)
tokens = np.arange(64, dtype=np.int32)

def forward():
    slots = SequenceSlots(target.pool)
    batch = Batch([ScheduledSequence(slots, tokens)])
    logits = target.forward(batch.token_ids, batch.metadata, np.array([63], np.int32))
    batch.sequences[0].drop()
    slots.release()
    return logits

expected = forward()
real, taken, fails = thread_pool.work, threading.Event(), sys.argv[1]

def work(phases, num_chunks, counters, waits, *rest):
    if waits == (fails == "caller"):
        counters[TAKEN] += 1  # it has taken a chunk, and will not finish it
        taken.set()
        raise MemoryError
    taken.wait()
    real(phases, num_chunks, counters, waits, *rest)

thread_pool.work = work
try:
    forward()
except MemoryError:
    print("raised")
thread_pool.work = real
assert np.array_equal(forward(), expected)
for jobs in thread_pool._POOL._queues:  # the helper is back at its queue: it takes the next call
    seen = threading.Event()
    thread_pool.work = lambda *given: seen.set()
    jobs.put(())
    assert seen.wait(30.0), "the helper never came back"
print("goes on")
"""


def test_little_work_has_one_thread_and_attention_alone_has_all() -> None:
    """Attention of float targets, a call without products, had come to run in one thread."""
    product = {Column.KIND: int(Kind.PRODUCT), Column.COUNT: 4, Column.WIDTH: 32}
    gated = product | {Column.KIND: int(Kind.GATED_PRODUCT)}
    attend = {Column.KIND: int(Kind.ATTEND)}
    weights = 4 * 16 * 32
    for phases, least, expected in (
        ([attend], 10**9, 2), ([product, attend], 3 * weights, 2), ([product, attend], 3 * weights + 1, 1),
        ([gated], 6 * weights, 2), ([gated], 6 * weights + 1, 1),
    ):  # fmt: skip
        assert number_chunks(make_table(phases), 3, 8, 2, least)[2] == expected


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["helper", "caller"])
def test_an_error_in_one_thread_ends_the_step(tmp_path: Path, fails: str) -> None:
    """The engine hung for ever, at full load, and no request of it ended."""
    tests = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", PROGRAM, fails, str(tmp_path / "model"), tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["raised", "goes on"], done.stderr[-1000:]
