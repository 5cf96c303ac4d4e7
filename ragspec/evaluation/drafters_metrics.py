"""What the counters of generations say about a drafter: acceptance by depth, tokens a step, time spent drafting.

Pure functions of `GenerationStats`; nothing here runs a model.

    >>> position_acceptance([(10, 8), (8, 4)])
    [0.8, 0.5]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragspec.core import GenerationStats
from ragspec.evaluation.report import Result

Positions = list[tuple[int, int]]
"""By depth from 1 on: (steps that reached it, steps that accepted it)."""

_LOOP_TOKENS = 8


def acceptance_length(stats: Iterable[GenerationStats]) -> float | None:
    """Tokens a decode step, the bonus token included; the step that ends the prompt is not one. None: no such step.

    Source: tau of the EAGLE papers, MAT of Spec-Bench.
    """
    known = list(stats)
    num_steps = sum(max(0, one.num_steps - 1) for one in known)
    num_tokens = sum(one.num_output_tokens - one.num_first_tokens for one in known)
    return num_tokens / num_steps if num_steps else None


def pooled_positions(stats: Iterable[GenerationStats]) -> dict[str, Positions]:
    """By drafter, the counts of all generations together."""
    pooled: dict[str, Positions] = {}
    for one in stats:
        for drafter, counts in one.positions.items():
            known = pooled.setdefault(drafter, [])
            known += [(0, 0)] * (len(counts) - len(known))
            for depth, (reached, accepted) in enumerate(counts):
                known[depth] = known[depth][0] + reached, known[depth][1] + accepted
    return pooled


def position_acceptance(positions: Sequence[tuple[int, int]]) -> list[float | None]:
    """pos_acc: of the steps whose first i - 1 drafted positions were accepted, the share whose position i is.

    On a chain this is EAGLE's n-alpha: the token at depth n + 1 was drafted with n predicted features below it.
    Source: PosS (arXiv 2506.03566) for trees, EAGLE (arXiv 2401.15077) for chains.
    """
    return [accepted / reached if reached else None for reached, accepted in positions]


def repeated_share(outputs: Iterable[Sequence[int]]) -> float:
    """Share of output tokens that end a run of 8 tokens which the same output had before.

    Why: a target that writes in circles is easy to draft for, and a reader of acceptance lengths has to know.
    """
    num_tokens = num_repeated = 0
    for output in outputs:
        seen: set[tuple[int, ...]] = set()
        for end in range(_LOOP_TOKENS, len(output) + 1):
            run = tuple(output[end - _LOOP_TOKENS : end])
            num_repeated += run in seen
            seen.add(run)
        num_tokens += len(output)
    return num_repeated / max(1, num_tokens)


def drafting_row(stats: Sequence[GenerationStats], chain: bool) -> Result:
    """Everything about drafting that some generations of one setting show. `chain`: their drafts had no branches.

    Units: draft_ms per step, in the engine's thread.
    """
    positions = pooled_positions(stats)
    shares = {drafter: position_acceptance(counts) for drafter, counts in positions.items()}
    num_steps = max(1, sum(one.num_steps for one in stats))
    return {
        "acceptance_length": acceptance_length(stats),
        "drafted_a_step": sum(one.num_drafted for one in stats) / num_steps,
        "draft_ms": 1e3 * sum(one.draft_s for one in stats) / num_steps,
        "accepted_by_drafter": _summed(one.accepted_by_drafter for one in stats),
        "pos_acc": shares,
        "pos_reached": {drafter: [reached for reached, _ in counts] for drafter, counts in positions.items()},
        "n_alpha": shares if chain else None,
    }


def _summed(counters: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counter in counters:
        for name, count in counter.items():
            total[name] = total.get(name, 0) + count
    return total
