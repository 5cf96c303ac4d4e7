"""From configuration to a running engine: load, test the numerics, measure the costs, build the drafters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from ragspec.config import (
    MIN_STEP_TOKENS,
    REFERENCE_HEAD,
    REFERENCE_TARGET,
    DraftingConfig,
    EagleConfig,
    EngineConfig,
    TargetConfig,
)
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.eagle.checkpoint import read_head
from ragspec.drafting.eagle.drafter import EagleDrafter
from ragspec.drafting.eagle.network import EagleNetwork, HeadTimer
from ragspec.drafting.eagle.shapes import make_shape
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission, SamplerFactory
from ragspec.engine.engine import Engine
from ragspec.engine.parallel import load_rank, threads_a_rank
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.attention import PAGE
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.linear import packing_available
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.self_test import SelfTest, self_test
from ragspec.numerics.threads import AdaptiveThreads, run_in_thread, set_num_threads
from ragspec.verification.sampling import compile_samplers

log = logging.getLogger(__name__)

_TYPICAL_ROWS = 8


def load_engine(
    target_config: TargetConfig,
    config: EngineConfig,
    drafting: DraftingConfig,
    make_sampler: SamplerFactory | None = None,
    ranks: Ranks = ONE_RANK,
    planner_class: type[Planner] = Planner,
) -> Engine:
    """A running engine; of several ranks rank 0's, while the others `load_follower` and run it.

    Raises: ModelError, ConfigError, RankLost.
    """
    if not packing_available(getattr(torch, target_config.dtype)):
        raise ModelError(f"this build of torch has no packed {target_config.dtype} product on this processor")

    most_threads, adaptive = threads_a_rank(config, ranks), config.adaptive_threads and ranks.size == 1

    def build() -> tuple[Target, Planner, Admission, EngineConfig, AdaptiveThreads]:
        target = load_rank(target_config, config, ranks)
        tested = check_numerics(target, most_threads)
        compile_samplers(tested.uncertainty)
        num_threads = choose_num_threads(target, most_threads) if adaptive else most_threads
        max_step_tokens = max(MIN_STEP_TOKENS, min(config.max_step_tokens, tested.num_rows))
        costs = measure_costs(target, max_step_tokens)
        planner = planner_class(make_drafters(target, drafting), costs, drafting.max_tree_nodes, target.vocab_size)
        settled = config.model_copy(update={"max_step_tokens": max_step_tokens})
        admission = Admission(target, tested.fingerprint, make_sampler, tested.uncertainty)
        threads = AdaptiveThreads(most_threads, num_threads, adaptive=adaptive)
        return target, planner, admission, settled, threads

    try:
        return Engine(*run_in_thread(build, most_threads))
    except BaseException:
        ranks.close()
        raise


def choose_num_threads(target: Target, most: int) -> int:
    """All of them, or one where threads that wait for each other are slower than that: beside other load they often are."""
    timer = _ForwardTimer(target)
    seconds: dict[int, list[float]] = {most: [], 1: []}
    for _ in range(7):
        for num_threads, times in seconds.items():
            set_num_threads(num_threads)
            times.append(timer.seconds(_TYPICAL_ROWS, _TYPICAL_ROWS))
    fastest = min(seconds, key=lambda num_threads: median(seconds[num_threads]))
    set_num_threads(fastest)
    return fastest


def check_numerics(target: Target, num_threads: int) -> SelfTest:
    """The self-test of a target. Raises: ModelError when it fails and `exactness` is bitwise."""
    tested = self_test(target, target.max_context_tokens, target.config.dtype, num_threads)
    if tested.passed:
        log.info("numerics self-test passed: rows are bitwise independent of their company (%s)", tested.numerics_id)
    elif target.config.exactness == "bitwise":
        raise ModelError(
            "the numerics self-test failed on this machine ("
            + "; ".join(map(str, tested.failures))
            + '); set target.exactness to "fast" to serve without the bitwise promise'
        )
    else:
        log.warning("numerics self-test failed: %s", "; ".join(map(str, tested.failures)))
    return tested


def make_drafters(target: Target, drafting: DraftingConfig) -> list[Drafter]:
    """Raises: ConfigError for an unknown drafter, ModelError for a head that cannot be read or is another target's."""
    known: dict[str, Callable[[], Drafter]] = {
        "copy": lambda: CopyDrafter(
            target.tokenizer, target.eos_ids, drafting.max_earlier_tokens if drafting.reuse_earlier_answers else 0
        ),
        "eagle": lambda: make_eagle(target, drafting.eagle),
    }
    names = drafting.drafters
    if names is None:
        names = ("copy", "eagle") if drafting.eagle.path else ("copy",)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"unknown drafter {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name]() for name in names] if drafting.speculation else []


def make_eagle(target: Target, config: EagleConfig) -> EagleDrafter:
    """A head from its directory, beside its target, with its costs measured. Raises: ModelError."""
    if not config.path and Path(target.config.model) != Path(REFERENCE_TARGET):
        raise ConfigError("drafting.eagle.path is empty: only the reference target has a head of its own")
    shape = make_shape(config.tree, config.num_children, config.width, config.max_depth)
    checkpoint, most = read_head(config.path or REFERENCE_HEAD), target.num_positions + shape.max_depth
    room = min(target.max_context_tokens, config.window, target.pool.num_slots)
    names = ("float32", "bfloat16") if config.dtype == "auto" else (config.dtype,)
    dtypes = [dtype for name in names if packing_available(dtype := getattr(torch, name))]
    networks = [EagleNetwork(checkpoint, target, most, dtype) for dtype in dtypes]
    timers = [HeadTimer(network, target.pool) for network in networks]
    rounds = [[timer.seconds(_TYPICAL_ROWS, room // 2) for timer in timers] for _ in range(7)]
    network, timer = min(
        zip(networks, timers, strict=True), key=lambda pair: median(r[timers.index(pair[1])] for r in rounds)
    )
    costs = CostTable.measure(timer.seconds, [room // 2], min(64, room // 2))
    return EagleDrafter(network, shape, costs, window=config.window, coupled=config.coupled)


def measure_costs(target: Target, max_rows: int) -> CostTable:
    """Seconds of a forward by rows, beside short and long contexts."""
    room = min(target.max_context_tokens, target.pool.num_slots - PAGE)
    max_rows = min(max_rows, 128, room // 2)
    contexts = [c for c in (128, 1024) if c + max_rows <= room] or [room // 2]
    return CostTable.measure(_ForwardTimer(target).seconds, contexts, max_rows)


class _ForwardTimer:
    """Times forwards of random tokens over a context of zeros; what it writes into the pool is never read."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def seconds(self, num_rows: int, context: int) -> float:
        slots = SequenceSlots(self._target.pool)
        slots.keep(*slots.reserve(context), list(range(context)))
        tokens = np.arange(num_rows, dtype=np.int32) % self._target.vocab_size
        batch = Batch([ScheduledSequence(slots, tokens)])
        begin = time.perf_counter()
        self._target.forward(tokens, batch.metadata, np.arange(num_rows, dtype=np.int32))
        elapsed = time.perf_counter() - begin
        slots.release()
        return elapsed
