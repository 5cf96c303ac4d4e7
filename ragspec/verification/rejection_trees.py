"""The walks of the published acceptance rules over one draft. `rejection` chooses among them and checks what comes in.

All rules make the same trials at a node, one child after the other, and differ in when a child's own children are tried:

    downwards   a child is accepted or not, then its children are tried          (chain, SpecInfer, without replacement)
    backwards   a whole path is tried from its leaf upwards, then the next path  (block, traversal)
    leniently   a child is accepted if its probability is high enough; lossy     (typical, top-beta)

Sources: Leviathan et al. 2211.17192, Chen et al. 2302.01318 (chain); Miao et al. 2305.09781 (SpecInfer); Chen et al.
2402.12374 (without replacement); Sun et al. 2403.10444 (block); Weng et al. 2505.12398 (traversal).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ragspec.tree import DraftTree, Draw
from ragspec.verification.probabilities import Chance, Floats
from ragspec.verification.verify import Verdict

Allows = Callable[[Floats, int], bool]
"""Whether a lenient rule accepts a token, given the target's probabilities at its parent. Shape: [V]."""


class _Trial(NamedTuple):
    """One chance of a token. `draft_probs` None: it was sure to be tried. `node` None: nothing is known below it."""

    token_id: int
    node: int | None
    draft_probs: Floats | None


class _Place:
    """A node during a walk: what is left of the target's law there, and how probable its acceptance is.

    A rejection leaves the residual: the part of `accept_prob * law` that the draft's law does not cover.
    """

    def __init__(self, trial: _Trial, accept_prob: float, trials: Iterator[_Trial], law: Callable[[], Floats]) -> None:
        self.trial = trial
        self.trials = trials
        self.accept_prob = accept_prob
        self._law = law
        self._left: Floats | None = None

    @property
    def target_probs(self) -> Floats:
        if self._left is None:
            self._left = self._law()
        return self._left

    def odds(self, trial: _Trial) -> float:
        """The probability of accepting the path down to this child."""
        mass = self.accept_prob * float(self.target_probs[trial.token_id])
        return min(1.0, mass / float(trial.draft_probs[trial.token_id])) if trial.draft_probs is not None else mass

    def reject(self, trial: _Trial) -> None:
        """Where the residual has no mass, target and draft agree and a rejection is a rounding error: the law stays."""
        left = self.accept_prob * self.target_probs
        if trial.draft_probs is None:
            left[trial.token_id] = 0.0
        else:
            left = np.maximum(left - trial.draft_probs, 0.0)
        mass = float(left.sum())
        if mass > 0.0:
            self._left = left / mass
            self.accept_prob = mass / (mass + (1.0 - self.accept_prob))
        elif self.accept_prob < 1.0:
            self.accept_prob = 0.0


class TreeWalk:
    """One verification of one draft. `probs_at` gives the target's warped law at a node, float64 [V].

    Children that no draw lists were chosen without chance and come last.
    """

    def __init__(
        self, tree: DraftTree, draws: Mapping[int, Draw], probs_at: Callable[[int], Floats], chance: Chance
    ) -> None:
        self._tree, self._draws, self._chance = tree, draws, chance
        self._probs_at = functools.cache(probs_at)
        self._children = children_of(tree)

    def downwards(self) -> Verdict:
        """Each child is decided before its own children are looked at."""
        path: list[int] = []
        tokens: list[int] = []
        while True:
            trial = self._first_accepted(path[-1] if path else 0)
            tokens.append(trial.token_id)
            if trial.node is None:
                return Verdict(path, tokens)
            path.append(trial.node)

    def _first_accepted(self, node: int) -> _Trial:
        """The accepted child, or the token that the target's residual law gives."""
        place = self._place(_Trial(-1, node, None), 1.0)
        for trial in place.trials:
            if self._chance.below(place.odds(trial)):
                return trial
            place.reject(trial)
        return _Trial(self._chance.choose(place.target_probs), None, None)

    def backwards(self) -> Verdict:
        """Depth first, the deepest node of each path before those above it. The root is accepted at the latest.

        A child without a chance is not entered. Such is a token drawn again: its rejection left nothing of the law on it.
        """
        places = [self._place(_Trial(-1, 0, None), 1.0)]
        while True:
            place = places[-1]
            trial = next(place.trials, None)
            if trial is None and self._chance.below(place.accept_prob):
                return self._verdict(places)
            if trial is None:
                places.pop()
                places[-1].reject(place.trial)
            elif place.odds(trial) > 0.0:
                places.append(self._place(trial, place.odds(trial)))
            else:
                place.reject(trial)

    def _verdict(self, places: list[_Place]) -> Verdict:
        """The path that was accepted from its last place upwards, and the bonus token that place gives."""
        path = [place.trial.node for place in places[1:] if place.trial.node is not None]
        tokens = [place.trial.token_id for place in places[1:]]
        if len(path) == len(tokens):
            tokens.append(self._chance.choose(places[-1].target_probs))
        return Verdict(path, tokens)

    def leniently(self, allows: Allows) -> Verdict:
        """The deepest path of allowed nodes, the lower number on ties, and a bonus token of the target's law there."""
        allowed, deepest = {0}, 0
        for node in range(1, len(self._tree)):
            parent = self._tree.parents[node]
            if parent in allowed and allows(self._probs_at(parent), self._tree.token_ids[node]):
                allowed.add(node)
                deepest = max(deepest, node, key=lambda n: self._tree.depths[n])
        path = self._tree.ancestors(deepest)[1:]
        bonus = self._chance.choose(self._probs_at(deepest))
        return Verdict(path, [*(self._tree.token_ids[node] for node in path), bonus])

    def _place(self, trial: _Trial, accept_prob: float) -> _Place:
        """Where there is no node there are no trials and no bonus token, so nobody asks for the law."""
        trials = iter(()) if trial.node is None else self._trials(trial.node)
        return _Place(trial, accept_prob, trials, functools.partial(self._probs_at, trial.node or 0))

    def _trials(self, node: int) -> Iterator[_Trial]:
        drawn, draft_probs, with_replacement = self._draws.get(node, Draw(()))
        left = draft_probs
        for token in drawn:
            row = left / left.sum() if left is not None else None
            yield _Trial(token, self._tree.child(node, token), row)
            if left is not None and not with_replacement:
                left = left.copy()
                left[token] = 0.0
        for child in self._children[node]:
            if self._tree.token_ids[child] not in drawn:
                yield _Trial(self._tree.token_ids[child], child, None)


def children_of(tree: DraftTree) -> list[list[int]]:
    """The children of every node, by number."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    return children
