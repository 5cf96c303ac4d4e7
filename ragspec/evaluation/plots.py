"""Pictures of a measured suite: how fast, and how speed follows from acceptance. Two colours, no frames, units on every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.suites.generation import Measured
from ragspec.evaluation.timing import GENERATE, PLAIN, PROMPT_LOOKUP, SPECULATIVE, Timings

OWN, OTHER, INK = "#1f6f8b", "#b8bfc6", "#33383d"


def draw(measured: Measured, title: str, folder: Path, name: str) -> list[Path]:
    """Write `NAME_speed.png` and `NAME_acceptance.png`. Raises: ConfigError without matplotlib, SaveError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}_speed.png", folder / f"{name}_acceptance.png"]
        _speed(measured, title, paths[0])
        _acceptance(measured.greedy, title, paths[1])
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    except OSError as cause:
        raise SaveError(f"cannot write plots to {folder}: {cause}") from cause
    return paths


def speed_bars(measured: Measured) -> list[tuple[str, float, bool]]:
    """(label, speed relative to own plain decoding, whether it is ours); only what was measured."""
    greedy, result = measured.greedy, measured.result
    bars = [
        ("transformers generate", greedy.ratio(PLAIN, GENERATE), False),
        ("transformers prompt lookup", greedy.ratio(PLAIN, PROMPT_LOOKUP), False),
        ("ragspec, T=0", greedy.ratio(PLAIN, SPECULATIVE), True),
        ("ragspec, T=1", result.get("speedup_vs_plain_t1"), True),
        ("ragspec, 8 side by side*", result.get("batch8_speedup_vs_plain"), True),
        ("ragspec, end to end*", result.get("speedup_end_to_end"), True),
        ("ragspec, nothing to copy", result.get("nothing_to_copy"), True),
    ]
    return [(label, value, own) for label, value, own in bars if value is not None]


def _speed(measured: Measured, title: str, path: Path) -> None:
    bars = speed_bars(measured)[::-1]
    figure, axes = new_figure(8.0, 1.3 + 0.42 * len(bars))
    labels, values, own = zip(*bars, strict=True)
    axes.barh(labels, values, color=[OWN if ours else OTHER for ours in own], height=0.62)
    for place, value in enumerate(values):
        # Why white below: the label of a short bar stands on the line at 1.
        below = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.annotate(
            f"{value:.2f}", (value, place), (5, 0), textcoords="offset points", va="center", color=INK, bbox=below
        )
    axes.axvline(1.0, color=INK, linewidth=1.2)
    axes.annotate(
        "plain decoding", (1.0, 1.0), (4, 3), xycoords=("data", "axes fraction"), textcoords="offset points", color=INK
    )
    axes.set_xlim(0, max(1.2, 1.12 * max(values)))
    axes.set_xlabel("speed relative to ragspec's own plain decoding (times); *: prompts included")
    axes.set_title(title, loc="left", pad=20)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    save_figure(figure, path)


def _acceptance(greedy: Timings, title: str, path: Path) -> None:
    points = [(one.acceptance_length(SPECULATIVE), one.ratio(PLAIN, SPECULATIVE)) for one in _single_cases(greedy)]
    figure, (left, right) = new_figure(10.0, 4.2, columns=2)
    figure.suptitle(title, x=0.01, ha="left")
    mean = greedy.acceptance_length(SPECULATIVE)
    left.hist([length for length, _ in points], bins=24, color=OWN, edgecolor="white")
    left.axvline(mean, color=INK, linewidth=1.2)
    left.annotate(
        f"over all steps: {mean:.1f}",
        (mean, 1.0),
        (4, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=INK,
    )
    left.yaxis.get_major_locator().set_params(integer=True)
    left.set_ylabel("prompts")
    shown = [(length, ratio) for length, ratio in points if ratio is not None]
    right.scatter(*zip(*shown, strict=True) if shown else ([], []), s=18, color=OWN, alpha=0.6, linewidths=0)
    right.axhline(1.0, color=INK, linewidth=1.2)
    right.annotate(
        "plain decoding",
        (1.0, 1.0),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color=INK,
    )
    right.set_ylim(bottom=0)
    right.set_ylabel("speed-up of decoding at T=0 (times)")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.set_xlabel("acceptance length of a prompt (tokens a step)")
    save_figure(figure, path)


def _single_cases(timings: Timings) -> list[Timings]:
    return [timings.of([i]) for i in range(len(timings.runs[PLAIN][0]))]


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure that needs no display. Units: inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
