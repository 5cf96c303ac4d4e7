"""An upper bound on the speed-up at T=1 over that at T=0, from the target's own probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ragspec.config import DraftingConfig, EngineConfig
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.loading import make_drafters, measure_costs
from ragspec.engine.target import Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import EngineDecoder
from ragspec.numerics.kv_cache import KvPool
from ragspec.tree import DraftTree


def t1_bound(
    target: Target,
    config: EngineConfig,
    drafting: DraftingConfig,
    cases: Sequence[Case],
    acceptance_length: float,
    seed: int,
) -> Result:
    """Expected tokens a step at T=1 over the measured `acceptance_length` at T=0, for two sets of trees.

    `own_trees` were drafted along texts sampled at T=1: no drafter with these trees, and no verification that
    ignores the noise, accepts more. `own_trees` cannot tell that a drafter proposes poor trees at T=1. Hence
    `greedy_trees`: trees drafted along the greedy texts, walked by samples at T=1. `t1_bound` is the greater of
    the two, the harder to reach.
    """
    greedy, own = expected_acceptance_lengths(target, config, drafting, cases, (0.0, 1.0), 1.0, seed)
    bounds = {"own_trees": own / acceptance_length, "greedy_trees": greedy / acceptance_length}
    return {"t1_bound": max(bounds.values()), "t1_bounds": bounds}


_NUM_WARM_UP = 20


def expected_accepted(tree: DraftTree, logits: NDArray[np.float32], temperature: float) -> float:
    """Sum over drafted nodes of the target's probability of the path down to the node.

    Shapes: logits float32 [N, V], row n for node n.
    """
    path_probs = np.zeros(len(tree))
    path_probs[0] = 1.0
    log_norms: dict[int, float] = {}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        row = logits[parent].astype(np.float64) / temperature
        if parent not in log_norms:
            log_norms[parent] = float(np.logaddexp.reduce(row))
        path_probs[node] = path_probs[parent] * np.exp(row[tree.token_ids[node]] - log_norms[parent])
    return float(path_probs[1:].sum())


class PathProbe:
    """Wraps an engine's planner and target, and records every step's expected acceptance.

    One sequence at a time. The wrapper changes nothing. It computes the sums when the next step is planned, not
    inside the forward, because the engine times its forwards.
    """

    def __init__(self, target: Target, planner: Planner, temperature: float) -> None:
        self._target, self._planner = target, planner
        self._temperature = temperature
        self._trees: list[DraftTree] = []
        self._logits: NDArray[np.float32] | None = None
        self._expected: list[float] = []

    def plan(self, *args: Any) -> list[DraftTree]:
        self._settle()
        self._trees = self._planner.plan(*args)
        return self._trees

    def forward_tapped(self, *args: Any) -> tuple[NDArray[np.float32], dict[int, NDArray[np.float32]]]:
        self._logits, features = self._target.forward_tapped(*args)
        return self._logits, features

    def take(self) -> list[float]:
        """One number a step since the last call."""
        self._settle()
        taken, self._expected = self._expected, []
        return taken

    def _settle(self) -> None:
        if self._logits is not None:
            self._expected += [expected_accepted(tree, self._logits, self._temperature) for tree in self._trees]
        self._trees, self._logits = [], None


class _Instead:
    """An object with one method replaced."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def expected_acceptance_lengths(
    target: Target,
    config: EngineConfig,
    drafting: DraftingConfig,
    cases: Sequence[Case],
    decoded_at: Sequence[float],
    sampled_at: float,
    seed: int,
) -> list[float]:
    """For each temperature in `decoded_at`: expected tokens a step (bonus included) of the trees drafted at this
    temperature, walked by samples at `sampled_at`.

    Close the target's engine before: a fresh pool replaces its pool.
    """
    target.pool = KvPool(target.shapes, config.max_kv_tokens)
    planner = Planner(
        make_drafters(target, drafting), measure_costs(target, config.max_step_tokens), drafting.max_tree_nodes
    )
    probe = PathProbe(target, planner, sampled_at)
    lengths = []
    parts = (
        cast(Target, _Instead(target, forward_tapped=probe.forward_tapped)),
        cast(Planner, _Instead(planner, plan=probe.plan)),
    )
    with Engine(*parts, Admission(target, "probe"), config) as engine:
        for temperature in decoded_at:
            decode = EngineDecoder(engine, speculation=True, seed=seed, temperature=temperature)
            for case in cases[:_NUM_WARM_UP]:
                decode(case)
            probe.take()
            for case in cases:
                decode(case)
            lengths.append(1.0 + float(np.mean(probe.take())))
    return lengths
