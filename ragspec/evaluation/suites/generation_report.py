"""The metrics, tables and figures of suites that generate text: speed beside the peers, and speed by acceptance length."""

from __future__ import annotations

from ragspec.evaluation.report import (
    INK,
    OTHER,
    OWN,
    PEAK_MEMORY,
    Figures,
    Metric,
    Result,
    Table,
    label_axes,
    mark_level,
    nested,
    new_figure,
)
from ragspec.evaluation.suite import Outcome
from ragspec.evaluation.suites.generation import MeasuredGeneration
from ragspec.evaluation.timing import GENERATE, PLAIN, PROMPT_LOOKUP, SPECULATIVE

_END_TO_END = "with retrieval, prompt building and prefill, against"
METRICS = (
    Metric("identical", "every output token equal: speculation on and off, T=0, T=1, top-p, alone and in batches of 8"),
    Metric("tokens_per_s", "tokens a second of decoding, T=0, one request"),
    Metric("plain_tokens_per_s", "the same without speculation"),
    Metric("speedup_vs_plain", "decode time, own plain decoding over speculative, T=0, one request"),
    Metric("speedup_vs_plain_first_to_last", "the same, tokens that come with the first one counted as free"),
    Metric("speedup_vs_generate", "decode time, transformers generate over ours, same tokens"),
    Metric("speedup_vs_prompt_lookup", "decode time, transformers prompt lookup (10 tokens) over ours, same tokens"),
    Metric("plain_vs_generate", "decode time, transformers generate over our plain decoding, same tokens"),
    Metric("prompt_lookup_vs_generate", "decode time, transformers generate over transformers prompt lookup"),
    Metric("speedup_end_to_end", f"{_END_TO_END} own plain decoding"),
    Metric("speedup_end_to_end_vs_generate", f"{_END_TO_END} transformers generate"),
    Metric("speedup_end_to_end_vs_prompt_lookup", f"{_END_TO_END} prompt lookup"),
    Metric("acceptance_length", "tokens emitted a step at T=0"),
    Metric("agrees_with_generate", "share of prompts with the tokens of transformers generate (information only)"),
    Metric("batch8_tokens_per_s", "tokens a second of eight requests side by side, prompts included"),
    Metric("batch8_plain_tokens_per_s", "the same without speculation"),
    Metric("batch8_speedup_vs_plain", "ratio of the two"),
    Metric("speedup_vs_plain_t1", "decode time, plain over speculative, T=1"),
    Metric("acceptance_length_t1", "tokens emitted a step at T=1"),
    Metric("t1_over_t0", "speed-up at T=1 over speed-up at T=0"),
    Metric(
        "t1_bound", "its bound: expected tokens a step at T=1 by the target's path probabilities, over those at T=0"
    ),
    Metric("nothing_to_copy", "decode time, plain over speculative, random prompts without sources, T=1"),
    Metric("sources_in_vain", "the same with sources that have nothing to do with the prompt"),
    Metric("bitwise", "the numerics self-test passed"),
    PEAK_MEMORY,
)


def generation_tables(result: Result) -> dict[str, Table]:
    return nested(result, "parts", "quality", "roofline", "identical_counts", "t1_bounds")


def draw_generation(outcome: Outcome, title: str) -> Figures:
    """`NAME_speed` and `NAME_acceptance`, NAME being the suite and the type of weights."""
    result, measured = outcome.result, outcome.measured
    if measured is None:
        return {}
    title = f"{result['suite']}: {result['num_prompts']} prompts, {result['dtype']}, {result['threads']} threads"
    title += " (forced answers)" if "forced" in result["label"] else ""
    name = f"{result['suite']}_{result['dtype']}"
    return {f"{name}_speed": _draw_speed(measured, title), f"{name}_acceptance": _draw_acceptance(measured, title)}


def _draw_speed(measured: MeasuredGeneration, title: str) -> object:
    greedy, result = measured.greedy, measured.result
    bars = {
        "transformers generate": greedy.ratio(PLAIN, GENERATE),
        "transformers prompt lookup": greedy.ratio(PLAIN, PROMPT_LOOKUP),
        "ragspec, T=0": greedy.ratio(PLAIN, SPECULATIVE),
        "ragspec, T=1": result.get("speedup_vs_plain_t1"),
        "ragspec, 8 side by side*": result.get("batch8_speedup_vs_plain"),
        "ragspec, end to end*": result.get("speedup_end_to_end"),
        "ragspec, nothing to copy": result.get("nothing_to_copy"),
    }
    shown = {label: value for label, value in reversed(bars.items()) if value is not None}
    figure, axes = new_figure(8.0, 1.3 + 0.42 * len(shown), title)
    colors = [OWN if label.startswith("ragspec") else OTHER for label in shown]
    drawn = axes.barh([*shown], [*shown.values()], color=colors, height=0.62)
    # Why white below: the label of a short bar stands on the line at 1.
    below = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.bar_label(drawn, [f"{value:.2f}" for value in shown.values()], padding=5, color=INK, bbox=below)
    mark_level(axes, 1.0, "plain decoding", vertical=True)
    axes.set_title(title, loc="left", pad=20)
    axes.set_xlim(0, max(1.2, 1.12 * max(shown.values())))
    axes.set_xlabel("speed relative to ragspec's own plain decoding (times); *: prompts included")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure


def _draw_acceptance(measured: MeasuredGeneration, title: str) -> object:
    greedy = measured.greedy
    single = [greedy.of([i]) for i in range(len(greedy.runs[PLAIN][0]))]
    points = [(one.acceptance_length(SPECULATIVE), one.ratio(PLAIN, SPECULATIVE)) for one in single]
    figure, (left, right) = new_figure(10.0, 4.2, title, columns=2)
    left.hist([length for length, _ in points], bins=24, color=OWN, edgecolor="white")
    mean = greedy.acceptance_length(SPECULATIVE)
    mark_level(left, mean, f"over all steps: {mean:.1f}", vertical=True)
    left.yaxis.get_major_locator().set_params(integer=True)
    shown = [point for point in points if point[1] is not None]
    right.scatter(*zip(*shown, strict=True) if shown else ([], []), s=18, color=OWN, alpha=0.6, linewidths=0)
    mark_level(right, 1.0, "plain decoding")
    right.set_ylim(bottom=0)
    for axes, label in ((left, "prompts"), (right, "speed-up of decoding at T=0 (times)")):
        axes.set_xlim(left=0)
        label_axes(axes, "acceptance length of a prompt (tokens a step)", label)
    return figure
