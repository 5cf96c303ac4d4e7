"""What the numbers of the retrieval suite mean, and which of them must reach what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragspec.evaluation.report import Result

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
