"""Pictures of the suite `iterative`, drawn from its result: speed-up by what a lookup costs, and by retriever and variant."""

from __future__ import annotations

from pathlib import Path

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.plots import INK, OTHER, OWN, new_figure, save_figure
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.iterative.variants import BASELINE, PSA, TABLE, VARIANTS

PUBLISHED = ((40.0, 2.39, "GPT-2, dense"), (20.0, 1.75, "LLaMA-2-7B, dense"), (0.7, 1.31, "LLaMA-2-7B, BM25"))
"""(b/a about, speed-up of +PSA, what it was measured on); b/a follows from the latencies in the released scripts.

Source: Zhang et al. 2024 (arXiv 2401.14021), table 1.
"""

_TICKS = (0.1, 0.3, 1.0, 3.0, 10.0, 40.0)
_SHADES = ("#dfe3e6", "#c3cbd1", "#9fb4bf", "#6c9aae", OWN)


def draw_iterative(result: Result, title: str, folder: Path) -> list[Path]:
    """Write `iterative_b_over_a.png` and `iterative_variants.png`. Raises: ConfigError without matplotlib, SaveError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "iterative_b_over_a.png", folder / "iterative_variants.png"]
        table = [row for row in result["rows"] if row["workload"] == TABLE]
        _by_cost(table, title, paths[0])
        _by_variant(table, title, paths[1])
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    except OSError as cause:
        raise SaveError(f"cannot write plots to {folder}: {cause}") from cause
    return paths


def _by_cost(table: list[Result], title: str, path: Path) -> None:
    """Dense search alone: rows of one line differ in nothing but the cost of a lookup."""
    own = [row for row in table if row["variant"] == PSA and _is_exact_dense(row)]
    own.sort(key=lambda row: row["b_over_a"])
    costs = [row["b_over_a"] for row in own]
    measured, bound = [row["speedup"] for row in own], [row["optimum_of_answers"] for row in own]
    figure, axes = new_figure(8.0, 4.8)
    axes.plot(
        costs, [row["optimum"] for row in own], color=OTHER, linestyle="--", label="OS3's prediction, endless answers"
    )
    axes.plot(costs, bound, color=INK, linestyle="--", label="OS3's prediction, answers as long as these")
    axes.plot(costs, measured, color=OWN, marker="o", markersize=5, label=f"measured, {PSA}")
    axes.plot(*zip(*((x, y) for x, y, _ in PUBLISHED), strict=True), "D", color=OTHER, label="published (RaLMSpec)")
    for x, y, name in PUBLISHED:
        place = {"xytext": (-8, -3), "ha": "right"} if x > 10.0 else {"xytext": (8, -9), "ha": "left"}
        axes.annotate(name, (x, y), textcoords="offset points", color=INK, fontsize=8, **place)
    axes.axhline(1.0, color=INK, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_ylim(0, 1.3 * max(y for y in (*measured, *bound, 2.39) if y is not None))
    axes.set_xlabel("time of a lookup over time of a step of four tokens (b/a), exact dense search")
    axes.set_ylabel("speed-up (times)")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, loc="upper left")
    save_figure(figure, path)


def _by_variant(table: list[Result], title: str, path: Path) -> None:
    variants = [name for name in VARIANTS if name != BASELINE]
    labels = list(dict.fromkeys(row["retriever"] for row in table))
    speedups = {(row["retriever"], row["variant"]): row["speedup"] for row in table}
    figure, axes = new_figure(11.0, 4.6)
    width = 0.8 / len(variants)
    for number, (variant, shade) in enumerate(zip(variants, _SHADES, strict=True)):
        shown = [place for place, label in enumerate(labels) if (label, variant) in speedups]
        places = [place + (number - (len(variants) - 1) / 2) * width for place in shown]
        values = [speedups[labels[place], variant] for place in shown]
        bars = axes.bar(places, values, width * 0.92, color=shade, label=variant)
        if variant == PSA:
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=2, color=INK, fontsize=8)
    axes.axhline(1.0, color=INK, linewidth=1.2)
    axes.set_xticks(range(len(labels)), [_short(label) for label in labels], fontsize=9)
    axes.set_ylabel("speed-up (times)")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=len(variants))
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(top=1.15 * max([1.0, *speedups.values()]))
    save_figure(figure, path)


def _is_exact_dense(row: Result) -> bool:
    return row["stated_b_over_a"] is not None or row["retriever"] == "exact dense"


def _short(label: str) -> str:
    return label.replace(" (", "\n(", 1).replace(", b/a", ",\nb/a").replace("(exact dense + ", "(dense +\n")
