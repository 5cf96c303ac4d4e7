"""What a batch job did: counts, speed, what it took of the machines, and the work of every stage.

Owns the last line on stdout and what is said on stderr beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ragspec.core import GenerationStats
from ragspec.rag.pipeline_stages import StageMetrics

_HOUR_S = 3600.0


@dataclass
class Summary:
    """Counts of one run; `num_skipped` rows were answered by earlier ones. `rows` names what a row is: questions, texts.

    `generating_s` begins when engines and index are there, the whole run when the command does. `price_per_hour`: of one machine.
    """

    rows: str
    num_machines: int = 1
    price_per_hour: float | None = None
    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_replays: int = 0
    num_near_ties: int = 0
    started_s: float = field(default_factory=time.monotonic)
    generating_s: float = 0.0
    stages: Sequence[StageMetrics] = ()
    fingerprints: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)

    def count(self, stats: GenerationStats) -> None:
        """One more row was answered."""
        self.num_answered += 1
        self.num_tokens += stats.num_output_tokens
        self.num_steps += stats.num_steps
        self.num_replays += stats.num_replays
        self.num_near_ties += stats.num_near_ties
        self.know(stats.system_fingerprint)

    def know(self, fingerprint: str) -> None:
        """Some row has this one; empty: its text was not written by a target."""
        if fingerprint:
            self.fingerprints.add(fingerprint)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generating_s if self.generating_s else 0.0

    @property
    def rows_per_s(self) -> float:
        return self.num_answered / self.generating_s if self.generating_s else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def machine_s_per_1k(self, elapsed_s: float) -> float | None:
        """Machines x seconds of the whole run for 1,000 rows; None if this run answered none."""
        return 1000.0 * self.num_machines * elapsed_s / self.num_answered if self.num_answered else None

    def to_dict(self, out: Path) -> dict[str, Any]:
        """Plain values, for JSON."""
        elapsed_s = time.monotonic() - self.started_s
        machine_s = self.machine_s_per_1k(elapsed_s)
        priced = machine_s is not None and self.price_per_hour is not None
        cost = round(machine_s / _HOUR_S * self.price_per_hour, 4) if priced else None  # type: ignore[operator]
        return {
            "out": str(out),
            "rows": self.num_answered + self.num_failed + self.num_skipped,
            "answered": self.num_answered,
            "failed": self.num_failed,
            "skipped": self.num_skipped,
            "tokens": self.num_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "rows_per_s": round(self.rows_per_s, 3),
            f"{self.rows}_per_hour": round(self.rows_per_s * _HOUR_S),
            "acceptance_length": round(self.acceptance_length, 2),
            "replays": self.num_replays,
            "near_ties": self.num_near_ties,
            "elapsed_s": round(elapsed_s, 2),
            "generating_s": round(self.generating_s, 2),
            "machines": self.num_machines,
            f"machine_s_per_1k_{self.rows}": None if machine_s is None else round(machine_s, 2),
            f"cost_per_1k_{self.rows}": cost,
            "stages": [stage.to_dict() for stage in self.stages],
            "system_fingerprints": sorted(self.fingerprints),
            "ignored_columns": sorted(self.ignored),
        }

    def show(self, console: Console, errors: Path) -> None:
        """The stages as a table, and what the user should know."""
        if self.num_answered:
            console.print(stage_table(self.stages))
        if self.num_failed:
            say(console, f"{self.num_failed} rows have no answer; the reasons are in {errors}", "yellow")
        if self.ignored:
            columns = ", ".join(sorted(self.ignored))
            say(console, f"these columns are no sampling parameters and were ignored: {columns}", "yellow")
        if len(self.fingerprints) > 1:
            differ = "answers come from machines whose numerics differ; a repetition elsewhere may differ in near ties"
            say(console, differ, "yellow")


def stage_table(stages: Sequence[StageMetrics]) -> Table:
    """One row a stage; the units are in its head."""
    table = Table("stage", "items", "failed", "batches", "busy s", "waiting s", "blocked s", "queue, most")
    for stage in stages:
        times = (f"{value:.1f}" for value in (stage.busy_s, stage.waiting_s, stage.blocked_s))
        table.add_row(
            stage.name,
            str(stage.num_items),
            str(stage.num_failed),
            str(stage.num_batches),
            *times,
            str(stage.max_depth),
        )
    return table


def say(console: Console, text: str, style: str) -> None:
    """One line, however long."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
