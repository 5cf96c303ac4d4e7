"""How fast, how large and how near to exact: every contender over synthetic vectors of one number.

>>> speed_table(folder, 100_000, ("hnsw", "ivf"), TimingPlan(), tick).columns["exact"]["p50 ms, batch 1"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragspec.evaluation.comparison import Tick
from ragspec.evaluation.retrieval_contenders import (
    OWN,
    Column,
    Contender,
    Kind,
    contenders,
    open_own,
    open_plain,
    own,
    plain,
)
from ragspec.evaluation.retrieval_data import Mixture, write_vectors
from ragspec.evaluation.retrieval_timing import Blocks, TimingPlan, take_turns
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.manifest import VECTORS
from ragspec.retrieval.index.segment_files import mapped_array

Point = dict[str, float]

WIDTHS: dict[Kind, tuple[int, ...]] = {"hnsw": (16, 32, 64, 128, 256), "ivf": (4, 8, 16, 32, 64, 128)}


@dataclass(slots=True)
class SpeedTable:
    """One number of vectors: a column of figures a contender, points of recall and time by search width, and all times."""

    num_rows: int
    columns: dict[str, Column]
    blocks: Blocks
    curves: dict[str, list[Point]] = field(default_factory=dict)


def speed_table(folder: Path, num_rows: int, kinds: Sequence[Kind], plan: TimingPlan, tick: Tick) -> SpeedTable:
    """Build everything in `folder`, let all of it search, compare. Raises: ConfigError without FAISS, OSError."""
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
    """Share of the true rows that were found."""
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
        pair = (own(OWN[kind], ours), plain(f"FAISS {OWN[kind]}", theirs, 1))
        blocks = _timed(pair, queries, TimingPlan(plan.num_queries, (1,), plan.num_rounds, plan.block_s / 2, plan.seed))
        for each in pair:
            point = {"width": width, "recall@10": recall(each.found(queries), truth), "ms": blocks.p50_ms(each.name, 1)}
            found[each.name].append(point)
    return found


def _timed(opened: Sequence[Contender], queries: FloatArray, plan: TimingPlan) -> Blocks:
    return take_turns({each.name: (each.search, each.run) for each in opened}, queries, plan)
