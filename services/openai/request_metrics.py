"""What one answer took, in the shape of vLLM's per-request metrics, with who drafted and what was copied.

For callers who may know it: how many tokens were accepted tells what they were drafted from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ragspec.core import Delta, GenerationStats


def request_metrics(stats: GenerationStats, steps: Iterable[Delta]) -> dict[str, Any]:
    """Of an output of one choice. `steps`: what was heard of it, step by step."""
    num_decoded = stats.num_output_tokens - stats.num_first_tokens
    return {
        "time_to_first_token_ms": 1e3 * (stats.queue_s + stats.prefill_s),
        "generation_time_ms": 1e3 * stats.decode_s,
        "queue_time_ms": 1e3 * stats.queue_s,
        "mean_itl_ms": 1e3 * stats.decode_s / num_decoded if num_decoded > 0 else None,
        "tokens_per_second": num_decoded / stats.decode_s if num_decoded > 0 and stats.decode_s else None,
        "speculative_decoding": {
            "mean_acceptance_length": stats.acceptance_length,
            "draft_acceptance_rate": stats.num_accepted / stats.num_drafted if stats.num_drafted else None,
            "acceptance_histogram": _histogram([len(step.token_ids) for step in steps if step.token_ids]),
            "num_spec_steps": stats.num_steps,
            "num_accepted_draft_tokens": stats.num_accepted,
            "num_draft_tokens": stats.num_drafted,
            "drafted_by_source": dict(stats.drafted_by_source),
            "accepted_by_source": dict(stats.accepted_by_source),
        },
        "drafters": dict(stats.accepted_by_drafter),
        "exactness": stats.exactness,
        "num_near_ties": stats.num_near_ties,
        "num_replays": stats.num_replays,
    }


def progress(steps: Sequence[Delta]) -> dict[str, int]:
    """So far: tokens written, and steps that it took."""
    return {"num_output_tokens": sum(len(step.token_ids) for step in steps), "num_steps": len(steps)}


def _histogram(lengths: Sequence[int]) -> list[int]:
    """Item k: in how many steps k drafted tokens were accepted, beside the one that each step gives."""
    counts = [0] * max(lengths, default=0)
    for length in lengths:
        counts[length - 1] += 1
    return counts
