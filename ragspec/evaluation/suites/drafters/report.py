"""What the numbers of the suite `drafters` mean, which of them stand first, and its rows as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ragspec.evaluation.report import MEANINGS as COMMON
from ragspec.evaluation.report import Result
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
)

Table = dict[str, Any]

_HEADS = (EAGLE1, EAGLE2, EAGLE3)
_COUPLED, _UNCOUPLED = "coupled_t1_over_t0", "uncoupled_t1_over_t0"

MEANINGS = {
    "eagle_prose_acceptance_length": f"tokens a decode step, trees of {TREE_NODES} nodes, prose, T=0, the best head",
    "eagle_prose_speedup": "decode time, plain over drafted, prose, T=0, one request, the best head and tree",
    _COUPLED: f"tokens of one step of {TREE_NODES} nodes, T=1 over T=0, from the same beginnings, children chosen with the noise",
    _UNCOUPLED: "the same, children chosen without the noise",
    "merged_over_best": f"speed of {MERGED} over the better of {COPY} and {EAGLE3}, the least of questions and chat, T=0 and T=1",
    "identical": "every output token equal to plain decoding's",
    "peak_pss_mb": COMMON["peak_pss_mb"],
}


def headlines(rows: Sequence[Result], same_beginnings: Mapping[str, Result]) -> Result:
    """The numbers that stand first; None where nothing measured them."""
    fixed = [row for row in _trees(rows, PROSE, 0.0, nodes=TREE_NODES) if row["acceptance_length"] is not None]
    grown = [row for row in _trees(rows, PROSE, 0.0) if row["variant"] in _HEADS and row["speedup"] is not None]
    longest = max(fixed, key=lambda row: row["acceptance_length"], default=None)
    fastest = max(grown, key=lambda row: row["speedup"], default=None)
    merged = merged_over_best(rows)
    beginnings: Mapping[str, Any] = same_beginnings.get(EAGLE3) or same_beginnings.get(EAGLE2) or {}
    return {
        "eagle_prose_acceptance_length": longest["acceptance_length"] if longest else None,
        "eagle_prose_acceptance_length_of": longest["variant"] if longest else None,
        "eagle_prose_speedup": fastest["speedup"] if fastest else None,
        "eagle_prose_speedup_of": fastest["variant"] if fastest else None,
        _COUPLED: beginnings.get(_COUPLED),
        _UNCOUPLED: beginnings.get(_UNCOUPLED),
        "free_running": free_running(rows),
        "merged_over_best": min(merged.values(), default=None),
        "merged_over_best_by_task": merged,
        "identical": all(row["identical"] is not False for row in rows),
    }


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


def drafters_rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of every number that stands first, and what must be said of the tables."""
    shown = [(key, _shown(result[key]), text) for key, text in MEANINGS.items() if result.get(key) is not None]
    missing = [("not measured", "", f"{name}: its head was not found") for name in result["missing"]]
    return shown + missing + [("left out", "", text) for text in result["left_out"]]


def drafters_tables(result: Result) -> dict[str, Table]:
    """By title, one column a variant; only what was measured."""
    rows: list[Result] = result["rows"]
    alone = [row for row in rows if row["shape"] != CHAIN and row["nodes"] is None and not row["prompts_included"]]
    batched = [row for row in rows if row["prompts_included"]]
    chains = [row for row in rows if row["shape"] == CHAIN]
    fixed = [row for row in rows if row["nodes"] is not None and row["shape"] == TREE]
    tables = {
        "tokens a decode step": _by_variant(alone, "acceptance_length", _cell),
        "speed-up of decoding": _by_variant(alone, "speedup", _cell),
        "drafting, ms a step": _by_variant(_drafted(alone), "draft_ms", _cell),
        "output repeats itself, share": _by_variant(
            [r for r in alone if r["variant"] == NONE], "repeated_share", _cell
        ),
        "side by side, T = 0, prompts included: speed-up": _by_variant(batched, "speedup", _batch_cell),
        f"pos_acc, {PROSE}, T = 0, trees that pay": _by_depth([row for row in _drafted(alone) if _is_prose(row, 0.0)]),
        f"pos_acc, {PROSE}, T = 0, {TREE_NODES} nodes": _by_depth([row for row in fixed if _is_prose(row, 0.0)]),
        f"n-alpha of chains, {PROSE}, T = 0": _by_depth([row for row in chains if _is_prose(row, 0.0)]),
        "tokens a decode step, chains": _by_variant(chains, "acceptance_length", _cell),
        f"tokens a decode step, {TREE_NODES} nodes": _by_variant(fixed, "acceptance_length", _fixed_cell),
        "one step from the same beginnings": {
            name: {key: _shown(value) for key, value in values.items()}
            for name, values in result["same_beginnings"].items()
        },
        "tokens a step by acceptance rule": _by_rule(result["acceptance_rules"] or {}),
    }
    return {title: table for title, table in tables.items() if any(table.values())}


def _trees(rows: Iterable[Result], task: str, temperature: float, nodes: int | None = None) -> list[Result]:
    """Rows of trees, one request at a time, of one task and temperature."""
    wanted = {"shape": TREE, "task": task, "temperature": temperature, "nodes": nodes, "prompts_included": False}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _drafted(rows: Iterable[Result]) -> list[Result]:
    return [row for row in rows if row["variant"] != NONE]


def _is_prose(row: Result, temperature: float) -> bool:
    return bool(row["task"] == PROSE and row["temperature"] == temperature)


def _by_variant(rows: Sequence[Result], key: str, cell: Any) -> Table:
    table: Table = {}
    for row in sorted(rows, key=lambda row: _place(row["variant"])):
        table.setdefault(row["variant"], {})[cell(row)] = _shown(row[key])
    return table


def _by_depth(rows: Sequence[Result]) -> Table:
    """A merged draft has a column for each of its drafters."""
    table: Table = {}
    for row in sorted(rows, key=lambda row: _place(row["variant"])):
        for drafter, shares in row["pos_acc"].items():
            name = row["variant"] if len(row["pos_acc"]) == 1 else f"{row['variant']}: {drafter}"
            table[name] = {f"depth {depth}": _shown(share) for depth, share in enumerate(shares, 1)}
    return table


def _by_rule(rules: Mapping[str, Result]) -> Table:
    return {shape: {rule: _shown(own[shape]) for rule, own in rules.items()} for shape in (CHAIN, TREE) if rules}


def _place(variant: str) -> int:
    return (NONE, *DRAFTING).index(variant)


def _cell(row: Result) -> str:
    return f"{row['task']}, T = {row['temperature']:g}"


def _batch_cell(row: Result) -> str:
    return f"{row['task']}, {row['batch']}"


def _fixed_cell(row: Result) -> str:
    return _cell(row) + ("" if row["coupled"] else ", uncoupled")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
