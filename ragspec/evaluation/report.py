"""Results of benchmark suites: the keys of the JSON line, metrics as data, one renderer to tables, and plots.

A suite states its numbers as `Metric`s and its nested results as `Table`s. This module knows no suite.

    >>> summary({"lost": 0}, [Metric("lost", "answers without an end", equal_to(0))])
    [('lost', '0', 'answers without an end (goal: 0; met)')]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table as RichTable

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.machine import versions

KEYS = (
    *("suite", "label", "commit", "identical", "tokens_per_s", "speedup_vs_plain", "speedup_vs_generate"),
    *("speedup_vs_prompt_lookup", "plain_vs_generate", "speedup_end_to_end", "acceptance_length", "t1_over_t0"),
    *("bitwise", "peak_pss_mb", "nothing_to_copy", "agrees_with_generate", "seed", "num_prompts", "num_runs"),
    *("target", "dtype", "threads", "quick", "versions"),
)
"""The keys that every result has, in this order; null where a suite does not measure the number."""

Result = dict[str, Any]
Table = dict[str, Any]
"""Columns by name, each with its cells by row; or a single column without a name."""


class Goal(NamedTuple):
    """`reached` gets the metric's value and the whole result."""

    text: str
    reached: Callable[[Any, Result], bool]


class Metric(NamedTuple):
    """One number or flag of a result, by its key."""

    name: str
    meaning: str
    goal: Goal | None = None


def at_most(limit: float) -> Goal:
    return Goal(f"{limit:g} at most", lambda value, _: value <= limit)


def at_least(limit: float) -> Goal:
    return Goal(f"{limit:g} at least", lambda value, _: value >= limit)


def under(limit: float) -> Goal:
    """The absolute value is under the limit."""
    return Goal(f"under {limit:g}", lambda value, _: abs(value) < limit)


def equal_to(expected: float | bool) -> Goal:
    return Goal(cell(expected), lambda value, _: bool(value == expected))


PEAK_MEMORY = Metric("peak_pss_mb", "memory of this process with all peers, 10^6 bytes")


def complete(result: Result) -> Result:
    """Every key in its place, floats rounded. Raises: KeyError for a result without a suite."""
    full: Result = dict.fromkeys(KEYS) | {"versions": versions()} | result
    assert full["suite"]
    return {key: rounded(value) for key, value in full.items()}


def rounded(value: Any) -> Any:
    """Floats with four significant digits, NaN as None. Values under 1 stay under 1: 20,999 of 21,000 are not all."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        short = float(f"{value:.4g}")
        return 0.9999 if value < 1.0 <= short else short
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value


def goals_met(result: Result, metrics: Iterable[Metric]) -> dict[str, bool]:
    """Whether each goal is reached, for the metrics that were measured."""
    return {
        name: goal.reached(result[name], result)
        for name, _, goal in metrics
        if goal is not None and result.get(name) is not None
    }


def summary(result: Result, metrics: Iterable[Metric], notes: Iterable[str] = ()) -> list[tuple[str, str, str]]:
    """(name, value, meaning with goal) of every measured metric, then the texts under the keys `notes`."""
    metrics = list(metrics)
    met = goals_met(result, metrics)
    rows = []
    for name, meaning, goal in metrics:
        if result.get(name) is not None:
            judged = f" (goal: {goal.text}; {'met' if met[name] else 'MISSED'})" if goal else ""
            rows.append((name, cell(result[name]), meaning + judged))
    for key in notes:
        texts = result.get(key) or ()
        rows += [(key, "", text) for text in ([texts] if isinstance(texts, str) else texts)]
    return rows


def render(
    result: Result, metrics: Iterable[Metric], notes: Iterable[str], tables: Mapping[str, Table]
) -> Iterator[RichTable]:
    """The summary of a complete result, then its tables."""
    parts = [result[key] for key in ("label", "target", "dtype") if result[key]]
    title = f"{result['suite']}: {', '.join(parts)}, {result['threads']} threads"
    first = RichTable("", "", "", title=title, show_header=False, title_justify="left")
    for row in summary(result, metrics, notes):
        first.add_row(*row)
    yield first
    for name, table in tables.items():
        columns = {key: value for key, value in table.items() if isinstance(value, dict)} or {"": table}
        shown = RichTable("", *columns, title=name, title_justify="left")
        for row in dict.fromkeys(row for column in columns.values() for row in column):
            shown.add_row(row, *(cell(column.get(row)) for column in columns.values()))
        yield shown


def cell(value: Any) -> str:
    """A value as people read it: floats with four digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def select(rows: Mapping[str, Result], keys: Mapping[str, str] | Iterable[str]) -> dict[str, dict[str, Any]]:
    """A table of some keys of named rows; `keys` maps the titles of columns to keys, or names both."""
    named = keys if isinstance(keys, Mapping) else {key: key for key in keys}
    return {title: {row: values.get(key) for row, values in rows.items()} for title, key in named.items()}


def transposed(columns: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows become columns."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return {name: {row: column[name] for row, column in columns.items() if name in column} for name in names}


def share(rows: Mapping[str, Result]) -> dict[str, str]:
    """How many answers are identical, of all that were compared, by row."""
    return {name: f"{row['num_identical']}/{row['num_compared']}" for name, row in rows.items()}


def nested(result: Result, *keys: str) -> dict[str, Table]:
    """The results under these keys, as tables, where they were measured."""
    return {key: result[key] for key in keys if result.get(key)}


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
