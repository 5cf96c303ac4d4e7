"""An upper bound on the speed-up at T=1 over that at T=0, from the target's own probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ragspec.drafting.drafter import Features
from ragspec.engine.engine import Engine
from ragspec.engine.sequence import SampledTrees
from ragspec.engine.target import Floats, Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import Repetitions, engine_config, engine_over
from ragspec.evaluation.timing import EngineDecoder
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.batch import Batch
from ragspec.tree import DraftTree


def t1_bound(target: Target, cases: Sequence[Case], acceptance_length: float, plan: Repetitions) -> Result:
    """Expected tokens a step at T=1 over the measured `acceptance_length` at T=0, for two sets of trees.

    `own_trees` were drafted along texts sampled at T=1: no drafter with these trees, and no verification that
    ignores the noise, accepts more. `own_trees` cannot tell that a drafter proposes poor trees at T=1. Hence
    `greedy_trees`: trees drafted along the greedy texts, walked by samples at T=1. `t1_bound` is the greater of
    the two, the harder to reach. Close the target's engine before: a fresh pool replaces its pool.
    """
    bounds = {}
    with engine_over(ProbedEngine, target, engine_config()) as engine:
        for name, temperature in (("greedy_trees", 0.0), ("own_trees", 1.0)):
            decode = EngineDecoder(engine, speculation=True, seed=plan.seed, temperature=temperature)
            for case in cases[: plan.num_warm_up]:
                decode(case)
            engine.expected.clear()
            for case in cases:
                decode(case)
            bounds[name] = (1.0 + float(np.mean(engine.expected))) / acceptance_length
    return {"t1_bound": max(bounds.values()), "t1_bounds": bounds}


class ProbedEngine(Engine):
    """Records every step's expected acceptance at T=1, one sequence at a time."""

    def __init__(self, *parts: Any) -> None:
        self.expected: list[float] = []
        super().__init__(*parts)

    def _forward(self, batch: Batch, trees: list[DraftTree | None]) -> tuple[LogitRows, Features, SampledTrees, float]:
        outputs = super()._forward(batch, trees)
        self.expected += [expected_accepted(tree, np.asarray(outputs[0])) for tree in trees if tree is not None]
        return outputs


def expected_accepted(tree: DraftTree, logits: Floats) -> float:
    """Sum over drafted nodes of the target's probability at T=1 of the path down to the node.

    Shapes: logits float32 [N, V], row n for node n.
    """
    log_norms = {parent: np.logaddexp.reduce(logits[parent].astype(np.float64)) for parent in set(tree.parents[1:])}
    path_probs = [1.0]
    for parent, token_id in zip(tree.parents[1:], tree.token_ids[1:], strict=True):
        path_probs.append(path_probs[parent] * float(np.exp(logits[parent, token_id] - log_norms[parent])))
    return sum(path_probs[1:])
