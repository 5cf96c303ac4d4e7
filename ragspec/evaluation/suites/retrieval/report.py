"""The metrics, tables and figure of the suite `retrieval`: the price of recall, and the price of a larger batch."""

from __future__ import annotations

from ragspec.evaluation.report import (
    INK,
    OTHER,
    OWN,
    PEAK_MEMORY,
    Figures,
    Goal,
    Metric,
    Result,
    Table,
    at_most,
    equal_to,
    label_axes,
    nested,
    new_figure,
    transposed,
)
from ragspec.evaluation.suite import Outcome
from ragspec.evaluation.suites.retrieval.collections import DIMENSION
from ragspec.evaluation.suites.retrieval.speed import EXACT

NOTES = ("search_threads", "published", "rerank", "hnsw_skipped")
_BEST = Goal("above both others", lambda v, r: v > max(r["recall10_squad_dense"], r["recall10_squad_bm25"]))
_AS_BM25S = Goal("within 0.01 of bm25s", lambda value, result: abs(value - result["ndcg_cranfield_bm25s"]) <= 0.01)
METRICS = (
    Metric("recall10_squad_dense", "SQuAD questions whose paragraph is among the first ten, dense search"),
    Metric("recall10_squad_bm25", "the same, BM25"),
    Metric("recall10_squad_hybrid", "the same, hybrid search", _BEST),
    Metric("ndcg_cranfield_bm25", "nDCG@10 on Cranfield, BM25", _AS_BM25S),
    Metric("ndcg_cranfield_bm25s", "the same by bm25s"),
    Metric("exact_p50_ms_100k", "ms of one query, exact search over 100,000 vectors, median", at_most(10)),
    Metric("faiss_flat_p50_ms_100k", "the same by FAISS Flat"),
    Metric(
        "exact_batch16_over_batch1", "time of 16 queries over that of one, exact search, 100,000 vectors", at_most(2)
    ),
    Metric("faiss_flat_batch16_over_batch1", "the same by FAISS Flat"),
    Metric("hnsw_recall10", "share of the ten nearest that HNSW finds"),
    Metric("ivf_recall10", "share of the ten nearest that IVF finds"),
    Metric("build_passages_per_s", "passages a second, from texts to a committed index"),
    Metric("build_overhead", "building beyond the encoder's own time, over that time", at_most(0.1)),
    Metric(
        "identical_across_batches", "queries with equal passages and scores in any batch, layout, rebuild", equal_to(1)
    ),
    PEAK_MEMORY,
)

_LINES = {"HNSW": "-", "IVF": "--"}


def retrieval_tables(result: Result) -> dict[str, Table]:
    """Quality and speed, a row for each contender, medians only; then identity and build."""
    tables: dict[str, Table] = {key: transposed(value) for key, value in result.items() if key.startswith("quality_")}
    for key, columns in result.items():
        if key.startswith("speed_"):
            title = f"{key}: recall, ms of batches of 1 and more (median), size"
            tables[title] = transposed({name: _shown(column) for name, column in columns.items()})
    return tables | nested(result, "identity", "build")


def _shown(column: dict[str, float]) -> dict[str, float]:
    """Medians alone, by the size of the batch."""
    return {name.removeprefix("p50 ms, batch "): value for name, value in column.items() if not name.startswith("p95")}


def draw_retrieval(outcome: Outcome, title: str) -> Figures:
    """`retrieval_recall`: recall by the time of a query, of the most vectors."""
    result = outcome.result
    measured = [(key.removeprefix("curves_"), curves) for key, curves in result.items() if key.startswith("curves_")]
    rows, curves = next((each for each in reversed(measured) if each[1]), ("", {}))
    title = f"retrieval: {DIMENSION} dimensions, {result['threads']} threads; {rows} vectors"
    figure, axes = new_figure(8.0, 4.4, title)
    for name, points in curves.items():
        color = OTHER if name.startswith("FAISS") else OWN
        style = _LINES[name.removeprefix("FAISS ")]
        times, recalls = [p["ms"] for p in points], [p["recall@10"] for p in points]
        axes.plot(times, recalls, label=name, color=color, linestyle=style, marker="o", markersize=4)
    exact = result.get(f"speed_{rows}", {}).get(EXACT)
    if exact:
        axes.plot([exact["p50 ms, batch 1"]], [1.0], "D", color=INK, label=EXACT)
    axes.set_xscale("log")
    label_axes(axes, "one query (ms, median)", "share of the ten nearest found")
    if curves:
        axes.legend(frameon=False)
    return {"retrieval_recall": figure}
