"""Searches that take turns (A B A B) in short blocks of calls, so that a machine that slows down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import numpy as np

from ragspec.retrieval.encoder import FloatArray

Search = Callable[[FloatArray], Any]
RunBlock = Callable[[Callable[[], None]], None]

_LEAST_CALLS = 5


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """Every batch size gets `num_rounds` blocks of about `block_s` seconds a contender."""

    num_queries: int = 1_000
    batches: tuple[int, ...] = (1, 4, 16, 64)
    num_rounds: int = 3
    block_s: float = 0.4
    seed: int = 0


@dataclass(slots=True)
class Blocks:
    """Milliseconds of every call: `calls_ms[contender][batch size][round]`."""

    calls_ms: dict[str, dict[int, list[list[float]]]] = field(default_factory=dict)

    def add(self, name: str, batch: int, calls_ms: list[float]) -> None:
        self.calls_ms.setdefault(name, {}).setdefault(batch, []).append(calls_ms)

    def p50_ms(self, name: str, batch: int) -> float:
        return float(np.percentile(self._calls(name, batch), 50))

    def summary(self, name: str) -> dict[str, float]:
        """Median and 95th percentile of each batch size, over all rounds."""
        numbers: dict[str, float] = {}
        for batch in self.calls_ms.get(name, {}):
            for percent in (50, 95):
                numbers[f"p{percent} ms, batch {batch}"] = float(np.percentile(self._calls(name, batch), percent))
        return numbers

    def ratio(self, a: tuple[str, int], b: tuple[str, int]) -> float:
        """How many times the milliseconds of `b` those of `a` are, each (contender, batch size): formed in each round, then the
        median over rounds."""
        rounds = zip(self.calls_ms[a[0]][a[1]], self.calls_ms[b[0]][b[1]], strict=True)
        return median(median(one) / median(other) for one, other in rounds)

    def _calls(self, name: str, batch: int) -> list[float]:
        return list(chain.from_iterable(self.calls_ms[name][batch]))


def take_turns(contenders: Mapping[str, tuple[Search, RunBlock]], queries: FloatArray, plan: TimingPlan) -> Blocks:
    """Every contender with every batch size, `num_rounds` times."""
    blocks = Blocks()
    for _ in range(plan.num_rounds):
        for batch in plan.batches:
            for name, (search, run) in contenders.items():
                blocks.add(name, batch, _block(search, run, queries, batch, plan.block_s))
    return blocks


def _block(search: Search, run: RunBlock, queries: FloatArray, batch: int, block_s: float) -> list[float]:
    """Milliseconds of single calls, each with other queries; the first call is not counted."""
    calls_ms: list[float] = []
    starts = range(0, max(1, len(queries) - batch + 1), batch)

    def block() -> None:
        search(queries[:batch])
        end = time.perf_counter() + block_s
        while len(calls_ms) < _LEAST_CALLS or time.perf_counter() < end:
            first = starts[len(calls_ms) % len(starts)]
            begin = time.perf_counter()
            search(queries[first : first + batch])
            calls_ms.append(1000 * (time.perf_counter() - begin))

    run(block)
    return calls_ms
