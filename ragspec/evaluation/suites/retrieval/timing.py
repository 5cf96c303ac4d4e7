"""Timed searches in turns (A B A B) of short blocks, and timed builds. A machine that slows down slows all
contenders."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ragspec.config import ChunkingConfig, IndexConfig
from ragspec.core import Document
from ragspec.evaluation.suites.retrieval.collections import synthetic_documents
from ragspec.evaluation.timing import Tick, take_turns
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.encoder import EncoderWrapper, FloatArray, TextEncoder, TextKind
from ragspec.retrieval.index.writer import IndexWriter

Search = Callable[[FloatArray], Any]
RunBlock = Callable[[Callable[[], None]], None]

_LEAST_CALLS = 5


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """Every batch size gets `num_rounds` blocks of about `block_s` seconds for each contender."""

    num_queries: int = 1_000
    batches: tuple[int, ...] = (1, 4, 16, 64)
    num_rounds: int = 3
    block_s: float = 0.4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Milliseconds of every call: `calls_ms[contender][batch size][round]`."""

    calls_ms: Mapping[str, Mapping[int, Sequence[Sequence[float]]]]

    def p50_ms(self, name: str, batch: int) -> float:
        return self.summary(name)[f"p50 ms, batch {batch}"]

    def summary(self, name: str) -> dict[str, float]:
        """Median and 95th percentile of each batch size, over all rounds."""
        return {
            f"p{percent} ms, batch {batch}": float(np.percentile([*chain.from_iterable(rounds)], percent))
            for batch, rounds in self.calls_ms[name].items()
            for percent in (50, 95)
        }

    def ratio(self, a: tuple[str, int], b: tuple[str, int]) -> float:
        """Milliseconds of `a` over those of `b`, each (contender, batch size): a ratio in each round, then the
        median."""
        rounds = zip(self.calls_ms[a[0]][a[1]], self.calls_ms[b[0]][b[1]], strict=True)
        return median(median(one) / median(other) for one, other in rounds)


def timed_blocks(contenders: Mapping[str, tuple[Search, RunBlock]], queries: FloatArray, plan: TimingPlan) -> Blocks:
    """Every contender with every batch size, `num_rounds` times in turns."""
    searches = {name: partial(_block, *pair, queries, plan.block_s) for name, pair in contenders.items()}
    rounds = take_turns(searches, plan.batches, plan.num_rounds)
    return Blocks(
        {name: dict(zip(plan.batches, zip(*table, strict=True), strict=True)) for name, table in rounds.items()}
    )


def _block(search: Search, run: RunBlock, queries: FloatArray, block_s: float, batch: int) -> list[float]:
    """Milliseconds of single calls with different queries; the first call does not count."""
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


SHORT = IndexConfig(chunking=ChunkingConfig(max_chars=100))
"""Passages of about twenty tokens."""


class TimedEncoder(EncoderWrapper):
    """Times the encoding of another encoder; counting tokens is the index's work and is timed apart."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__(encoder)
        self.encode_s = 0.0
        self.count_tokens_s = 0.0

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        begin = time.perf_counter()
        counts = super().count_tokens(texts)
        self.count_tokens_s += time.perf_counter() - begin
        return counts

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        begin = time.perf_counter()
        vectors = super().encode(texts, kind)
        self.encode_s += time.perf_counter() - begin
        return vectors


def build_speed(encoder: TextEncoder, num_passages: int, folder: Path, seed: int, tick: Tick) -> dict[str, float | int]:
    """Seconds of building an index of about `num_passages` synthetic passages in `folder`, by part. Raises:
    SaveError.

    The passages are short, so that the encoder's share is small.
    """
    documents = _documents(num_passages, seed)
    timed = TimedEncoder(encoder)
    begin = time.perf_counter()
    with IndexWriter(folder, timed, SHORT) as writer:
        for number, document in enumerate(documents, 1):
            writer.upsert(document)
            tick("build", number, len(documents))
        manifest = writer.commit()
    total_s = time.perf_counter() - begin
    return {
        "num_passages": manifest.num_passages,
        "chars_per_passage": sum(len(document.text) for document in documents) / manifest.num_passages,
        "total_s": total_s,
        "encoder_s": timed.encode_s,
        "overhead_share": (total_s - timed.encode_s) / timed.encode_s,
        "count_tokens_s": timed.count_tokens_s,
        "passages_per_s": manifest.num_passages / total_s,
        "encoder_passages_per_s": manifest.num_passages / timed.encode_s,
        "file_mb": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
    }


def _documents(num_passages: int, seed: int) -> list[Document]:
    documents, count = [], 0
    for document in synthetic_documents(num_passages, seed):
        documents.append(document)
        count += len(chunk(document, SHORT.chunking))
        if count >= num_passages:
            break
    return documents
