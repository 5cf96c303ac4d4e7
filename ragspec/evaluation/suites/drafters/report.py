"""Headlines, tables and figures of the suite `drafters`; the rows are those of `ragspec.evaluation.suites.drafters.runs`.

A row's `part`: none for a head alone, else copy (copies and plain decoding), merged, batch or shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from ragspec.evaluation.report import (
    PEAK_MEMORY,
    Figures,
    Metric,
    Result,
    Table,
    at_least,
    equal_to,
    new_figure,
    transposed,
)
from ragspec.evaluation.suite import Outcome
from ragspec.evaluation.suites.drafters.prompts import MT_BENCH, PROSE
from ragspec.evaluation.suites.drafters.variants import CHAIN, MERGED, NONE, TREE, TREE_NODES

NOTES = ("missing",)
ORDERS = {
    ("hydra", "medusa"): 1,
    ("hydra++", "hydra"): 1,
    ("eagle2", "eagle"): 1,
    ("eagle3", "eagle2"): 1,
    ("hass", "eagle2"): 1,
    ("poss", "hass"): 4,
}
"""The papers' orders, better first, and the depth from which on they hold."""


def headlines(rows: Sequence[Result], same_beginnings: Mapping[str, Result]) -> Result:
    """The numbers that stand first; None where nothing measured them."""
    orders, over, best = orders_of(rows), merged_over_best(rows), fastest(rows)
    ratios = {name: row["coupled_t1_over_t0"] for name, row in same_beginnings.items()}
    lengths = [row["acceptance_length"] for row in rows_of(rows, PROSE, 0.0, TREE_NODES) if row["acceptance_length"]]
    return {
        "identical": all(row["identical"] is not False for row in rows),
        "orders": orders,
        "order_held": mean(ratio > 1.0 for ratio in orders.values()) if orders else None,
        "best_head": best.get("variant"),
        "best_speedup_prose": best.get("speedup"),
        "best_acceptance_prose": max(lengths, default=None),
        "merged_over_best": over,
        "merged_over_best_min": min(over.values(), default=None),
        "t1_over_t0": ratios,
        "t1_over_t0_min": min(ratios.values(), default=None),
    }


def rows_of(rows: Iterable[Result], task: str, temperature: float, nodes: int | None) -> list[Result]:
    """Rows of heads alone that draft trees, their children chosen with the target's noise."""
    wanted = {"task": task, "temperature": temperature, "nodes": nodes, "shape": TREE, "coupled": True, "part": None}
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def fastest(rows: Sequence[Result]) -> Result:
    """The row of the head that is fastest on prose; empty without heads."""
    return max(rows_of(rows, PROSE, 0.0, None), key=lambda row: row["speedup"] or 0.0, default={})


def orders_of(rows: Sequence[Result]) -> dict[str, float]:
    """By the papers' orders: acceptance of the better head over that of the other, prose and MT-bench, T = 0, 16 nodes.

    Tokens a step; from a depth on, the mean pos_acc there. Of several heads of one family the first counts.
    """
    fixed = [row for task in (PROSE, MT_BENCH) for row in rows_of(rows, task, 0.0, TREE_NODES)]
    names = {name for order in ORDERS for name in order}
    of_family: dict[str, str] = {}
    for row in fixed:
        family = next((name for name in sorted(names, key=len, reverse=True) if row["variant"].startswith(name)), "")
        of_family.setdefault(family, row["variant"])
    found = {}
    for (better, worse), depth in ORDERS.items():
        if better in of_family and worse in of_family:
            ours, theirs = (_acceptance(fixed, of_family[name], depth) for name in (better, worse))
            if ours and theirs:
                found[f"{better} over {worse}" + (f" from depth {depth}" if depth > 1 else "")] = ours / theirs
    return found


def _acceptance(rows: Sequence[Result], name: str, depth: int) -> float | None:
    own = [row for row in rows if row["variant"] == name]
    if depth == 1:
        return mean(row["acceptance_length"] or 1.0 for row in own)
    shares = [
        share for row in own for each in row["pos_acc"].values() for share in each[depth - 1 :] if share is not None
    ]
    return mean(shares) if shares else None


def merged_over_best(rows: Sequence[Result]) -> dict[str, float]:
    """By task and temperature: the merged tree's speed over that of its better part alone."""
    speeds: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("part") == "merged":
            speeds.setdefault(_place(row), {})[row["variant"]] = row["speedup"]
    return {where: own.pop(MERGED) / max(own.values()) for where, own in speeds.items()}


def _place(row: Result) -> str:
    return f"{row['task']}, T = {row['temperature']:g}"


METRICS = (
    Metric("identical", "every output token equal to plain decoding's", equal_to(True)),
    Metric("order_held", "share of the papers' orders of acceptance that hold here", equal_to(1.0)),
    Metric(
        "best_speedup_prose", "decode time, plain over drafted, prose, T=0, one request, fastest head", at_least(2.0)
    ),
    Metric("best_acceptance_prose", f"tokens a decode step, {TREE_NODES} nodes, prose, T=0, best head", at_least(3.5)),
    Metric("merged_over_best_min", "copies and head in one tree over the better alone, the least", at_least(0.97)),
    Metric("t1_over_t0_min", "tokens of a step, T=1 over T=0, same beginnings, the least head", at_least(0.9)),
    PEAK_MEMORY,
)


def tables(result: Result) -> Mapping[str, Table]:
    """A column a drafter."""
    found = dict[str, Table]()

    def cell(title: str, row: Result, where: str, value: Any) -> None:
        found.setdefault(title, {}).setdefault(row["variant"], {})[where] = value

    for row in result["rows"]:
        where, part = _place(row), row.get("part")
        if part == "batch":
            size = f"{row['task']}, {row['batch']}"
            cell("side by side, T = 0: speed-up, prompts included", row, size, row["speedup"])
        elif part == "shape":
            size = f"depth {row['max_depth']}" if "max_depth" in row else f"width {row['width']}"
            cell("tokens a step by shape, prose, T = 0", row, size, row["acceptance_length"])
        elif part == "merged":
            cell("copies and the fastest head: speed-up", row, where, row["speedup"])
        elif row["nodes"] is None:
            cell("speed-up of decoding", row, where, row["speedup"])
            cell("tokens a decode step", row, where, row["acceptance_length"])
            cell("drafting, ms a step", row, where, row["draft_ms"])
            if row["variant"] == NONE:
                cell("output repeats itself, share", row, where, row["repeated_share"])
        elif row["task"] == PROSE and row["temperature"] == 0.0:
            title = "n-alpha of chains, prose, T = 0" if row["shape"] == CHAIN else "pos_acc, 16 nodes, prose, T = 0"
            for shares in row["pos_acc"].values():
                for depth, share in enumerate(shares, 1):
                    cell(title, row, f"depth {depth}", share)
    found["the papers' orders, ratio of acceptance"] = result["orders"]
    found["one step from the same beginnings"] = result["same_beginnings"]
    found["by acceptance rule, 16 nodes, prose, T = 1"] = transposed(result["acceptance_rules"])
    return {title: table for title, table in found.items() if table}


def draw(outcome: Outcome, title: str) -> Figures:
    """Acceptance by position, and speed by the number of requests."""
    shown = tables(outcome.result)
    figures: Figures = {}
    for name, prefix, label in (
        ("drafters_pos_acc", "pos_acc", "accepted, of steps that accepted all before (prose, T = 0)"),
        ("drafters_batch", "side by side", "plain over drafted, prompts included, T = 0"),
    ):
        table = next((table for key, table in shown.items() if key.startswith(prefix)), {})
        figure, axes = new_figure(7, 4, title)
        for head, cells in table.items():
            lines: dict[str, dict[str, Any]] = {}  # "rag, 4" is a point of the line of rag
            for where, value in cells.items():
                task, _, size = where.rpartition(", ")
                lines.setdefault(f"{head}, {task}" if task else head, {})[size] = value
            for line, points in lines.items():
                axes.plot(list(points), list(points.values()), marker="o", label=line)
        axes.set_ylabel(label, fontsize=8)
        axes.legend(fontsize=7)
        figures[name] = figure
    return figures
