"""What the numbers of the retrieval suite mean, and which of them must reach what."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.plots import INK, OTHER, OWN, new_figure, save_figure
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.retrieval.speed import EXACT, FLAT

Table = dict[str, Any]

NOTES = ("search_threads", "published", "rerank", "hnsw_skipped")
_SIZES = ("memory MB", "file MB", "build s")
_P50 = "p50 ms, batch "
_PLAIN_TABLES = ("identity", "build")

MEANINGS = {
    "recall10_squad_dense": "SQuAD questions whose paragraph is among the first ten, by meaning",
    "recall10_squad_bm25": "the same by words",
    "recall10_squad_hybrid": "the same by both",
    "ndcg_cranfield_bm25": "nDCG@10 on Cranfield by words",
    "ndcg_cranfield_bm25s": "the same by bm25s",
    "exact_p50_ms_100k": "milliseconds of one query, exact search over 100,000 vectors, median",
    "faiss_flat_p50_ms_100k": "the same by FAISS Flat",
    "exact_batch16_over_batch1": "time of 16 queries over time of one, exact search over 100,000 vectors",
    "faiss_flat_batch16_over_batch1": "the same by FAISS Flat",
    "hnsw_recall10": "share of the ten nearest that HNSW finds",
    "ivf_recall10": "share of the ten nearest that IVF finds",
    "build_passages_per_s": "passages a second, from texts to a committed index",
    "build_overhead": "building beyond the encoder's own time, over that time",
    "identical_across_batches": "queries whose passages and scores are equal to the bit in every batch, layout and rebuild",
}

GOALS: dict[str, tuple[str, Callable[[Result], bool]]] = {
    "recall10_squad_hybrid": (
        "above both others",
        lambda r: r["recall10_squad_hybrid"] > max(r["recall10_squad_dense"], r["recall10_squad_bm25"]),
    ),
    "ndcg_cranfield_bm25": (
        "within 0.01 of bm25s",
        lambda r: abs(r["ndcg_cranfield_bm25"] - r["ndcg_cranfield_bm25s"]) <= 0.01,
    ),
    "exact_p50_ms_100k": ("10 at most", lambda r: r["exact_p50_ms_100k"] <= 10.0),
    "exact_batch16_over_batch1": ("2 at most", lambda r: r["exact_batch16_over_batch1"] <= 2.0),
    "build_overhead": ("0.10 at most", lambda r: r["build_overhead"] <= 0.10),
    "identical_across_batches": ("1", lambda r: r["identical_across_batches"] == 1.0),
}


def goals(result: Result) -> dict[str, bool]:
    """Which goals are reached, of those whose number was measured."""
    return {key: reached(result) for key, (_, reached) in GOALS.items() if result.get(key) is not None}


def retrieval_rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning with its goal) of every number of this suite, and what must be said of the tables."""
    numbers = [(key, f"{result[key]:,.4g}", _meaning(key, result)) for key in MEANINGS if result.get(key) is not None]
    notes = [(key, "", str(result[key])) for key in NOTES if result.get(key)]
    return numbers + notes


def retrieval_tables(result: Result) -> dict[str, Table]:
    """What people see of the nested results, by title: a row for each contender, medians only."""
    tables: dict[str, Table] = {}
    for key, value in result.items():
        if key.startswith("quality_"):
            tables[key] = transposed(value)
        elif key.startswith("speed_"):
            tables[f"{key}: recall, ms of batches of 1 and more (median), size"] = transposed(
                {name: _shown(column) for name, column in value.items()}
            )
        elif key in _PLAIN_TABLES and isinstance(value, dict):
            tables[key] = value
    return tables


def transposed(columns: Table) -> Table:
    """Rows for columns, numbers with three digits."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return {name: {row: _digits(column[name]) for row, column in columns.items() if name in column} for name in names}


def _digits(value: float | None) -> str:
    """Nothing where nothing was measured."""
    return "" if value is None else f"{value:.3g}"


def _shown(column: Table) -> Table:
    medians = {name.removeprefix(_P50): value for name, value in column.items() if name.startswith(_P50)}
    sizes = {name: column[name] for name in _SIZES if name in column}
    return {"recall@10": column["recall@10"]} | medians | sizes


def _meaning(key: str, result: Result) -> str:
    met = result.get("goals", {}).get(key)
    return MEANINGS[key] if met is None else f"{MEANINGS[key]} (goal: {GOALS[key][0]}; {'met' if met else 'MISSED'})"


_P50_PATTERN = re.compile(r"p50 ms, batch (\d+)")
_LINES = {"HNSW": "-", "IVF": "--", EXACT: "-", FLAT: "-"}


def draw_retrieval(result: Result, title: str, folder: Path) -> list[Path]:
    """Write `retrieval_recall.png` and `retrieval_batches.png`, of the most vectors. Raises: ConfigError without matplotlib,
    SaveError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "retrieval_recall.png", folder / "retrieval_batches.png"]
        _recall(result, title, paths[0])
        _batches(result, title, paths[1])
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    except OSError as cause:
        raise SaveError(f"cannot write plots to {folder}: {cause}") from cause
    return paths


def largest(result: Result, kind: str) -> tuple[str, dict[str, Any]]:
    """The last table of `kind` that holds anything, and the number of vectors in its name."""
    found = [(key.removeprefix(kind), value) for key, value in result.items() if key.startswith(kind) and value]
    return found[-1] if found else ("", {})


def batch_times(column: dict[str, float]) -> tuple[list[int], list[float]]:
    """Batch sizes, and the median milliseconds of each."""
    times = {int(match[1]): value for name, value in column.items() if (match := _P50_PATTERN.fullmatch(name))}
    return sorted(times), [times[batch] for batch in sorted(times)]


def _recall(result: Result, title: str, path: Path) -> None:
    rows, curves = largest(result, "curves_")
    figure, axes = new_figure(8.0, 4.4)
    for name, points in curves.items():
        plain = name.startswith("FAISS")
        style = {"color": OTHER if plain else OWN, "linestyle": _LINES[name.removeprefix("FAISS ")], "marker": "o"}
        axes.plot([p["ms"] for p in points], [p["recall@10"] for p in points], label=name, markersize=4, **style)
    exact = result.get(f"speed_{rows}", {}).get(EXACT)
    if exact:
        axes.plot([exact["p50 ms, batch 1"]], [1.0], "D", color=INK, label=EXACT)
    axes.set_xscale("log")
    axes.set_xlabel("one query (ms, median)")
    axes.set_ylabel("share of the ten nearest found")
    axes.set_title(f"{title}; {rows} vectors", loc="left")
    if curves:
        axes.legend(frameon=False)
    save_figure(figure, path)


def _batches(result: Result, title: str, path: Path) -> None:
    rows, columns = largest(result, "speed_")
    figure, axes = new_figure(8.0, 4.4)
    for name, colour in ((EXACT, OWN), (FLAT, OTHER)):
        batches, times = batch_times(columns.get(name, {}))
        axes.plot(batches, times, color=colour, marker="o", markersize=4, label=name)
        axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("queries at once")
    axes.set_ylabel("all of them (ms, median)")
    axes.set_title(f"{title}; {rows} vectors", loc="left")
    axes.legend(frameon=False)
    save_figure(figure, path)
