"""The published acceptance rules: lossless rules emit tokens in the target's distribution, lossy rules must be allowed.

The default rule, KEYED, is in `verify`: it follows the target's keyed sample and gives the same text for any draft. With the
rules here another draft gives another text of the same distribution. They accept more tokens of drafts that are drawn at random
without knowledge of the target's noise; of deterministic drafts all lossless rules accept equally many.

All rules try the children of a node in order; they differ in when a child's own children are tried:

    top_down    a child is accepted or rejected, then its children are tried       (chain, SpecInfer, without restatement)
    bottom_up   a whole path is tried from its leaf upwards, then the next path    (block, traversal)
    lenient     a child is accepted if its probability is high enough; lossy       (typical, top-beta)

    >>> rejection_sample(AcceptanceRule.TRAVERSAL, tree, {0: Draw((3, 5), draft_probs)}, probs_at, random, most_tokens=8)

Sources: Leviathan et al. 2211.17192, Chen et al. 2302.01318 (chain); Miao et al. 2305.09781 (SpecInfer); Chen et al.
2402.12374 (without restatement); Sun et al. 2403.10444 (block); Weng et al. 2505.12398 (traversal).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ragspec.errors import InputError
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.torch.sampling import Probs
from ragspec.speculation import CHAIN_RULES, LOSSY_RULES, AcceptanceRule
from ragspec.tree import DraftTree, Draw
from ragspec.verification.probabilities import KeyedRandom, RandomStream, row_probs
from ragspec.verification.sampling import ChoiceSampler, Logits
from ragspec.verification.verify import VerifyResult

_EPSILON = 0.09
"""The greatest threshold of the typical rule."""
_DELTA = 0.3
"""The threshold of the typical rule beside e^-entropy."""
_BETA = 3
"""Ranks that the top-beta rule accepts."""
_GAP_NATS = 1.0
"""How far under the greatest log-probability the top-beta rule accepts."""


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
        self, tree: DraftTree, draws: Mapping[int, Draw], probs_at: Callable[[int], Probs], random: KeyedRandom
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

    def lenient(self, rule: AcceptanceRule) -> VerifyResult:
        """The deepest path of allowed nodes (ties to the lower number), and a bonus token drawn from the target there."""
        allowed, deepest = {0}, 0
        for node in range(1, len(self._tree)):
            parent = self._tree.parents[node]
            if parent in allowed and allows(rule, self._probs_at(parent), self._tree.token_ids[node]):
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
        draw = self._draws.get(node, Draw(()))
        left: Probs | None = draw.draft_probs
        for token in draw.tokens:
            row = left / left.sum() if left is not None else None
            yield _Trial(token, self._tree.child(node, token), row)
            if left is not None and not draw.with_replacement:
                left = left.copy()
                left[token] = 0.0
        for child in self._tree.children(node):
            if self._tree.token_ids[child] not in draw.tokens:
                yield _Trial(self._tree.token_ids[child], child, None)


def allows(rule: AcceptanceRule, target_probs: Probs, token_id: int) -> bool:
    """Whether a lossy rule accepts a token. Shape: [V].

    TYPICAL accepts a token whose probability exceeds min(epsilon, delta * e^-entropy), entropy in nats (Cai et al. 2401.10774,
    section 3.3.1). TOP_BETA accepts a token among the beta most probable whose log-probability is at most the gap under the
    greatest (Xia et al. 2203.16487, section 3.2). Both see warped probabilities, so at temperature 0 they are exact.
    """
    prob = float(target_probs[token_id])
    if rule is AcceptanceRule.TYPICAL:
        return prob > min(_EPSILON, _DELTA * float(np.exp(-_entropy_nats(target_probs))))
    is_near = prob >= float(target_probs.max()) * np.exp(-_GAP_NATS)
    return bool(is_near) and prob > 0.0 and _rank(target_probs, token_id) < _BETA


def _entropy_nats(probs: Probs) -> float:
    if not isinstance(probs, np.ndarray):
        return probs.entropy_nats()
    present = probs[probs > 0.0]
    return -float((present * np.log(present)).sum())


def _rank(probs: Probs, token_id: int) -> int:
    if not isinstance(probs, np.ndarray):
        return probs.rank(token_id)
    return int((probs > probs[token_id]).sum() + (probs[:token_id] == probs[token_id]).sum())


def rejection_sample(
    rule: AcceptanceRule,
    tree: DraftTree,
    draws: Mapping[int, Draw],
    probs_at: Callable[[int], Probs],
    random: KeyedRandom,
    most_tokens: int,
) -> VerifyResult:
    """Accept a path of a draft and add the token after it; at most `most_tokens` tokens are decided.

    `draws[node]` declares how the node's children were drawn; all other children were chosen deterministically. `probs_at` gives
    the target's warped probabilities at a node, float64 [V].

    Raises: InputError for a draft that the rule does not support, or a draw that is impossible.
    """
    check_draft(rule, tree, draws, len(probs_at(0)))
    walk = TreeWalk(tree, draws, probs_at, random)
    if rule in LOSSY_RULES:
        path, tokens = walk.lenient(rule)
    elif rule in (AcceptanceRule.BLOCK, AcceptanceRule.TRAVERSAL):
        path, tokens = walk.bottom_up()
    else:
        path, tokens = walk.top_down()
    return VerifyResult(path[: most_tokens - 1], tokens[:most_tokens])


def check_draft(rule: AcceptanceRule, tree: DraftTree, draws: Mapping[int, Draw], vocab_size: int) -> None:
    """Raises: InputError for a draft that the rule does not support, or a draw that is impossible."""
    if rule is AcceptanceRule.KEYED:
        raise InputError("the keyed rule follows the target's own sample; it does no rejection sampling")
    _check_tokens(tree.token_ids[1:], vocab_size)
    for node, draw in draws.items():
        if not 0 <= node < len(tree):
            raise InputError(f"children were drawn at node {node} of a draft with {len(tree)} nodes")
        _check_draw(draw, vocab_size)
        if len(draw.tokens) > 1 and draw.draft_probs is not None:
            _check_replacement(rule, draw)
    if rule in CHAIN_RULES:
        _check_chain(rule, tree, draws)


def _check_tokens(token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"the drafted token {token} is none of the target's {vocab_size}")


def _check_draw(draw: Draw, vocab_size: int) -> None:
    _check_tokens(draw.tokens, vocab_size)
    probs = draw.draft_probs
    if probs is None:
        return
    if probs.shape != (vocab_size,) or not (probs.min() >= 0.0 and np.isfinite(probs.sum())):
        raise InputError(f"draft probabilities must be {vocab_size} numbers from 0 on")
    for token in draw.tokens:
        if probs[token] == 0.0:
            raise InputError(f"token {token} cannot have been drawn: its draft probability is 0")
    if not draw.with_replacement and len(set(draw.tokens)) < len(draw.tokens):
        raise InputError("a token was drawn twice without replacement")


def _check_replacement(rule: AcceptanceRule, draw: Draw) -> None:
    """Why: each of the two rules is biased on the other's draws."""
    wrong = AcceptanceRule.WITHOUT_REPLACEMENT if draw.with_replacement else AcceptanceRule.IID
    if rule is wrong:
        how = "with" if draw.with_replacement else "without"
        raise InputError(f"the rule {rule} is not exact for children drawn {how} replacement")


def _check_chain(rule: AcceptanceRule, tree: DraftTree, draws: Mapping[int, Draw]) -> None:
    for node in range(len(tree)):
        drawn = draws[node].tokens if node in draws else ()
        others = [child for child in tree.children(node) if tree.token_ids[child] not in drawn]
        if len(drawn) + len(others) > 1:
            raise InputError(f"the rule {rule} is for chains, and node {node} has more than one child")


class RejectionSampler(ChoiceSampler):
    """Decides the output tokens of one choice by its request's published rule. The same seed and drafts give the same tokens."""

    def __call__(self, logits: Logits) -> int:
        """The next output token without a draft, from the target's logits at its position. Shape: float32 [V]."""
        return self.verify(DraftTree(root_token=0), {}, logits[None], 1).tokens[0]

    def verify(self, tree: DraftTree, draws: Mapping[int, Draw], logits: LogitRows, most_tokens: int) -> VerifyResult:
        """Accept a path of the tree. Shapes: logits float32 [N, V], row n for node n. Raises: as `rejection_sample`."""
        random = KeyedRandom(self._seed, self._choice, self._index, RandomStream.VERIFY)

        def probs_at(node: int) -> Probs:
            path = [tree.token_ids[n] for n in tree.ancestors(node)[1:]]
            return row_probs(logits, node, *self._after(path))

        verdict = rejection_sample(self._rule, tree, draws, probs_at, random, most_tokens)
        self.take(verdict.tokens)
        return verdict
