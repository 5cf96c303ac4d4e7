"""The most that T=1 can keep of the speed-up at T=0, from the target's own probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.config import DraftingConfig, EngineConfig
from ragspec.engine.target import Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.path_probs import expected_acceptance_lengths
from ragspec.evaluation.report import Result


def t1_bound(
    target: Target,
    config: EngineConfig,
    drafting: DraftingConfig,
    cases: Sequence[Case],
    acceptance_length: float,
    seed: int,
) -> Result:
    """Expected tokens a step at T=1 over the measured `acceptance_length` at T=0, for two sets of trees.

    `own_trees`: those drafted along the texts sampled at T=1: what these very trees give any drafter and any verification that
    does not know the noise. It cannot tell a drafter that proposes poor trees at T=1, hence `greedy_trees`: those drafted
    along the greedy texts, walked by samples at T=1, as if sampling never led to places where there is less to copy.
    `t1_bound` is the greater of the two, the harder one to reach.
    """
    greedy, own = expected_acceptance_lengths(target, config, drafting, cases, (0.0, 1.0), 1.0, seed)
    bounds = {"own_trees": own / acceptance_length, "greedy_trees": greedy / acceptance_length}
    return {"t1_bound": max(bounds.values()), "t1_bounds": bounds}
