"""Small targets, drafters and drafts whose whole law can be followed, and the comparison of laws."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from branches import ScriptedRandom, branches
from drafters import add_node

from ragspec.core import SamplingParams
from ragspec.speculation import AcceptanceRule
from ragspec.tree import DraftTree, Draw
from ragspec.verification.probabilities import draw_iid, draw_without_replacement, token_probs
from ragspec.verification.rejection import rejection_sample
from ragspec.verification.verify import VerifyResult

V, LENGTH = 3, 3
EXACT = 1e-12
Prefix = tuple[int, ...]
Laws = Mapping[Prefix, np.ndarray]
PREFIXES = [p for depth in range(LENGTH + 1) for p in itertools.product(range(V), repeat=depth)]


class Case(NamedTuple):
    """Laws of a target and of a drafter after each prefix, float64 [V]."""

    target: Laws
    draft: Laws


class Drafted(NamedTuple):
    tree: DraftTree
    draws: dict[int, Draw]
    prefixes: list[Prefix]


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    rows = {prefix: (rng.dirichlet(np.full(V, 0.7)), rng.dirichlet(np.full(V, 0.7))) for prefix in PREFIXES}
    return Case({p: rows[p][0] for p in rows}, {p: rows[p][1] for p in rows})


def warped_case(seed: int, params: SamplingParams) -> Case:
    rng = np.random.default_rng(seed)

    def laws(scale: float) -> Laws:
        return {p: token_probs(rng.normal(0, scale, V).astype(np.float32), params) for p in PREFIXES}

    return Case(laws(1.5), laws(1.0))


def fixed_case(target: Sequence[float], draft: Sequence[float]) -> Case:
    return Case(dict.fromkeys(PREFIXES, np.array(target)), dict.fromkeys(PREFIXES, np.array(draft)))


CASES = {
    "random 0": random_case(0),
    "random 1": random_case(1),
    "random 2": random_case(2),
    "top-p": warped_case(34, SamplingParams(temperature=1.0, top_p=0.8)),
    "top-k": warped_case(4, SamplingParams(temperature=0.8, top_k=2)),
    "greedy target": Case(warped_case(5, SamplingParams()).target, random_case(5).draft),
    "greedy both": warped_case(33, SamplingParams()),
    "target is drafter": Case(random_case(7).target, random_case(7).target),
    "disjoint": fixed_case([0.0, 1.0, 0.0], [0.4, 0.0, 0.6]),
    "half disjoint": fixed_case([0.0, 0.25, 0.75], [0.5, 0.5, 0.0]),
    "nearly the same": fixed_case([0.3, 0.3, 0.4], [0.3, 0.3 - 1e-16, 0.4 + 1e-16]),
}

LOSSLESS = {
    "chain": (AcceptanceRule.CHAIN, (1, 1), True),
    "block": (AcceptanceRule.BLOCK, (1, 1), True),
    "iid": (AcceptanceRule.IID, (2, 2), True),
    "without replacement": (AcceptanceRule.WITHOUT_REPLACEMENT, (2, 2), False),
    "exhausted": (AcceptanceRule.WITHOUT_REPLACEMENT, (3, 1), False),
    "traversal, iid": (AcceptanceRule.TRAVERSAL, (2, 2), True),
    "traversal, without replacement": (AcceptanceRule.TRAVERSAL, (2, 2), False),
    "traversal, three draws": (AcceptanceRule.TRAVERSAL, (3, 1), True),
    "no draft": (AcceptanceRule.TRAVERSAL, (), True),
}


def sampled(case: Case, counts: Sequence[int], with_replacement: bool, chance: ScriptedRandom) -> Drafted:
    """A tree with `counts[d]` draws at each node of depth d; the nodes of one token are one node."""
    drafted = Drafted(DraftTree(0), {}, [()])
    draw = draw_iid if with_replacement else draw_without_replacement
    for node in itertools.count():
        if node == len(drafted.tree):
            return drafted
        depth = drafted.tree.depths[node]
        if depth < len(counts):
            probs = case.draft[drafted.prefixes[node]]
            grow(drafted, node, Draw(draw(probs, counts[depth], chance), probs, with_replacement))


def grow(drafted: Drafted, node: int, draw: Draw) -> None:
    drafted.draws[node] = draw
    for token in dict.fromkeys(draw.tokens):
        add_node(drafted.tree, node, token)
        drafted.prefixes.append((*drafted.prefixes[node], token))


def chosen(case: Case, count: int, depth: int = 2) -> Drafted:
    """The `count` most probable children at every node, without chance."""
    drafted = Drafted(DraftTree(0), {}, [()])
    for node in itertools.count():
        if node == len(drafted.tree):
            return drafted
        if drafted.tree.depths[node] < depth:
            best = np.argsort(-case.draft[drafted.prefixes[node]], kind="stable")[:count]
            grow(drafted, node, Draw(tuple(int(v) for v in best)))


def verdict_of(
    case: Case, rule: AcceptanceRule, drafted: Drafted, chance: ScriptedRandom, most: int = LENGTH
) -> VerifyResult:
    verdict = rejection_sample(
        rule, drafted.tree, drafted.draws, lambda n: case.target[drafted.prefixes[n]], chance, most
    )
    assert [drafted.tree.token_ids[node] for node in verdict.path] == verdict.tokens[: len(verdict.path)]
    assert [drafted.tree.parents[node] for node in verdict.path] == [0, *verdict.path][: len(verdict.path)]
    assert len(verdict.tokens) == len(verdict.path) + 1
    return verdict


class Measured(NamedTuple):
    """Total variation between the law emitted and the target's, and the expected number of accepted nodes."""

    variation: float
    num_accepted: float


def measure(case: Case, run: Callable[[ScriptedRandom], VerifyResult]) -> Measured:
    """Whatever a step emitted, plain decoding goes on behind it, so joint laws of LENGTH tokens are compared."""
    law = dict.fromkeys(itertools.product(range(V), repeat=LENGTH), 0.0)
    num_accepted = 0.0
    for prob, verdict in branches(run):
        num_accepted += prob * len(verdict.path)
        known = tuple(verdict.tokens[:LENGTH])
        for rest in itertools.product(range(V), repeat=LENGTH - len(known)):
            law[(*known, *rest)] += prob * probability(case.target, (*known, *rest), len(known))
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    return Measured(0.5 * sum(abs(law[s] - probability(case.target, s)) for s in law), num_accepted)


def probability(laws: Laws, tokens: Prefix, start: int = 0) -> float:
    """Of tokens [start, end) given those before."""
    return float(np.prod([laws[tokens[:i]][tokens[i]] for i in range(start, len(tokens))]))


@functools.cache
def measured(case: str, name: str) -> Measured:
    rule, counts, with_replacement = LOSSLESS[name]

    def run(chance: ScriptedRandom) -> VerifyResult:
        return verdict_of(CASES[case], rule, sampled(CASES[case], counts, with_replacement, chance), chance)

    return measure(CASES[case], run)


def pruned(drafted: Drafted, kept: Callable[[Prefix], bool]) -> Drafted:
    """Without the nodes that are not to be kept and those below; the draws are still listed at the nodes that stay."""
    smaller, numbers = Drafted(DraftTree(0), {}, [()]), {0: 0}
    for node, prefix in enumerate(drafted.prefixes):
        if node and drafted.tree.parents[node] in numbers and kept(prefix):
            parent = numbers[drafted.tree.parents[node]]
            numbers[node] = add_node(smaller.tree, parent, prefix[-1])
            smaller.prefixes.append(prefix)
    smaller.draws.update((numbers[node], draw) for node, draw in drafted.draws.items() if node in numbers)
    return smaller
