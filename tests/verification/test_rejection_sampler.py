"""One choice's sampler by rule: keys, penalties along a path, resuming, and the law over many seeds."""

from collections.abc import Callable

import numpy as np
import pytest
from rejection_cases import CASES, LENGTH, PREFIXES, Drafted, Prefix, V, grow, probability
from statistics_of import surprise

from ragspec.core import Request, SamplingParams
from ragspec.speculation import AcceptanceRule
from ragspec.tree import DraftTree, Draw, Origin
from ragspec.verification.probabilities import KeyedRandom, RandomSource, RandomStream, draw_iid, token_probs
from ragspec.verification.rejection import RejectionSampler
from ragspec.verification.sampling import KeyedSampler

ON_TREES = [rule for rule in AcceptanceRule if rule not in ("keyed", "chain", "block")]
LAWS = CASES["random 2"].target
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "max_tokens")
NOISY = SamplingParams(
    temperature=1.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2, min_tokens=6, max_tokens=20
)


def rows_of(tree: DraftTree, table: np.ndarray) -> np.ndarray:
    """A target whose logits depend on the last token."""
    return table[tree.token_ids]


def drafted(rng: np.random.Generator, root: int, right: list[int], vocab_size: int) -> DraftTree:
    """Random guesses, some of them below the tokens that are right."""
    tree, node = DraftTree(root), 0
    for token in right:
        node = tree.add(node, token, 0.5, Origin("test"))
    for _ in range(12):
        tree.add(int(rng.integers(len(tree))), int(rng.integers(vocab_size)), 0.5, Origin("test"))
    return tree


@pytest.mark.parametrize("rule", ON_TREES)
def test_greedy_outputs_are_those_of_the_keyed_sampler(rule: AcceptanceRule) -> None:
    """Penalties or the minimum length that do not see the path above a node."""
    params = SamplingParams(**{field: getattr(NOISY, field) for field in PENALTIES})
    request, num_steps = Request("a", (2, 5, 5), params), 0
    for case in range(8):
        rng = np.random.default_rng(case)
        table = rng.normal(0, 1.0, (7, 7)).astype(np.float32)
        plain, output = KeyedSampler(request, 4, 0, (0, 3), []), [5]
        for _ in range(16):
            output.append(plain(table[output[-1]]))
        sampler, found = RejectionSampler(request, rule, 4, 0, (0, 3), []), [5]
        while len(found) < len(output):
            right = output[len(found) : len(found) + int(rng.integers(4))]
            tree = drafted(rng, found[-1], right, 7)
            found += sampler.verify(tree, {}, rows_of(tree, table), len(output) - len(found)).tokens
            num_steps += 1
        assert found == output
    assert num_steps < 8 * 10


def decoded(
    request: Request, seed: int, output: list[int], table: np.ndarray, draft_chance: Callable[[int], RandomSource]
) -> list[int]:
    """Output tokens until there are `max_tokens`, with one chain of two drawn tokens a step."""
    sampler = RejectionSampler(request, AcceptanceRule.BLOCK, seed, 0, (0,), output)
    while len(output) < request.params.max_tokens:
        tree, draws = DraftTree(output[-1] if output else 0), {}
        chance = draft_chance(len(output))
        for node in range(2):
            probs = token_probs(-table[tree.token_ids[node]], SamplingParams(temperature=1.0))
            draws[node] = Draw(draw_iid(probs, 1, chance), probs)
            tree.add(node, draws[node].tokens[0], 0.5, Origin("test"))
        left = request.params.max_tokens - len(output)
        output = [*output, *sampler.verify(tree, draws, rows_of(tree, table), left).tokens]
    return output


def test_a_seed_and_its_drafts_give_the_output_again() -> None:
    """Keys that depend on more than seed, choice and output index; a sampler that cannot resume between steps."""
    table = np.random.default_rng(3).normal(0, 1.0, (7, 7)).astype(np.float32)
    request = Request("a", (1, 2), NOISY)

    def chance_of(seed: int) -> Callable[[int], RandomSource]:
        return lambda index: KeyedRandom(seed, 0, index, RandomStream.DRAFT)

    outputs = [decoded(request, seed, [], table, chance_of(seed)) for seed in (5, 5, 6)]
    assert outputs[0] == outputs[1] != outputs[2]
    assert any(
        decoded(request, 5, outputs[0][:start], table, chance_of(5)) == outputs[0] for start in range(8, 12)
    )  # where a step began


def outputs_of(draft_stream: RandomStream) -> np.ndarray:
    """How often each output of LENGTH tokens came over many seeds; laws of the case as logits."""
    counts = dict.fromkeys([p for p in PREFIXES if len(p) == LENGTH], 0)
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH)
    for seed in range(1500):
        sampler = RejectionSampler(Request("a", (0,), params), AcceptanceRule.WITHOUT_REPLACEMENT, seed, 0, (), [])
        known: Prefix = ()
        while len(known) < LENGTH:
            chance = KeyedRandom(seed, 0, len(known), draft_stream)
            known = (*known, *one_step(sampler, known, chance))
        counts[known] += 1
    return np.array(list(counts.values()))


def one_step(sampler: RejectionSampler, known: Prefix, chance: RandomSource) -> list[int]:
    probs = CASES["random 2"].draft[known]
    draft = Drafted(DraftTree(0), {}, [()])
    grow(draft, 0, Draw(draw_iid(probs, 1, chance), probs))
    logits = np.log([LAWS[(*known, *prefix)] for prefix in draft.prefixes]).astype(np.float32)
    return sampler.verify(draft.tree, draft.draws, logits, LENGTH - len(known)).tokens


def test_drafts_and_decisions_share_no_chance() -> None:
    """Drafts drawn with the numbers that decide over them: every rule is biased then, which the count must notice."""
    expected = 1500 * np.array([probability(LAWS, p) for p in PREFIXES if len(p) == LENGTH])
    assert surprise(outputs_of(RandomStream.DRAFT), expected) < 6
    assert surprise(outputs_of(RandomStream.VERIFY), expected) > 6


def test_without_a_draft_the_sampler_draws_from_the_warped_law() -> None:
    """A first token, or one where speculation is off, decided otherwise than those after it."""
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 1, V).astype(np.float32)
    params = SamplingParams(temperature=0.7, max_tokens=1)
    request = Request("a", (0,), params)
    tokens = [RejectionSampler(request, AcceptanceRule.IID, seed, 0, (), [])(logits) for seed in range(1500)]
    assert surprise(np.bincount(tokens, minlength=V), 1500 * token_probs(logits, params)) < 6
