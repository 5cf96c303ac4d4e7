"""How many tokens a step each acceptance rule expects, on the laws of a real target and head: the same beginnings for all.

Drafts are drawn as each rule needs them: chains of 4, or trees of 14 nodes with two children each, three levels deep. The
published rules run as they are served (`ragspec.verification.rejection`); the keyed rule follows the target's own sample, with
children that know its noise (coupled) or do not.

    >>> rule_table(Laws.load(TargetConfig(), head_dir), prefixes, seed=0, tick=tick)["keyed, coupled"]["tree"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ragspec.evaluation.comparison import Tick
from ragspec.evaluation.drafters_laws import Floats, Laws, Place
from ragspec.evaluation.drafters_variants import CHAIN, TREE
from ragspec.numerics.noise import gumbel_row, row_seed
from ragspec.speculation import AcceptanceRule
from ragspec.tree import DraftTree, Draw, Origin
from ragspec.verification.probabilities import KeyedChance, Stream, draw_iid, draw_without_replacement
from ragspec.verification.rejection import Acceptance, walk

NUM_WALKS = 8
"""Verifications of every drawn draft."""

_DEPTHS = {CHAIN: 4, TREE: 3}
_WIDTHS = {CHAIN: 1, TREE: 2}
_ORIGIN = Origin("rule")

Choose = Callable[[Floats, int, int], Draw]
"""(head's law [V], number of children, depth of the parent) -> the children."""


class Method(NamedTuple):
    """A rule, and how its drafts are chosen. `rule` KEYED: the target's own sample decides."""

    name: str
    rule: AcceptanceRule
    replacement: bool = True
    coupled: bool = False


METHODS: dict[str, tuple[Method, ...]] = {
    CHAIN: (
        Method("keyed, coupled", AcceptanceRule.KEYED, coupled=True),
        Method("keyed, uncoupled", AcceptanceRule.KEYED),
        Method("chain", AcceptanceRule.CHAIN),
        Method("block", AcceptanceRule.BLOCK),
    ),
    TREE: (
        Method("keyed, coupled", AcceptanceRule.KEYED, coupled=True),
        Method("keyed, uncoupled", AcceptanceRule.KEYED),
        Method("iid", AcceptanceRule.IID),
        Method("without replacement", AcceptanceRule.WITHOUT_REPLACEMENT, replacement=False),
        Method("traversal, iid", AcceptanceRule.TRAVERSAL),
        Method("traversal, without replacement", AcceptanceRule.TRAVERSAL, replacement=False),
    ),
}


def rule_table(
    laws: Laws, prefixes: Sequence[tuple[int, ...]], seed: int, tick: Tick
) -> dict[str, dict[str, float | None]]:
    """Mean tokens a step, the bonus token included, by rule and shape; None where a rule is not for that shape."""
    lengths: dict[str, dict[str, list[int]]] = {}
    for number, prefix in enumerate(prefixes, 1):
        with laws.behind(prefix) as place:
            for shape, methods in METHODS.items():
                for method in methods:
                    noise = row_seed(seed, f"{number}, {method.name}, {shape}")
                    found = step_lengths(place, prefix[-1], shape, method, noise)
                    lengths.setdefault(method.name, {}).setdefault(shape, []).extend(found)
        tick("acceptance rules", number, len(prefixes))
    return {
        name: {shape: float(np.mean(own[shape])) if shape in own else None for shape in METHODS}
        for name, own in lengths.items()
    }


def step_lengths(place: Place, root: int, shape: str, method: Method, seed: int) -> list[int]:
    """Tokens of some steps of one method, each with noise of its own."""
    if method.rule is AcceptanceRule.KEYED and method.coupled:
        return [_keyed_lengths(place, root, shape, True, [seed + i])[0] for i in range(NUM_WALKS // 2)]
    if method.rule is AcceptanceRule.KEYED:
        return _keyed_lengths(place, root, shape, False, [seed + i for i in range(NUM_WALKS)])
    chance = KeyedChance(seed, 0, 0, Stream.DRAFT)

    def choose(law: Floats, count: int, _: int) -> Draw:
        draw = draw_iid if method.replacement else draw_without_replacement
        return Draw(draw(law, count, chance), law, method.replacement)

    lengths: list[int] = []
    for _ in range(NUM_WALKS // 2):  # a draw of the draft is as much chance as its verification
        tree, draws = grown(place, root, shape, choose)
        laws = place.target_probs(tree)
        for walk_number in range(2):
            verifying = KeyedChance(seed + walk_number, 0, len(lengths), Stream.VERIFY)
            verdict = walk(Acceptance(method.rule), tree, draws, laws.__getitem__, verifying, len(tree) + 1)
            lengths.append(len(verdict.tokens))
    return lengths


def grown(place: Place, root: int, shape: str, choose: Choose) -> tuple[DraftTree, dict[int, Draw]]:
    """A draft, level by level; repeated draws meet in one node."""
    tree, draws, level = DraftTree(root), dict[int, Draw](), [0]
    for depth in range(_DEPTHS[shape]):
        paths = [tuple(tree.token_ids[node] for node in tree.ancestors(parent)[1:]) for parent in level]
        first = len(tree)
        for parent, law in zip(level, place.draft_probs(paths), strict=True):
            draws[parent] = choose(law, _WIDTHS[shape], depth)
            for token in draws[parent].tokens:
                tree.add(parent, token, tree.path_probs[parent], _ORIGIN)
        level = list(range(first, len(tree)))
    return tree, draws


def _keyed_lengths(place: Place, root: int, shape: str, coupled: bool, seeds: list[int]) -> list[int]:
    """The same draft walked by samples of several seeds; a coupled draft is made for the first of them."""

    def choose(law: Floats, count: int, depth: int) -> Draw:
        noise = gumbel_row(seeds[0], 0, depth, len(law)) if coupled else 0.0
        with np.errstate(divide="ignore"):
            ranked = np.argsort(-(np.log(law) + noise), kind="stable")
        return Draw(tuple(ranked[:count].tolist()))

    tree, _ = grown(place, root, shape, choose)
    with np.errstate(divide="ignore"):
        log_probs = np.log(place.target_probs(tree))  # [N, V]
    return [_followed(tree, log_probs, seed) for seed in seeds]


def _followed(tree: DraftTree, log_probs: Floats, seed: int) -> int:
    """Tokens of one step along the target's samples."""
    node: int | None = 0
    num_tokens = 0
    while node is not None:
        token = int(np.argmax(log_probs[node] + gumbel_row(seed, 0, num_tokens, log_probs.shape[1])))
        num_tokens += 1
        node = tree.child(node, token)
    return num_tokens
