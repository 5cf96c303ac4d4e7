"""Figures of measured suites: two colours, no frames, units on every axis. matplotlib is imported when a figure is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, SaveError

OWN, OTHER, INK = "#1f6f8b", "#b8bfc6", "#33383d"
Figures = dict[str, Any]
"""matplotlib figures by the name of their file, without its suffix."""


def write_figures(draw: Callable[[], Figures], folder: Path) -> list[Path]:
    """Draw and save as PNG. Raises: ConfigError without matplotlib, SaveError."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in draw().items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=150)
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    except OSError as cause:
        raise SaveError(f"cannot write plots to {folder}: {cause}") from cause
    return paths


def new_figure(width: float, height: float, title: str, columns: int = 1) -> tuple[Any, Any]:
    """A figure that needs no display, and its axes. Units: inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.spines[["top", "right"]].set_visible(False)
    if columns == 1:
        axes.set_title(title, loc="left")
    else:
        figure.suptitle(title, x=0.01, ha="left")
    return figure, axes


def mark_level(axes: Any, value: float, text: str = "", vertical: bool = False) -> None:
    """A thin line across the axes at a value, with a label at its end."""
    (axes.axvline if vertical else axes.axhline)(value, color=INK, linewidth=1.2)
    place: dict[str, Any] = {"xy": (1.0, value), "xytext": (0, 3), "xycoords": ("axes fraction", "data"), "ha": "right"}
    if vertical:
        place = {"xy": (value, 1.0), "xytext": (4, 3), "xycoords": ("data", "axes fraction")}
    axes.annotate(text, textcoords="offset points", color=INK, **place)


def label_axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
