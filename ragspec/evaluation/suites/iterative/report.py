"""What the numbers of the suite `iterative` mean, which of them must reach what, and its rows as tables for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragspec.evaluation.report import MEANINGS as COMMON
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.iterative.rows import headlines
from ragspec.evaluation.suites.iterative.variants import PSA, TABLE

Table = dict[str, Any]

NOTES = ("note", "hnsw", "elsewhere", "knnlm_note")

MEANINGS = {
    "share_of_optimum_min": "speed-up over what OS3's formula predicts of its best stride, the least of all retrievers, +PSA",
    "share_of_optimum_of_answers_min": "the same, of answers of these lengths, whose first retrieval nothing can guess",
    "speedup_b_over_a_40": "+PSA, an index whose time was set for 40 steps of decoding (the row says how many they were)",
    "speedup_b_over_a_1": "+PSA, an index that takes one step",
    "slowdown_worst": "the least speed-up of any row",
    "knnlm_best": "KNN-LM, the best number of neighbours, a datastore whose time was set for 40 steps; one run of each",
    "kept_after_mismatch": "tokens written under a wrong guess that stood in the end, all rows",
    "identical": "answers with the tokens and the text of the baseline",
    "peak_pss_mb": COMMON["peak_pss_mb"],
}

GOALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "share_of_optimum_min": ("0.9 at least", lambda value: value >= 0.9),
    "speedup_b_over_a_40": ("2.4 at least", lambda value: value >= 2.4),
    "speedup_b_over_a_1": ("1.4 at least", lambda value: value >= 1.4),
    "slowdown_worst": ("0.97 at least", lambda value: value >= 0.97),
    "knnlm_best": ("5 at least", lambda value: value >= 5.0),
    "kept_after_mismatch": ("0.3 at least", lambda value: value >= 0.3),
    "identical": ("1", lambda value: value == 1.0),
}

_KNN_KEYS = ("knnlm_entries", "knnlm_bitwise", "knnlm_service_s")
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
_COSTS = {"a ms": "a_ms", "b ms": "b_ms", "b/a": "b_over_a", "right": "gamma", "stride": "mean_stride"}
_GUESSES = _COSTS | {"kept": "kept_after_mismatch", "waiting": "wait_share"}
_KNN_SPEED = {
    "baseline s": "baseline_s",
    "s": "speculative_s",
    "speed-up": "speedup",
    "predicted": "optimum",
    "share": "share_of_optimum",
}


def with_headlines(result: Result, knnlm: Result) -> Result:
    """The suite's result with what KNN-LM's part gave, if it was measured."""
    knnlm_rows = knnlm.get("knnlm", [])
    parts = {key: value for key, value in knnlm.items() if key in _KNN_KEYS}
    note = None if knnlm_rows else "KNN-LM was not measured: it needs a data folder with wikitext2"
    result = result | parts | headlines(result["rows"], knnlm_rows) | {"knnlm_rows": knnlm_rows, "knnlm_note": note}
    return result | {"goals": goals(result)}


def goals(result: Result) -> dict[str, bool]:
    """Which goals are reached, of those whose number was measured."""
    return {key: reached(result[key]) for key, (_, reached) in GOALS.items() if result.get(key) is not None}


def iterative_rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning with its goal) of every number of this suite, and what must be said of the tables."""
    numbers = [(key, f"{result[key]:,.4g}", _meaning(key, result)) for key in MEANINGS if result.get(key) is not None]
    return numbers + [(key, "", str(result[key])) for key in NOTES if result.get(key)]


def iterative_tables(result: Result) -> dict[str, Table]:
    """By title: speed-ups by retriever and variant, and all there is to say of the product's own variant and of KNN-LM."""
    table = [row for row in result["rows"] if row["workload"] == TABLE]
    speedups: Table = {row["variant"]: {} for row in table}
    for row in table:
        speedups[row["variant"]][row["retriever"]] = f"{row['speedup']:.2f}"
    own = {_name(row): row for row in result["rows"] if row["variant"] == PSA}
    knnlm = {f"{row['store']}, k = {row['k']}, T = {row['temperature']:g}": row for row in result.get("knnlm_rows", ())}
    return {
        f"speed-up against retrieving each time, {TABLE}": speedups,
        f"{PSA}: speed": _columns(own, _SPEED),
        f"{PSA}: guesses and costs": _columns(own, _GUESSES) | _identical(own),
        "KNN-LM: speed": _columns(knnlm, _KNN_SPEED),
        "KNN-LM: guesses and costs": _columns(knnlm, _COSTS) | _identical(knnlm),
    }


def _columns(rows: dict[str, Result], names: dict[str, str]) -> Table:
    return {title: {row: _shown(values[key]) for row, values in rows.items()} for title, key in names.items()}


def _identical(rows: dict[str, Result]) -> Table:
    return {"identical": {row: _equal(values) for row, values in rows.items()}}


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _equal(row: Result) -> str:
    if "num_compared" in row:
        return f"{row['num_identical']}/{row['num_compared']}"
    return "yes" if row["identical"] else "NO"


def _name(row: Result) -> str:
    return row["retriever"] if row["workload"] == TABLE else f"{row['retriever'].partition(' (')[0]}; {row['workload']}"


def _meaning(key: str, result: Result) -> str:
    met = result.get("goals", {}).get(key)
    return MEANINGS[key] if met is None else f"{MEANINGS[key]} (goal: {GOALS[key][0]}; {'met' if met else 'MISSED'})"
