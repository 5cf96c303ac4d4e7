"""The tree walks of the published acceptance rules. `rejection` checks the draft and chooses the walk.

All rules try the children of a node in order; they differ in when a child's own children are tried:

    top_down    a child is accepted or rejected, then its children are tried       (chain, SpecInfer, without restatement)
    bottom_up   a whole path is tried from its leaf upwards, then the next path    (block, traversal)
    lenient     a child is accepted if its probability is high enough; lossy       (typical, top-beta)

Sources: Leviathan et al. 2211.17192, Chen et al. 2302.01318 (chain); Miao et al. 2305.09781 (SpecInfer); Chen et al.
2402.12374 (without restatement); Sun et al. 2403.10444 (block); Weng et al. 2505.12398 (traversal).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragspec.tree import DraftTree, Draw, Probs
from ragspec.verification.probabilities import RandomSource
from ragspec.verification.verify import VerifyResult

Allows = Callable[[Probs, int], bool]
"""Whether a lenient rule accepts a token, given the target's probabilities at its parent. Shape: [V]."""


class _Trial(NamedTuple):
    """One proposed token. `draft_probs` None: proposed deterministically. `node` None: the token is not in the tree."""

    token_id: int
    node: int | None
    draft_probs: Probs | None


@dataclass
class _NodeState:
    """A node during a walk: the target's residual probabilities after rejections, and the node's acceptance probability.

    A rejection leaves the part of `accept_prob * target_probs` that the draft's probabilities do not cover.
    """

    trial: _Trial
    accept_prob: float
    trials: Iterator[_Trial]
    initial_probs: Callable[[], Probs]

    @functools.cached_property
    def target_probs(self) -> Probs:
        return self.initial_probs()

    def odds(self, trial: _Trial) -> float:
        """The probability of accepting the path down to this child."""
        mass = self.accept_prob * float(self.target_probs[trial.token_id])
        return min(1.0, mass / float(trial.draft_probs[trial.token_id])) if trial.draft_probs is not None else mass

    def reject(self, trial: _Trial) -> None:
        """A residual without mass means that target and draft agree: the rejection is a rounding error and changes nothing."""
        left: Any = self.accept_prob * self.target_probs
        if trial.draft_probs is None:
            left[trial.token_id] = 0.0
        else:
            left = (left - trial.draft_probs).clip(0.0)
        mass = float(left.sum())
        if mass > 0.0:
            self.target_probs = left / mass
            self.accept_prob = mass / (mass + (1.0 - self.accept_prob))
        elif self.accept_prob < 1.0:
            self.accept_prob = 0.0


class TreeWalk:
    """One verification of one draft. `probs_at` gives the target's warped probabilities at a node, float64 [V].

    Children without a draw were chosen deterministically and are tried last.
    """

    def __init__(
        self, tree: DraftTree, draws: Mapping[int, Draw], probs_at: Callable[[int], Probs], random: RandomSource
    ) -> None:
        self._tree, self._draws, self._random = tree, draws, random
        self._probs_at = functools.cache(probs_at)

    def top_down(self) -> VerifyResult:
        """Each child is decided before its own children are tried."""
        path: list[int] = []
        tokens: list[int] = []
        while True:
            trial = self._first_accepted(path[-1] if path else 0)
            tokens.append(trial.token_id)
            if trial.node is None:
                return VerifyResult(path, tokens)
            path.append(trial.node)

    def _first_accepted(self, node: int) -> _Trial:
        """The accepted child, or a token drawn from the target's residual."""
        state = self._state_of(_Trial(-1, node, None), 1.0)
        for trial in state.trials:
            if self._random.bernoulli(state.odds(trial)):
                return trial
            state.reject(trial)
        return _Trial(self._random.categorical(state.target_probs), None, None)

    def bottom_up(self) -> VerifyResult:
        """Depth first, the deepest node of each path before its ancestors. The root is accepted at the latest.

        A child of probability 0 is not entered, for example a token drawn again after its rejection.
        """
        states = [self._state_of(_Trial(-1, 0, None), 1.0)]
        while True:
            state = states[-1]
            trial = next(state.trials, None)
            if trial is None and self._random.bernoulli(state.accept_prob):
                return self._result(states)
            if trial is None:
                states.pop()
                states[-1].reject(state.trial)
            elif state.odds(trial) > 0.0:
                states.append(self._state_of(trial, state.odds(trial)))
            else:
                state.reject(trial)

    def _result(self, states: list[_NodeState]) -> VerifyResult:
        """The path down to the last state, which was accepted, and a bonus token drawn there."""
        path = [state.trial.node for state in states[1:] if state.trial.node is not None]
        tokens = [state.trial.token_id for state in states[1:]]
        if len(path) == len(tokens):
            tokens.append(self._random.categorical(states[-1].target_probs))
        return VerifyResult(path, tokens)

    def lenient(self, allows: Allows) -> VerifyResult:
        """The deepest path of allowed nodes (ties to the lower number), and a bonus token drawn from the target there."""
        allowed, deepest = {0}, 0
        for node in range(1, len(self._tree)):
            parent = self._tree.parents[node]
            if parent in allowed and allows(self._probs_at(parent), self._tree.token_ids[node]):
                allowed.add(node)
                deepest = max(deepest, node, key=lambda n: self._tree.depths[n])
        path = self._tree.ancestors(deepest)[1:]
        bonus = self._random.categorical(self._probs_at(deepest))
        return VerifyResult(path, [*(self._tree.token_ids[node] for node in path), bonus])

    def _state_of(self, trial: _Trial, accept_prob: float) -> _NodeState:
        """A token outside the tree has no trials and no bonus token, so its probabilities are never computed."""
        trials = iter(()) if trial.node is None else self._trials(trial.node)
        return _NodeState(trial, accept_prob, trials, functools.partial(self._probs_at, trial.node or 0))

    def _trials(self, node: int) -> Iterator[_Trial]:
        drawn, draft_probs, with_replacement = self._draws.get(node, Draw(()))
        left = draft_probs
        for token in drawn:
            row = left / left.sum() if left is not None else None
            yield _Trial(token, self._tree.child(node, token), row)
            if left is not None and not with_replacement:
                left = left.copy()
                left[token] = 0.0
        for child in self._tree.children(node):
            if self._tree.token_ids[child] not in drawn:
                yield _Trial(self._tree.token_ids[child], child, None)
