"""A picture of the grammar suite: how much faster corrections are the less there is to correct."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ragspec.errors import ConfigError, SaveError
from ragspec.evaluation.grammar_part import rates_of
from ragspec.evaluation.plots import INK, OWN, new_figure, save_figure
from ragspec.evaluation.report import Result


def draw_grammar(result: Result, title: str, folder: Path) -> list[Path]:
    """Write `grammar_edit_rates.png`. Raises: ConfigError without matplotlib, SaveError."""
    path = folder / "grammar_edit_rates.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure, axes = new_figure(7.0, 4.2)
        rates, speedups = zip(*rates_of(result), strict=True)
        axes.plot([100 * rate for rate in rates], speedups, color=OWN, marker="o", markersize=5)
        for rate, speedup in zip(rates, speedups, strict=True):
            axes.annotate(
                f"{speedup:.1f}", (100 * rate, speedup), (0, 7), textcoords="offset points", ha="center", color=INK
            )
        axes.axhline(1.0, color=INK, linewidth=1.2)
        axes.annotate("plain decoding", (0.0, 1.0), (4, 3), textcoords="offset points", color=INK)
        axes.set_ylim(0, 1.25 * max(*speedups, 1.0))
        axes.set_xlabel("words changed by the correction (%), sentences of 20 to 40 words, forced answers")
        axes.set_ylabel("speed-up of decoding (times)")
        axes.set_title(textwrap.fill(title, 68), loc="left")
        save_figure(figure, path)
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    except OSError as cause:
        raise SaveError(f"cannot write plots to {folder}: {cause}") from cause
    return [path]
