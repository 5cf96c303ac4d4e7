"""What the numbers of the suites `chat` and `load` mean, what they must reach, and their rows as tables for people."""

from __future__ import annotations

from typing import Any

from ragspec.evaluation.report import Goals, Result, rows_of

Table = dict[str, Any]

CHAT_MEANINGS = {
    "gateway_ttft_ms_c1": "time to first token over HTTP minus the bare engine's, one request at a time, medians",
    "gateway_ttft_ms_c16": "the same, 16 requests at once",
    "serve_noop_ms": "what Ray Serve adds by itself: a deployment that only answers, median of one request at a time",
    "serve_ttft_ms": "time to first token of the Serve deployment minus the bare engine's, one request at a time",
    "identical": "every text equal over HTTP with speculation and without, T=0 and T=1",
    "num_compared": "pairs of texts compared",
    "follow_up_recall": "follow-up questions (CANARD, held-out half) whose gold passage is among the first 3, with rewriting",
    "follow_up_recall_plain": "the same without rewriting",
    "follow_up_recall_people": "the same with the questions that people wrote",
    "tenant_drafted": "tokens drafted from another tenant's texts",
    "tenant_cache_hits": "tokens cached from another tenant's texts",
    "tenant_drafts_delta": "tokens drafted for another tenant's texts against texts that nobody has, from -1 to 1",
    "tenant_cliffs_delta": "first-token times of another tenant's texts against texts that nobody has, from -1 to 1",
}

LOAD_MEANINGS = {
    "requests": "sent by mixed clients",
    "given_up": "of them, those whose client went away half-way",
    "errors_5xx": "answers that blame the service",
    "num_faults": "connections dropped, streams without an end, statuses other than the right one",
    "hangs": "requests not answered within 30 s",
    "kv_leaked": "slots of the KV cache still held when nothing ran any more and every tenant was purged",
    "left_running": "requests counted as running when none was",
    "p50_ms": "from sending a request to the end of its answer, median",
    "p99_ms": "the same, 99 of 100",
}

GOALS: Goals = {
    "gateway_ttft_ms_c1": ("5 at most", lambda value: value <= 5.0),
    "gateway_ttft_ms_c16": ("20 at most", lambda value: value <= 20.0),
    "identical": ("yes", lambda value: value is True),
    "tenant_cliffs_delta": ("under 0.1 either way", lambda value: abs(value) < 0.1),
    "tenant_drafts_delta": ("under 0.1 either way", lambda value: abs(value) < 0.1),
    **{
        name: ("0", lambda value: value == 0)
        for name in (
            "errors_5xx",
            "num_faults",
            "hangs",
            "kv_leaked",
            "left_running",
            "tenant_drafted",
            "tenant_cache_hits",
        )
    },
}


def chat_rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of what stands first."""
    return rows_of(result, CHAT_MEANINGS, GOALS)


def load_rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of what stands first."""
    return rows_of(result, LOAD_MEANINGS, GOALS)


def chat_tables(result: Result) -> dict[str, Table]:
    """By title: columns of rows."""
    first = {
        f"{row['concurrency']} at once": {key: value for key, value in row.items() if key.endswith("_ms")}
        for row in result["ttft_rows"]
    }
    found = {"milliseconds to the first token, medians": first, "follow-ups found": result["follow_up_rows"]}
    return {title: table for title, table in found.items() if table}


def load_tables(result: Result) -> dict[str, Table]:
    """By title: columns of rows."""
    tables = {"answers by status": result["statuses"], "faults": result["faults"]}
    return {title: table for title, table in tables.items() if table}
