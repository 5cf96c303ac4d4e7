"""Headlines, tables and figures of the suite `heads`; the rows are those of `ragspec.evaluation.suites.drafters.runs`.

A row's `part`: none for a head alone, else merged, batch or shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from ragspec.evaluation.report import Figures, Metric, Result, Table, at_least, equal_to, new_figure
from ragspec.evaluation.suite import Outcome
from ragspec.evaluation.suites.drafters.prompts import PROSE
from ragspec.evaluation.suites.drafters.variants import CHAIN, COPY, TREE, TREE_NODES

MERGED = "copy + head"
CHAT = "MT-bench"
ORDERS = {
    ("hydra", "medusa"): 1,
    ("hydra++", "hydra"): 1,
    ("eagle2", "eagle"): 1,
    ("eagle3", "eagle2"): 1,
    ("hass", "eagle2"): 1,
    ("poss", "hass"): 4,
}
"""The papers' orders, better first, and the depth from which on they hold."""


def rows_of(
    rows: Iterable[Result], task: str, temperature: float, nodes: int | None, shape: str = TREE
) -> list[Result]:
    """Rows of heads alone."""
    wanted = {"task": task, "temperature": temperature, "nodes": nodes, "shape": shape, "part": None}
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def fastest(rows: Sequence[Result]) -> Result:
    """The row of the head that is fastest on prose."""
    return max(rows_of(rows, PROSE, 0.0, None), key=lambda row: row["speedup"])


def orders_of(rows: Sequence[Result]) -> dict[str, float]:
    """By the papers' orders: acceptance of the better head over that of the other, prose and MT-bench, T = 0, 16 nodes.

    Tokens a step; from a depth on, the mean pos_acc there. Of several heads of one family the first counts.
    """
    fixed = [row for task in (PROSE, CHAT) for row in rows_of(rows, task, 0.0, TREE_NODES)]
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


def merged_over_best(rows: Sequence[Result], name: str) -> dict[str, float]:
    """By task and temperature: the merged tree's speed over that of its better part alone."""
    found = {}
    for task, temperature in dict.fromkeys((row["task"], row["temperature"]) for row in rows):
        speeds = {r["variant"]: r["speedup"] for r in rows if (r["task"], r["temperature"]) == (task, temperature)}
        found[f"{task}, T = {temperature:g}"] = speeds[MERGED] / max(speeds[COPY], speeds[name])
    return found


METRICS = (
    Metric("identical", "every output token equal to plain decoding's", equal_to(True)),
    Metric("order_held", "share of the papers' orders of acceptance that hold here", equal_to(1.0)),
    Metric(
        "best_speedup_prose", "decode time, plain over drafted, prose, T=0, one request, fastest head", at_least(2.0)
    ),
    Metric("best_acceptance_prose", f"tokens a decode step, {TREE_NODES} nodes, prose, T=0, best head", at_least(3.5)),
    Metric("merged_over_best_min", "copies and head in one tree over the better alone, the least", at_least(0.97)),
    Metric("t1_over_t0_min", "tokens of a step, T=1 over T=0, same beginnings, the least head", at_least(0.9)),
)


def tables(result: Result) -> Mapping[str, Table]:
    """A column a head."""
    rows, found = result["rows"], dict[str, Table]()

    def cell(title: str, row: Result, where: str, value: Any) -> None:
        found.setdefault(title, {}).setdefault(row["variant"], {})[where] = value

    for row in rows:
        where, part = f"{row['task']}, T = {row['temperature']:g}", row.get("part")
        if part == "batch":
            cell("side by side, prose, T = 0: speed-up, prompts included", row, str(row["batch"]), row["speedup"])
        elif part == "shape":
            size = f"depth {row['max_depth']}" if "max_depth" in row else f"width {row['width']}"
            cell("tokens a step by shape, prose, T = 0", row, size, row["acceptance_length"])
        elif part == "merged":
            cell("copies and the fastest head: speed-up", row, where, row["speedup"])
        elif row["nodes"] is None:
            cell("speed-up of decoding", row, where, row["speedup"])
            cell("tokens a decode step", row, where, row["acceptance_length"])
        elif row["task"] == PROSE and row["temperature"] == 0.0:
            title = "n-alpha of chains, prose, T = 0" if row["shape"] == CHAIN else "pos_acc, 16 nodes, prose, T = 0"
            for shares in row["pos_acc"].values():
                for depth, share in enumerate(shares, 1):
                    cell(title, row, f"depth {depth}", share)
    found["the papers' orders, ratio of acceptance"] = result["orders"]
    found["tokens of a step, T = 1 over T = 0"] = result["t1_over_t0"]
    found["rules that change the text, T = 1"] = result["lossy_rules"]
    return {title: table for title, table in found.items() if table}


def draw(outcome: Outcome, title: str) -> Figures:
    """Acceptance by position, and speed by the number of requests."""
    shown = tables(outcome.result)
    figures: Figures = {}
    for name, prefix in (("heads_pos_acc", "pos_acc"), ("heads_batch", "side by side")):
        table = next((table for key, table in shown.items() if key.startswith(prefix)), {})
        figure, axes = new_figure(7, 4, title)
        for head, cells in table.items():
            axes.plot(list(cells), list(cells.values()), marker="o", label=head)
        axes.legend(fontsize=7)
        figures[name] = figure
    return figures
