"""The report of a batch job: counts, speed, cost, and the work of every stage.

Owns the last line on stdout and the report on stderr.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragspec.core import GenerationStats
from ragspec.rag.pipeline_stages import StageMetrics

_HOUR_S = 3600.0


@dataclass
class Summary:
    """Counts of one run; `num_skipped` rows were answered by earlier runs. `row_noun` names the rows: questions, texts.

    `generated`: the sum over this run's rows.
    `generating_s` begins when engines and index are loaded, the whole run with the command. `price_per_hour`: of one machine.
    `sentences`: of answers, by label.
    """

    row_noun: str
    num_machines: int = 1
    price_per_hour: float | None = None
    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    generated: GenerationStats = field(default_factory=GenerationStats)
    started_s: float = field(default_factory=time.monotonic)
    generating_s: float = 0.0
    stages: Sequence[StageMetrics] = ()
    fingerprints: set[str] = field(default_factory=set)
    ignored_columns: set[str] = field(default_factory=set)
    sentences: Counter[str] = field(default_factory=Counter)

    def add_answer(self, stats: GenerationStats, labels: Sequence[str] = ()) -> None:
        self.num_answered += 1
        self.sentences.update(labels)
        self.generated.add(stats)
        self.add_fingerprint(stats.system_fingerprint)

    def add_fingerprint(self, fingerprint: str) -> None:
        """An empty fingerprint belongs to a row that needed no target."""
        if fingerprint:
            self.fingerprints.add(fingerprint)

    def to_dict(self, out: Path) -> dict[str, Any]:
        """Plain values, for JSON. Machine seconds and cost are None if this run answered no row."""
        elapsed_s = time.monotonic() - self.started_s
        tokens, generating_s = self.generated.num_output_tokens, self.generating_s or float("inf")
        rows_per_s = self.num_answered / generating_s
        machine_s = cost = None
        if self.num_answered:
            machine_s = 1000.0 * self.num_machines * elapsed_s / self.num_answered
            cost = None if self.price_per_hour is None else round(machine_s / _HOUR_S * self.price_per_hour, 4)
            machine_s = round(machine_s, 2)
        return {
            "out": str(out),
            "rows": self.num_answered + self.num_failed + self.num_skipped,
            "answered": self.num_answered,
            "failed": self.num_failed,
            "skipped": self.num_skipped,
            "tokens": tokens,
            "tokens_per_s": round(tokens / generating_s, 1),
            "rows_per_s": round(rows_per_s, 3),
            f"{self.row_noun}_per_hour": round(rows_per_s * _HOUR_S),
            "acceptance_length": round(self.generated.acceptance_length, 2),
            "replays": self.generated.num_replays,
            "near_ties": self.generated.num_near_ties,
            "sentences": dict(self.sentences),
            "elapsed_s": round(elapsed_s, 2),
            "generating_s": round(self.generating_s, 2),
            "machines": self.num_machines,
            f"machine_s_per_1k_{self.row_noun}": machine_s,
            f"cost_per_1k_{self.row_noun}": cost,
            "stages": [stage.to_dict() for stage in self.stages],
            "system_fingerprints": sorted(self.fingerprints),
            "ignored_columns": sorted(self.ignored_columns),
        }

    def show(self, console: Console, errors: Path) -> None:
        """The stages as a table, with units in its head, and warnings of one line each."""
        if self.num_answered:
            table = Table("stage", "items", "failed", "batches", "busy s", "waiting s", "blocked s", "queue, most")
            for stage in self.stages:
                counts = (str(count) for count in (stage.num_items, stage.num_failed, stage.num_batches))
                times = (f"{seconds:.1f}" for seconds in (stage.busy_s, stage.waiting_s, stage.blocked_s))
                table.add_row(stage.name, *counts, *times, str(stage.max_depth))
            console.print(table)
        warnings = []
        if self.num_failed:
            warnings.append(f"{self.num_failed} rows have no answer; the reasons are in {errors}")
        if self.ignored_columns:
            columns = ", ".join(sorted(self.ignored_columns))
            warnings.append(f"these columns are no sampling parameters and were ignored: {columns}")
        if len(self.fingerprints) > 1:
            warnings.append(
                "the numerics of the answers' machines differ; a repetition elsewhere may differ in near ties"
            )
        for warning in warnings:
            console.print(Text(warning, "yellow"), soft_wrap=True)
