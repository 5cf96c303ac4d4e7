"""What the numbers of the suites `cluster` and `chaos` mean, what they must reach, and their rows as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ragspec.evaluation.report import Goals, Result, rows_of, shown

Table = dict[str, Any]

CLUSTER_MEANINGS = {
    "tp_identical": "answers with the tokens of one rank: 2 and 4 ranks, speculation on and off, T=0 and T=1",
    "tp_bitwise": "every logit of prompts, chunks, trees and batches has the bits of one rank's",
    "step_overhead_b1": "share of a step that is not its forward, 100M parameters, one request; the worst way of decoding",
    "step_overhead_b8": "the same, eight requests side by side",
    "replica_scaling_simulated": "two replicas over one, forwards replaced by sleeps of their measured time",
    "sharded_identical": "queries whose passages and scores have the bits of one process's: 1, 2, 4 shards, once and twice",
}

CHAOS_MEANINGS = {
    "faults": "signals that hit while streams and a batch job ran",
    "lost": "streams and rows without an end, or with tokens missing",
    "duplicated": "streams and rows told twice, in whole or in part",
    "changed": "streams and rows with another token, text, probability or citation",
    "recovery_p50_s": "seconds from a fault until everything it had hit went on, median",
    "recovery_max_s": "the same, the slowest",
    "live_again_p50_s": "seconds from a fault until the table showed every member live, median",
    "live_again_max_s": "the same, the slowest",
    "driver_kills": "kill -9 of a batch job's driver, which was then started again",
    "driver_duplicated": "rows that its output holds twice",
    "driver_lost": "rows that its output lacks",
    "driver_changed": "rows with another answer",
}

GOALS: Goals = {
    "tp_identical": ("1", lambda value: value == 1.0),
    "tp_bitwise": ("yes", lambda value: value is True),
    "step_overhead_b1": ("under 0.10", lambda value: value < 0.10),
    "step_overhead_b8": ("under 0.15", lambda value: value < 0.15),
    "replica_scaling_simulated": ("1.9", lambda value: value >= 1.9),
    "sharded_identical": ("1", lambda value: value == 1.0),
    **{
        name: ("0", lambda value: value == 0)
        for name in ("lost", "duplicated", "changed", "driver_lost", "driver_duplicated", "driver_changed")
    },
    "recovery_p50_s": ("5 at most", lambda value: value <= 5.0),
    "recovery_max_s": ("15 at most", lambda value: value <= 15.0),
}


def recovery(rows: Sequence[Mapping[str, Any]], name: str) -> Result:
    """Median and slowest of one kind of recovery, in seconds; None without faults."""
    seconds = [row[name] for row in rows]
    prefix = name.removesuffix("_s")
    return {f"{prefix}_p50_s": median(seconds) if seconds else None, f"{prefix}_max_s": max(seconds, default=None)}


def cluster_rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of what stands first."""
    return rows_of(result, CLUSTER_MEANINGS, GOALS)


def chaos_rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of what stands first."""
    return rows_of(result, CHAOS_MEANINGS, GOALS)


def cluster_tables(result: Result) -> dict[str, Table]:
    """By title: columns of rows."""
    tp = {f"{r['target']} {r['dtype']}, {r['ranks']} ranks": r for r in result["tp_rows"]}
    steps = {f"{r['way']}, T={r['temperature']:g}, {r['batch']} side by side": r for r in result["step_rows"]}
    shards = {f"{r['shards']} shards x {r['copies']}, {r['mode']}": r for r in result["shard_rows"]}
    tables = {
        "ranks": {"bits equal": {name: "yes" if r["bitwise"] else "NO" for name, r in tp.items()}}
        | {"answers equal": _shares(tp)}
        | {f"{rows} rows, ms": {n: f"{r['step_ms'][rows]:.3g}" for n, r in tp.items()} for rows in _step_rows(tp)},
        "step outside the forward": _columns(
            steps, ("overhead", "mean_overhead", "step_ms", "outside_ms", "num_steps")
        ),
        "sharded retrieval": {"answers equal": _shares(shards)},
    }
    return {title: table for title, table in tables.items() if any(table.values())}


def chaos_tables(result: Result) -> dict[str, Table]:
    """One row a fault."""
    faults = {f"{n}. {r['signal']} {r['kind']}": r for n, r in enumerate(result["fault_rows"], 1)}
    names = ("victim", "moment_s", "recovery_s", "streams_s", "retrieval_s", "live_again_s", "num_streams_hit")
    return {"faults": _columns(faults, names)} if faults else {}


def _columns(rows: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Table:
    return {name: {row: shown(values.get(name)) for row, values in rows.items()} for name in names}


def _shares(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {name: f"{row['num_identical']}/{row['num_compared']}" for name, row in rows.items()}


def _step_rows(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(count for row in rows.values() for count in row["step_ms"]))
