"""The metrics and tables of the suite `drafters`: acceptance by depth, and speed-up by requests side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ragspec.evaluation.report import PEAK_MEMORY, Metric, Result, Table, transposed
from ragspec.evaluation.suites.drafters.prompts import CHAT, PROSE, RAG
from ragspec.evaluation.suites.drafters.variants import (
    CHAIN,
    COPY,
    DRAFTING,
    EAGLE1,
    EAGLE2,
    EAGLE3,
    MERGED,
    NONE,
    TREE,
    TREE_NODES,
)  # fmt: skip

_HEADS = (EAGLE1, EAGLE2, EAGLE3)
_COUPLED, _UNCOUPLED = "coupled_t1_over_t0", "uncoupled_t1_over_t0"
NOTES = ("missing", "left_out")
METRICS = (
    Metric(
        "eagle_prose_acceptance_length", f"tokens a decode step, trees of {TREE_NODES} nodes, prose, T=0, best head"
    ),
    Metric("eagle_prose_speedup", "decode time, plain over drafted, prose, T=0, one request, best head and tree"),
    Metric(_COUPLED, f"tokens of a step of {TREE_NODES} nodes, T=1 over T=0, same beginnings, children coupled"),
    Metric(_UNCOUPLED, "the same, children chosen without the noise"),
    Metric("merged_over_best", f"speed of {MERGED} over the better part alone, the least of rag and chat, T=0 and T=1"),
    Metric("identical", "every output token equal to plain decoding's"),
    PEAK_MEMORY,
)


def headlines(rows: Sequence[Result], same_beginnings: Mapping[str, Result]) -> Result:
    """The numbers that stand first; None where nothing measured them."""
    longest = _best(_trees(rows, PROSE, 0.0, nodes=TREE_NODES), "acceptance_length")
    fastest = _best([row for row in _trees(rows, PROSE, 0.0) if row["variant"] in _HEADS], "speedup")
    merged = merged_over_best(rows)
    beginnings: Mapping[str, Any] = same_beginnings.get(EAGLE3) or same_beginnings.get(EAGLE2) or {}
    return {
        "eagle_prose_acceptance_length": longest.get("acceptance_length"),
        "eagle_prose_acceptance_length_of": longest.get("variant"),
        "eagle_prose_speedup": fastest.get("speedup"),
        "eagle_prose_speedup_of": fastest.get("variant"),
        _COUPLED: beginnings.get(_COUPLED),
        _UNCOUPLED: beginnings.get(_UNCOUPLED),
        "free_running": free_running(rows),
        "merged_over_best": min(merged.values(), default=None),
        "merged_over_best_by_task": merged,
        "identical": all(row["identical"] is not False for row in rows),
    }


def _best(rows: Iterable[Result], key: str) -> Result:
    """The row with the greatest number; empty if no row has the number."""
    return max((row for row in rows if row[key] is not None), key=lambda row: row[key], default={})


def merged_over_best(rows: Sequence[Result]) -> dict[str, float]:
    """By task and temperature: the merged draft's speed over that of its better part alone."""
    found = {}
    for task in (RAG, CHAT):
        for temperature in (0.0, 1.0):
            speedups = {row["variant"]: row["speedup"] for row in _trees(rows, task, temperature)}
            alone = [speedups[name] for name in (COPY, EAGLE3) if speedups.get(name)]
            if speedups.get(MERGED) and alone:
                found[f"{task}, T = {temperature:g}"] = speedups[MERGED] / max(alone)
    return found


def free_running(rows: Sequence[Result]) -> dict[str, Result]:
    """By variant: acceptance lengths of fixed trees at T=1 over those at T=0, each on the texts of its own temperature."""
    at_zero = {row["variant"]: row["acceptance_length"] for row in _trees(rows, PROSE, 0.0, nodes=TREE_NODES)}
    found: dict[str, Result] = {}
    for row in _trees(rows, PROSE, 1.0, nodes=TREE_NODES):
        name = row["variant"]
        if at_zero.get(name) and row["acceptance_length"]:
            key = _COUPLED if row["coupled"] else _UNCOUPLED
            found.setdefault(name, {})[key] = row["acceptance_length"] / at_zero[name]
    return found


def drafters_tables(result: Result) -> dict[str, Table]:
    """One column a variant; only measured rows."""
    rows: list[Result] = sorted(result["rows"], key=lambda row: (NONE, *DRAFTING).index(row["variant"]))
    alone = [row for row in rows if row["shape"] != CHAIN and row["nodes"] is None and not row["prompts_included"]]
    drafted = [row for row in alone if row["variant"] != NONE]
    plain = [row for row in alone if row["variant"] == NONE]
    batched = [row for row in rows if row["prompts_included"]]
    chains = [row for row in rows if row["shape"] == CHAIN]
    fixed = [row for row in rows if row["nodes"] is not None and row["shape"] == TREE]
    tables: dict[str, Table] = {
        "tokens a decode step": _by_variant(alone, "acceptance_length"),
        "speed-up of decoding": _by_variant(alone, "speedup"),
        "drafting, ms a step": _by_variant(drafted, "draft_ms"),
        "output repeats itself, share": _by_variant(plain, "repeated_share"),
        "side by side, T = 0, prompts included: speed-up": _by_variant(
            batched, "speedup", lambda row: f"{row['task']}, {row['batch']}"
        ),
        f"pos_acc, {PROSE}, T = 0, trees that pay": _by_depth(drafted, 0.0),
        f"pos_acc, {PROSE}, T = 0, {TREE_NODES} nodes": _by_depth(fixed, 0.0),
        f"pos_acc, {PROSE}, T = 1, {TREE_NODES} nodes": _by_depth([row for row in fixed if row["coupled"]], 1.0),
        f"n-alpha of chains, {PROSE}, T = 0": _by_depth(chains, 0.0),
        "tokens a decode step, chains": _by_variant(chains, "acceptance_length"),
        f"tokens a decode step, {TREE_NODES} nodes": _by_variant(
            fixed, "acceptance_length", lambda row: _setting(row) + ("" if row["coupled"] else ", uncoupled")
        ),
        "one step from the same beginnings": result["same_beginnings"],
        "tokens a step by acceptance rule": transposed(result["acceptance_rules"] or {}),
    }
    return {title: table for title, table in tables.items() if any(table.values())}


def _trees(rows: Iterable[Result], task: str, temperature: float, nodes: int | None = None) -> list[Result]:
    """Rows of trees, one request at a time, of one task and temperature."""
    wanted = {"shape": TREE, "task": task, "temperature": temperature, "nodes": nodes, "prompts_included": False}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _setting(row: Result) -> str:
    return f"{row['task']}, T = {row['temperature']:g}"


def _by_variant(rows: Iterable[Result], key: str, cell: Callable[[Result], str] = _setting) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for row in rows:
        table.setdefault(row["variant"], {})[cell(row)] = row[key]
    return table


def _by_depth(rows: Iterable[Result], temperature: float) -> dict[str, Any]:
    """Prose alone. A merged draft has a column for each of its drafters."""
    table: dict[str, Any] = {}
    for row in (row for row in rows if row["task"] == PROSE and row["temperature"] == temperature):
        for drafter, shares in row["pos_acc"].items():
            name = row["variant"] if len(row["pos_acc"]) == 1 else f"{row['variant']}: {drafter}"
            table[name] = {f"depth {depth}": share for depth, share in enumerate(shares, 1)}
    return table
