"""How many threads a forward gets, with the machine played by the test; an error in one of them ends the step with that error.

Each case of an error runs in a process of its own, which a hang would outlive.
"""

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ragspec.numerics.cpu.kernels import Column, Kind, number_chunks
from ragspec.numerics.cpu.phases import make_table
from ragspec.numerics.threads import AdaptiveThreads, compute_threads, set_num_threads, started_threads


class Machine:
    """Forwards take what `seconds(num_threads)` says; `used` is the count of each."""

    def __init__(self, seconds: Callable[[int], float], first: int | None = None) -> None:
        self.seconds = seconds
        self.used: list[int] = []
        self.choice = AdaptiveThreads(4, first, self.used.append)

    def run(self, num_steps: int, num_rows: int = 1) -> list[int]:
        """The counts that these forwards ran with."""
        ran = []
        for _ in range(num_steps):
            self.choice.begin(num_rows)
            ran.append(self.used[-1])
            self.choice.end(num_rows, self.seconds(ran[-1]))
        return ran


def test_all_threads_stay_where_they_pay() -> None:
    """Trials cost more than they can find, or one lucky trial decides."""
    machine = Machine(lambda n: 1.0 if n == 4 else 1.6)
    ran = machine.run(3000)
    assert 0 < ran.count(1) <= 60
    assert machine.used[-1] == 4


def test_one_thread_is_found_soon_when_the_others_wait() -> None:
    """Another program takes the processors in the middle of an answer, and every step takes a hundred times as long."""
    load = [False]
    machine = Machine(lambda n: 1.0 if n == 4 and not load[0] else 1.6 if n == 1 else 160.0)
    machine.run(500)
    load[0] = True
    assert machine.run(10)[-1] == 1
    ran = machine.run(5000)
    assert ran.count(4) <= 2, "a trial that costs a hundred steps is rare"
    load[0] = False
    assert machine.run(20_000)[-1] == 4, "and the others come back when they are free again"


def test_sizes_are_not_compared_with_each_other() -> None:
    """A chunk of a prompt after single tokens looks like trouble, and one token after it like a win."""
    size = [1]
    machine = Machine(lambda n: size[0] * (1.0 if n == 4 else 1.6))
    ran = []
    for step in range(2000):
        size[0] = 300 if step % 7 == 0 else 1
        ran += machine.run(1, num_rows=size[0])
    assert 0 < ran.count(1) <= 40


def test_prompts_are_no_trials() -> None:
    """One answer in five waited 0.2 s longer for its first token: the trial that was due fell on the prompt, and paid for itself
    in steps, not in seconds. Drafts made it likelier, since answers then have fewer steps."""
    size = [1]
    pace = [1.0]
    machine = Machine(lambda n: pace[0] * size[0] * (1.0 if n == 4 else 2.0))
    dear, trials = 0, 0
    for step in range(7000):
        size[0] = 20 if step % 7 == 0 else 1
        pace[0] = 3.0 if step % 70 == 6 else 1.0  # a token before a prompt is slow
        (used,) = machine.run(1, num_rows=size[0])
        trials += used == 1
        dear += used == 1 and size[0] > 1
    assert dear == 0 < trials
    size[0] = 20
    assert 1 in machine.run(200, num_rows=20), "where there are only prompts, these are tried"


def test_a_trial_with_nothing_to_compare_with_does_not_go_on() -> None:
    """The first forward is a prompt, the rest are tokens: a whole answer was a trial, and slow."""
    machine = Machine(lambda n: 1.0 if n == 4 else 1.6)
    machine.run(1, num_rows=300)
    assert machine.run(40).count(1) <= 3


def test_a_slower_machine_is_not_the_threads_fault() -> None:
    """Everything twice as slow as before: a few trials, then as rarely as ever."""
    pace = [1.0]
    machine = Machine(lambda n: pace[0] * (1.0 if n == 4 else 1.6))
    machine.run(300)
    pace[0] = 3.0
    assert machine.run(1000).count(1) <= 25


def test_a_fixed_count_stays() -> None:
    used: list[int] = []
    choice = AdaptiveThreads(4, None, used.append, adaptive=False)
    for step in range(100):
        choice.begin(1)
        choice.end(1, 1.0 + 200.0 * (step % 2))
    assert set(used) == {4}


def test_the_count_found_at_load_is_where_it_starts() -> None:
    assert Machine(lambda n: 1.0, first=1).run(1) == [1]
    assert Machine(lambda n: 1.0, first=4).run(1) == [4]


def test_a_pool_begins_no_thread_later() -> None:
    """A thread that begins when memory has run out can stop the thread that begins it."""
    before = threading.active_count()
    with started_threads(3, "pool") as threads:
        assert threading.active_count() == before + 3
        assert list(threads.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        assert threading.active_count() == before + 3


def test_threads_that_compute_stay_and_have_no_workers() -> None:
    """Each call began threads, whose kernels and workers began anew with them."""
    set_num_threads(2)
    names = set[str]()
    for _ in range(3):
        for name, count in compute_threads(2).map(
            lambda _: (threading.current_thread().name, torch.get_num_threads()), "ab"
        ):
            names.add(name)
            assert count == 1
    assert len(names) <= 2 and compute_threads(2) is compute_threads(2)


def test_a_thread_keeps_its_count_when_another_sets_its_own() -> None:
    """The engine's count became that of all threads that had computed nothing yet."""
    with started_threads(2, "pool", set_num_threads, (1,)) as threads:
        set_num_threads(2)
        assert set(threads.map(lambda _: torch.get_num_threads(), range(20))) == {1}


def test_indexing_and_queries_compute_with_their_own_priority() -> None:
    """Threads of whoever computed first served all: queries waited as if they were indexing, or indexing took their time."""

    def niceness(own: int) -> set[int]:
        os.setpriority(os.PRIO_PROCESS, 0, own)
        return set(compute_threads(2).map(lambda _: os.getpriority(os.PRIO_PROCESS, 0), range(20)))

    usual = os.getpriority(os.PRIO_PROCESS, 0)
    for nicer in (3, 0, 3):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(niceness, usual + nicer).result() == {usual + nicer}


@pytest.mark.slow
def test_threads_that_cannot_begin_are_an_error_and_keep_no_process_alive() -> None:
    """Those that had begun waited for the others for ever, and so did the end of the process."""
    code = """
import threading
from ragspec.numerics.threads import started_threads
start = threading.Thread.start
def failing(thread):
    if threading.active_count() > 2:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = failing
started_threads(5, "pool")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=False)
    assert ended.returncode == 1 and "can't start new thread" in ended.stderr


def _computed() -> None:
    assert compute_threads(2).submit(abs, -1).result(20.0) == 1


def test_a_fork_computes_in_threads_of_its_own() -> None:
    """It waited for ever for the threads of the process that it was forked from."""
    _computed()
    fork = multiprocessing.get_context("fork").Process(target=_computed)
    fork.start()
    fork.join(40.0)
    assert fork.exitcode == 0


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
    batch.drop()
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
