"""The metrics, tables and figure of the suite `iterative`: speed-up by the cost of a lookup, by retriever and by variant."""

from __future__ import annotations

from typing import Any

from ragspec.evaluation.report import (
    INK,
    OTHER,
    OWN,
    PEAK_MEMORY,
    Figures,
    Metric,
    Result,
    Table,
    at_least,
    equal_to,
    goals_met,
    label_axes,
    mark_level,
    new_figure,
    select,
    share,
)  # fmt: skip
from ragspec.evaluation.suite import Outcome
from ragspec.evaluation.suites.iterative.rows import headlines
from ragspec.evaluation.suites.iterative.variants import PSA, TABLE

NOTES = ("note", "hnsw", "elsewhere", "knnlm_note")
METRICS = (
    Metric(
        "share_of_optimum_min", "speed-up of +PSA over OS3's prediction, the least of all retrievers", at_least(0.9)
    ),
    Metric("share_of_optimum_of_answers_min", "the same, predicted for answers of these lengths"),
    Metric("speedup_b_over_a_40", "+PSA, an index set to take 40 steps (its row says how many it took)", at_least(2.4)),
    Metric("speedup_b_over_a_1", "+PSA, an index that takes one step", at_least(1.4)),
    Metric("slowdown_worst", "the least speed-up of any row", at_least(0.97)),
    Metric("knnlm_best", "KNN-LM, a datastore set to take 40 steps, best number of neighbours, one run", at_least(5)),
    Metric("kept_after_mismatch", "tokens kept of those written under a wrong guess, all rows", at_least(0.3)),
    Metric("identical", "answers with the tokens and the text of the baseline", equal_to(1)),
    PEAK_MEMORY,
)

PUBLISHED = ((40.0, 2.39, "GPT-2, dense"), (20.0, 1.75, "LLaMA-2-7B, dense"), (0.7, 1.31, "LLaMA-2-7B, BM25"))
"""(b/a about, speed-up of +PSA, model and retriever); b/a follows from the latencies in the released scripts.

Source: Zhang et al. 2024 (arXiv 2401.14021), table 1.
"""

_SPEED = {
    "baseline s": "baseline_s",
    "s": "seconds",
    "speed-up": "speedup",
    "of a question": "median_speedup",
    "predicted": "optimum",
    "share": "share_of_optimum",
    "in answers so long": "optimum_of_answers",
    "share of that": "share_of_optimum_of_answers",
}
_KNN_SPEED = {
    **{title: _SPEED[title] for title in ("baseline s", "speed-up", "predicted", "share")},
    "s": "speculative_s",
}
_COSTS = {"a ms": "a_ms", "b ms": "b_ms", "b/a": "b_over_a", "right": "gamma", "stride": "mean_stride"}
_GUESSES = _COSTS | {"kept": "kept_after_mismatch", "waiting": "wait_share"}
_KNN_KEYS = ("knnlm_entries", "knnlm_bitwise", "knnlm_service_s")
_TICKS = (0.1, 0.3, 1.0, 3.0, 10.0, 40.0)


def with_headlines(result: Result, knnlm: Result) -> Result:
    """The suite's result with KNN-LM's part, if KNN-LM was measured."""
    knnlm_rows = knnlm.get("knnlm", [])
    note = None if knnlm_rows else "KNN-LM was not measured: it needs a data folder with wikitext2"
    result = result | {key: value for key, value in knnlm.items() if key in _KNN_KEYS}
    result |= headlines(result["rows"], knnlm_rows) | {"knnlm_rows": knnlm_rows, "knnlm_note": note}
    return result | {"goals": goals_met(result, METRICS)}


def iterative_tables(result: Result) -> dict[str, Table]:
    """Speed-ups by retriever and variant, then details of the product's own variant and of KNN-LM."""
    speedups: dict[str, dict[str, float]] = {}
    for row in _of_table(result):
        speedups.setdefault(row["variant"], {})[row["retriever"]] = row["speedup"]
    own = {_name(row): row for row in result["rows"] if row["variant"] == PSA}
    knnlm = {f"{row['store']}, k = {row['k']}, T = {row['temperature']:g}": row for row in result.get("knnlm_rows", ())}
    return {
        f"speed-up against retrieving each time, {TABLE}": speedups,
        f"{PSA}: speed": select(own, _SPEED),
        f"{PSA}: guesses and costs": select(own, _GUESSES) | {"identical": share(own)},
        "KNN-LM: speed": select(knnlm, _KNN_SPEED),
        "KNN-LM: guesses and costs": select(knnlm, _COSTS | {"identical": "identical"}),
    }


def _of_table(result: Result) -> list[Result]:
    return [row for row in result["rows"] if row["workload"] == TABLE]


def _name(row: Result) -> str:
    return row["retriever"] if row["workload"] == TABLE else f"{row['retriever'].partition(' (')[0]}; {row['workload']}"


def draw_iterative(outcome: Outcome, title: str) -> Figures:
    """`iterative_b_over_a`: exact dense search alone, whose rows differ in the cost of a lookup only."""
    rows = [row for row in _of_table(outcome.result) if row["variant"] == PSA]
    rows = [row for row in rows if row["stated_b_over_a"] is not None or row["retriever"] == "exact dense"]
    rows.sort(key=lambda row: row["b_over_a"])
    lines: dict[str, tuple[str, dict[str, Any]]] = {
        "OS3's prediction, endless answers": ("optimum", {"color": OTHER, "linestyle": "--"}),
        "OS3's prediction, answers as long as these": ("optimum_of_answers", {"color": INK, "linestyle": "--"}),
        f"measured, {PSA}": ("speedup", {"color": OWN, "marker": "o", "markersize": 5}),
    }
    figure, axes = new_figure(8.0, 4.8, title)
    for label, (key, style) in lines.items():
        axes.plot([row["b_over_a"] for row in rows], [row[key] for row in rows], label=label, **style)
    axes.plot(
        [x for x, _, _ in PUBLISHED], [y for _, y, _ in PUBLISHED], "D", color=OTHER, label="published (RaLMSpec)"
    )
    for x, y, name in PUBLISHED:
        offset, side = ((-8, -3), "right") if x > 10.0 else ((8, -9), "left")
        axes.annotate(name, (x, y), offset, textcoords="offset points", ha=side, color=INK, fontsize=8)
    mark_level(axes, 1.0)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    highest = [row[key] for row in rows for key in ("speedup", "optimum_of_answers") if row[key] is not None]
    axes.set_ylim(0, 1.3 * max(2.39, *highest))
    label_axes(
        axes, "time of a lookup over time of a step of four tokens (b/a), exact dense search", "speed-up (times)"
    )
    axes.legend(frameon=False, loc="upper left")
    return {"iterative_b_over_a": figure}
