"""Pictures of the retrieval suite: what recall costs, and what a larger batch costs. Drawn from the result alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.plots import INK, OTHER, OWN, new_figure, save_figure
from ragspec.evaluation.report import Result
from ragspec.evaluation.retrieval_contenders import EXACT, FLAT

_P50 = re.compile(r"p50 ms, batch (\d+)")
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
    times = {int(match[1]): value for name, value in column.items() if (match := _P50.fullmatch(name))}
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
