"""The one JSON object of a benchmark: the same keys for every suite, null where a suite does not measure something."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ragspec.evaluation.machine import versions

KEYS = (
    "suite",
    "label",
    "commit",
    "identical",
    "tokens_per_s",
    "speedup_vs_plain",
    "speedup_vs_generate",
    "speedup_vs_prompt_lookup",
    "plain_vs_generate",
    "speedup_end_to_end",
    "acceptance_length",
    "t1_over_t0",
    "bitwise",
    "peak_pss_mb",
    "nothing_to_copy",
    "agrees_with_generate",
    "seed",
    "num_prompts",
    "num_runs",
    "target",
    "dtype",
    "threads",
    "quick",
    "versions",
)

Result = dict[str, Any]


def complete(result: Result) -> Result:
    """Every key in its place, rounded for reading. Raises: KeyError for a suite without a name."""
    full: Result = dict.fromkeys(KEYS) | {"versions": versions()} | result
    assert full["suite"]
    return {key: rounded(value) for key, value in full.items()}


def rounded(value: Any) -> Any:
    """Floats with four significant digits, at any depth, NaN as None. Under 1 stays under it: 20,999 of 21,000 are not all."""
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


MEANINGS = {
    "identical": "every output token equal: speculation on and off, T=0, T=1, top-p, alone and in batches of 8",
    "tokens_per_s": "tokens a second of decoding, T=0, one request",
    "plain_tokens_per_s": "the same without speculation",
    "speedup_vs_plain": "decode time, own plain decoding over speculative, T=0, one request",
    "speedup_vs_plain_first_to_last": "the same, tokens that come with the first one counted as free",
    "speedup_vs_generate": "decode time, transformers generate over ours, same tokens",
    "speedup_vs_prompt_lookup": "decode time, transformers prompt lookup (10 tokens) over ours, same tokens",
    "plain_vs_generate": "decode time, transformers generate over our plain decoding, same tokens",
    "prompt_lookup_vs_generate": "decode time, transformers generate over transformers prompt lookup",
    "speedup_end_to_end": "with retrieval, prompt building and prefill, against own plain decoding",
    "speedup_end_to_end_vs_generate": "with retrieval, prompt building and prefill, against transformers generate",
    "speedup_end_to_end_vs_prompt_lookup": "with retrieval, prompt building and prefill, against prompt lookup",
    "acceptance_length": "tokens emitted a step at T=0",
    "agrees_with_generate": "share of prompts whose tokens transformers generate gives, too (information only)",
    "batch8_tokens_per_s": "tokens a second of eight requests side by side, prompts included",
    "batch8_plain_tokens_per_s": "the same without speculation",
    "batch8_speedup_vs_plain": "ratio of the two",
    "speedup_vs_plain_t1": "decode time, plain over speculative, T=1",
    "acceptance_length_t1": "tokens emitted a step at T=1",
    "t1_over_t0": "speed-up at T=1 over speed-up at T=0",
    "t1_bound": "its bound: expected tokens a step at T=1 by the target's own path probabilities, over those at T=0",
    "passes_saved": "forwards of plain decoding over those of speculative decoding, T=0, one request",
    "gleu": "GLEU of JFLEG dev, corrected with all guards, 0 to 100",
    "gleu_source": "the same of the untouched sentences",
    "clean_edit_rate": "words changed of 1 in sentences that are correct",
    "identical_corrections": "corrections and edits the same with speculation and without",
    "nothing_to_copy": "decode time, plain over speculative, random prompts without sources, T=1",
    "sources_in_vain": "the same with sources that have nothing to do with the prompt",
    "bitwise": "the numerics self-test passed",
    "peak_pss_mb": "memory of this process with all peers, 10^6 bytes",
}


def rows(result: Result) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of everything that is one number or yes and no, for a table."""
    return [(key, _shown(result[key]), meaning) for key, meaning in MEANINGS.items() if result.get(key) is not None]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


Goals = Mapping[str, tuple[str, Callable[[Any], bool]]]
"""By the number's name: the goal in words, and whether a value reaches it."""


def met(result: Mapping[str, Any], goals: Goals) -> dict[str, bool]:
    """Of every goal that the result has a number for: whether it is reached."""
    return {name: bool(reached(result[name])) for name, (_, reached) in goals.items() if result.get(name) is not None}


def rows_of(result: Result, meanings: Mapping[str, str], goals: Goals) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of what stands first, and the result's notes."""
    reached = met(result, goals)

    def meaning(name: str, text: str) -> str:
        return (
            text if name not in reached else f"{text} (goal: {goals[name][0]}; {'met' if reached[name] else 'MISSED'})"
        )

    known = [(name, shown(result[name]), meaning(name, text)) for name, text in meanings.items() if name in result]
    return known + [("note", "", text) for text in result.get("notes", ())]


def shown(value: Any) -> str:
    """A number for people, with three digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
