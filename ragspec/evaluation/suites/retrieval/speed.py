"""Speed of search: the index's own searches and FAISS on the same synthetic vectors.

Exact search uses all processors on both sides, approximate search one thread on both; FAISS with all processors
stands beside. Where the index builds an approximate part, FAISS reads the same file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from ragspec.config import DenseConfig
from ragspec.evaluation.machine import held_mb
from ragspec.evaluation.suites.retrieval.collections import Mixture, write_vectors
from ragspec.evaluation.suites.retrieval.timing import Blocks, RunBlock, Search, TimingPlan, timed_blocks
from ragspec.evaluation.timing import Tick
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.manifest import DENSE, VECTORS
from ragspec.retrieval.index.segment_files import mapped_array
from ragspec.retrieval.search.approximate import (
    EF_CONSTRUCTION,
    MIN_ROWS,
    ApproximateIndex,
    build_faiss_index,
    default_faiss_factory,
    default_search_width,
)
from ragspec.retrieval.search.dense import DenseIndex, ExactIndex, ScoredRows, load_faiss

Kind = Literal["hnsw", "ivf"]
Figures = dict[str, float]
T = TypeVar("T")

K = 10
EXACT, FLAT = "exact", "FAISS Flat"
OWN: dict[Kind, str] = {"hnsw": "HNSW", "ivf": "IVF"}
QUERIES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Contender:
    """`search` searches for query vectors [B, E], `rows` extracts the `K` best rows of each query, `run` calls a
    block in the contender's thread. `column`: figures from opening it."""

    name: str
    search: Search
    rows: Callable[[Any], list[list[int]]]
    run: RunBlock
    column: Figures

    def found(self, queries: FloatArray) -> list[list[int]]:
        """The `K` best rows of each query."""
        found: list[list[int]] = []

        def block() -> None:
            for first in range(0, len(queries), QUERIES_AT_ONCE):
                found.extend(self.rows(self.search(queries[first : first + QUERIES_AT_ONCE])))

        self.run(block)
        return found


def contenders(folder: Path, kinds: Sequence[Kind]) -> Iterator[Contender]:
    """Open each contender alone over the vectors in `folder`: exact search, FAISS Flat, then both sides of each kind.

    Raises: ConfigError without FAISS, OSError.
    """
    vectors: FloatArray = mapped_array(folder / VECTORS)
    vectors_mb = (folder / VECTORS).stat().st_size / 1e6
    exact, column = _opened(partial(ExactIndex, vectors), vectors)
    yield own_contender(EXACT, exact, column | {"file MB": vectors_mb})
    flat, column = _opened(partial(_flat, vectors), vectors)
    yield faiss_contender(FLAT, flat, num_processors(), column | {"file MB": vectors_mb})
    for kind in kinds:
        name, part = OWN[kind], folder / kind
        if len(vectors) >= MIN_ROWS:
            built = _build(folder, part, kind)
            index, column = _opened(lambda k=kind, p=part: open_own(p, vectors, k), vectors)  # type: ignore[misc]
            yield own_contender(name, index, column | built | {"file MB": built["file MB"] + vectors_mb})
            faiss_index, column = _opened(partial(open_plain, part, kind), vectors)
        else:  # the rule builds no approximate index of so few rows; FAISS can
            begin = time.perf_counter()
            faiss_index, column = _opened(partial(_trained, vectors, kind), vectors)
            built = {"build s": time.perf_counter() - begin}
        yield faiss_contender(f"FAISS {name}", faiss_index, 1, column | built)
        if num_processors() > 1:
            yield faiss_contender(
                f"FAISS {name}, {num_processors()} threads", faiss_index, num_processors(), column | built
            )


def own_contender(name: str, index: DenseIndex, column: Figures | None = None) -> Contender:
    """The index's own search, which chooses its threads itself."""
    return Contender(name, lambda queries: index.search(queries, K), best_rows, lambda block: block(), column or {})


def faiss_contender(name: str, index: Any, num_threads: int, column: Figures | None = None) -> Contender:
    """FAISS's search of one of its indexes.

    Why a thread for each block: FAISS's workers end with the thread. More workers than processors would slow the
    process.
    """

    def run(block: Callable[[], None]) -> None:
        def call() -> None:
            load_faiss().omp_set_num_threads(num_threads)
            block()

        run_in_thread(call, num_threads)

    return Contender(name, lambda queries: index.search(queries, K), lambda found: found[1].tolist(), run, column or {})


def open_own(folder: Path, vectors: FloatArray, kind: Kind, width: int = 0) -> DenseIndex:
    """The index's own search of `kind`; `width` replaces the default width."""
    return ApproximateIndex.open(folder, vectors, DenseConfig(kind=kind, search_width=width))


def open_plain(folder: Path, kind: Kind, width: int = 0) -> Any:
    """The same FAISS index with our default width, or with `width`."""
    return _widened(load_faiss().read_index(str(folder / DENSE)), kind, width)


def best_rows(found: Sequence[ScoredRows]) -> list[list[int]]:
    """The `K` best rows of each query, by score, then row."""
    return [
        [row for _, row in sorted(zip((-each.scores).tolist(), each.rows.tolist(), strict=True))[:K]] for each in found
    ]


def _opened(make: Callable[[], T], vectors: FloatArray) -> tuple[T, Figures]:
    """Open with `make` and search once; returns the memory held beside mapped files."""
    before = held_mb()
    index: Any = make()
    index.search(np.array(vectors[:QUERIES_AT_ONCE]), K)
    return index, {"memory MB": max(0.0, held_mb() - before)}


def _flat(vectors: FloatArray) -> Any:
    index = load_faiss().IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index


def _build(folder: Path, part: Path, kind: Kind) -> Figures:
    """Build with the index's own code, in a folder of this kind alone."""
    part.mkdir()
    (part / VECTORS).symlink_to(folder.resolve() / VECTORS)
    begin = time.perf_counter()
    build_faiss_index(part, DenseConfig(kind=kind))
    return {"build s": time.perf_counter() - begin, "file MB": (part / DENSE).stat().st_size / 1e6}


def _trained(vectors: FloatArray, kind: Kind) -> Any:
    faiss = load_faiss()
    index = faiss.index_factory(vectors.shape[1], default_faiss_factory(kind, len(vectors)), faiss.METRIC_INNER_PRODUCT)
    if kind == "hnsw":
        index.hnsw.efConstruction = EF_CONSTRUCTION
    else:
        index.cp.min_points_per_centroid = 1  # Why: no warning on stderr
    index.train(vectors)
    index.add(vectors)
    return _widened(index, kind, 0)


def _widened(index: Any, kind: Kind, width: int) -> Any:
    if kind == "hnsw":
        index.hnsw.efSearch = width or default_search_width(kind, index.ntotal)
    else:
        index.nprobe = width or default_search_width(kind, index.ntotal)
    return index


Point = dict[str, float]

WIDTHS: dict[Kind, tuple[int, ...]] = {"hnsw": (16, 32, 64, 128, 256), "ivf": (4, 8, 16, 32, 64, 128)}


@dataclass(slots=True)
class SpeedTable:
    """Results for one number of vectors: figures by contender, recall and time by search width, and all times."""

    num_rows: int
    columns: dict[str, Figures]
    blocks: Blocks
    curves: dict[str, list[Point]] = field(default_factory=dict)


def speed_table(folder: Path, num_rows: int, kinds: Sequence[Kind], plan: TimingPlan, tick: Tick) -> SpeedTable:
    """Build all contenders in `folder`, time their searches, compare. Raises: ConfigError without FAISS, OSError."""
    stage = f"{num_rows:,} vectors"
    tick(stage, 0, 4)
    mixture = Mixture(num_rows, plan.seed)
    write_vectors(folder / VECTORS, mixture, num_rows)
    queries = mixture.draw(plan.num_queries)
    tick(stage, 1, 4)
    opened = list(contenders(folder, kinds))
    tick(stage, 2, 4)
    truth = opened[0].found(queries)
    blocks = _timed(opened, queries, plan)
    columns = {
        c.name: {"recall@10": recall(c.found(queries), truth)} | blocks.summary(c.name) | c.column for c in opened
    }
    tick(stage, 3, 4)
    table = SpeedTable(num_rows, columns, blocks)
    for kind in kinds:
        if (folder / kind).exists():
            table.curves |= curves(folder, kind, queries, truth, plan)
    tick(stage, 4, 4)
    return table


def recall(found: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> float:
    """Share of the true rows found."""
    hits = sum(len(set(a) & set(b)) for a, b in zip(found, truth, strict=True))
    return hits / sum(len(rows) for rows in truth)


def curves(
    folder: Path, kind: Kind, queries: FloatArray, truth: Sequence[Sequence[int]], plan: TimingPlan
) -> dict[str, list[Point]]:
    """Recall and milliseconds of one query at several search widths: of the index, and of FAISS with one thread."""
    vectors: FloatArray = mapped_array(folder / VECTORS)
    found: dict[str, list[Point]] = {OWN[kind]: [], f"FAISS {OWN[kind]}": []}
    for width in WIDTHS[kind]:
        ours, theirs = open_own(folder / kind, vectors, kind, width), open_plain(folder / kind, kind, width)
        pair = (own_contender(OWN[kind], ours), faiss_contender(f"FAISS {OWN[kind]}", theirs, 1))
        blocks = _timed(pair, queries, TimingPlan(plan.num_queries, (1,), plan.num_rounds, plan.block_s / 2, plan.seed))
        for each in pair:
            point = {"width": width, "recall@10": recall(each.found(queries), truth), "ms": blocks.p50_ms(each.name, 1)}
            found[each.name].append(point)
    return found


def _timed(opened: Sequence[Contender], queries: FloatArray, plan: TimingPlan) -> Blocks:
    return timed_blocks({each.name: (each.search, each.run) for each in opened}, queries, plan)
