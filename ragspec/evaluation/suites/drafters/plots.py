"""Pictures of the suite `drafters`, drawn from its result: acceptance by depth, and speed-up by requests side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.plots import INK, OTHER, OWN, new_figure, save_figure
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.drafters.prompts import PROSE, RAG
from ragspec.evaluation.suites.drafters.variants import (
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

_FEWEST_STEPS = 20
"""A share of fewer steps is noise and is not drawn."""

_STYLES: dict[str, dict[str, Any]] = {
    COPY: {"color": OTHER, "marker": "s"},
    EAGLE1: {"color": "#c58b2b", "marker": "^"},
    EAGLE2: {"color": "#8a4f7d", "marker": "v"},
    EAGLE3: {"color": OWN, "marker": "o"},
    MERGED: {"color": INK, "marker": "D"},
}


def draw_drafters(result: Result, title: str, folder: Path) -> list[Path]:
    """Write `drafters_pos_acc.png` and `drafters_batch.png`. Raises: ConfigError without matplotlib, SaveError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "drafters_pos_acc.png", folder / "drafters_batch.png"]
        _by_depth(result["rows"], title, paths[0])
        _by_batch(result["rows"], title, paths[1])
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    except OSError as cause:
        raise SaveError(f"cannot write plots to {folder}: {cause}") from cause
    return paths


def depth_lines(rows: list[Result], temperature: float) -> dict[str, list[tuple[int, float]]]:
    """By variant, (depth, share accepted) of fixed trees on prose, whose children know the noise."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        is_fixed = row["shape"] == TREE and row["nodes"] is not None and row["coupled"]
        if not is_fixed or row["task"] != PROSE or row["temperature"] != temperature or not row["pos_acc"]:
            continue
        (shares,), (reached,) = row["pos_acc"].values(), row["pos_reached"].values()
        counted = zip(shares, reached, strict=True)
        points = [(depth, share) for depth, (share, steps) in enumerate(counted, 1) if steps >= _FEWEST_STEPS]
        if points:
            lines[row["variant"]] = points
    return lines


def batch_lines(rows: list[Result], task: str) -> dict[str, list[tuple[int, float]]]:
    """By variant, (requests side by side, speed-up) of one task, prompts included."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["prompts_included"] and row["task"] == task and row["variant"] != NONE:
            lines.setdefault(row["variant"], []).append((row["batch"], row["speedup"]))
    return {name: sorted(points) for name, points in lines.items()}


def _by_depth(rows: list[Result], title: str, path: Path) -> None:
    figure, panels = new_figure(10.0, 4.2, columns=2)
    figure.suptitle(title, x=0.01, ha="left")
    for axes, temperature in zip(panels, (0.0, 1.0), strict=True):
        deepest = _draw_lines(axes, depth_lines(rows, temperature))
        axes.set_title(f"prose, T = {temperature:g}, trees of {TREE_NODES} nodes", loc="left")
        axes.set_ylim(0, 1.03)
        axes.set_xticks(range(1, deepest + 1))
        axes.set_xlabel("depth of the drafted position (tokens)")
        axes.set_ylabel("share accepted, of steps that got there")
    save_figure(figure, path)


def _by_batch(rows: list[Result], title: str, path: Path) -> None:
    figure, panels = new_figure(10.0, 4.2, columns=2)
    figure.suptitle(title, x=0.01, ha="left")
    for axes, task in zip(panels, (RAG, PROSE), strict=True):
        lines = batch_lines(rows, task)
        _draw_lines(axes, lines)
        axes.axhline(1.0, color=INK, linewidth=1.2)
        axes.set_title(f"{task}, T = 0", loc="left")
        axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        axes.set_xticks(sizes, [f"{size}" for size in sizes])
        axes.set_xlabel("requests side by side")
        axes.set_ylabel("speed-up, prompts included (times)")
    save_figure(figure, path)


def _draw_lines(axes: Any, lines: dict[str, list[tuple[int, float]]]) -> int:
    """Returns the greatest place on the horizontal axis, 1 at least."""
    for name in DRAFTING:
        if name in lines:
            axes.plot(*zip(*lines[name], strict=True), label=name, markersize=5, **_STYLES[name])
    if lines:
        axes.legend(frameon=False)
    return max([1, *(place for points in lines.values() for place, _ in points)])
