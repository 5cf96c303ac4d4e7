"""Whole rows of probabilities have the survivors that sampling has; draws have the law they say; a choice's sampler is keyed."""

import itertools
from collections.abc import Callable

import numpy as np
import oracle
import pytest
from branches import branches
from drafters import add_node
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rejection_cases import CASES, LENGTH, PREFIXES, Drafted, Prefix, V, grow, probability
from statistics_of import softmax, surprise

from ragspec.core import Request, SamplingParams
from ragspec.numerics.noise import output_key
from ragspec.speculation import AcceptanceRule, Speculation
from ragspec.tree import DraftTree, Draw
from ragspec.verification.probabilities import (
    KeyedRandom,
    RandomStream,
    draw_iid,
    draw_without_replacement,
    token_probs,
)
from ragspec.verification.rejection import RejectionSampler
from ragspec.verification.sampling import KeyedSampler, TokenCounts

LOGITS = st.lists(
    st.one_of(st.sampled_from([-np.inf, 0.0, 1.0, 2.0]), st.floats(-30, 30, width=32)), min_size=1, max_size=12
).map(lambda values: np.array(values, np.float32))


@settings(max_examples=100, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0, 1, 2, 3, 7, 100]),
    st.sampled_from([1.0, 0.9, 0.731, 0.5, 0.137, 1e-9]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_rows_hold_the_survivors_of_sampling(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """The law a rule accepts by is not the law that plain decoding samples from."""
    assume(logits.max() > -np.inf)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not oracle.is_ambiguous(logits, top_k, top_p))
    probs = token_probs(logits, params)
    kept = oracle.survivors(logits, params)
    assert np.flatnonzero(probs).tolist() == sorted(kept)
    np.testing.assert_allclose(probs[kept], softmax(logits[kept]), rtol=1e-12)
    assert probs.sum() == pytest.approx(1.0, abs=1e-15 * 8)


def test_rows_are_warped_as_the_oracle_says() -> None:
    """A warp missing, or in another order than sampling's."""
    logits = np.random.default_rng(0).normal(0, 2, 9).astype(np.float32)
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    params = SamplingParams(temperature=0.6, logit_bias={3: 2.0}, min_tokens=9, **penalties)
    probs = token_probs(logits, params, TokenCounts((1, 2), [2, 4, 4]), forbidden=(7,))
    np.testing.assert_allclose(probs, softmax(oracle.warped(logits, (1, 2), [2, 4, 4], params, (7,))), rtol=1e-12)


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [([1, 3, 3], 0.0, 1), ([-0.0, 0.0], 0.0, 0), ([-np.inf] * 3, 1.0, 0), ([-np.inf, 2.0, 1.0], 1e-7, 1)],
)
def test_one_token_takes_all(logits: list[float], temperature: float, expected: int) -> None:
    """Ties at temperature 0 shared, or nothing left where everything is forbidden."""
    probs = token_probs(np.array(logits, np.float32), SamplingParams(temperature=temperature))
    np.testing.assert_array_equal(probs, np.eye(len(logits))[expected])


DRAFT_PROBS = np.array([0.5, 0.0, 0.3, 0.2])


def test_draws_have_their_law() -> None:
    """Draws without replacement from probabilities not renormalised, or in another order than drawn."""
    found: dict[tuple[int, ...], float] = {}
    for prob, tokens in branches(lambda chance: draw_without_replacement(DRAFT_PROBS, 2, chance)):
        found[tokens] = found.get(tokens, 0.0) + prob
    expected = {
        (a, b): DRAFT_PROBS[a] * DRAFT_PROBS[b] / (1 - DRAFT_PROBS[a]) for a, b in itertools.permutations((0, 2, 3), 2)
    }
    assert found == pytest.approx(expected, abs=1e-15)
    independent = {tokens: prob for prob, tokens in branches(lambda chance: draw_iid(DRAFT_PROBS, 2, chance))}
    assert independent == pytest.approx(
        {(a, b): DRAFT_PROBS[a] * DRAFT_PROBS[b] for a, b in itertools.product((0, 2, 3), repeat=2)}
    )


def test_draws_end_with_the_support() -> None:
    """A fourth draw where three tokens have a probability."""
    drawn = draw_without_replacement(DRAFT_PROBS, 9, KeyedRandom(1, 0, 0, RandomStream.DRAFT))
    assert sorted(drawn) == [0, 2, 3]
    np.testing.assert_array_equal(DRAFT_PROBS, [0.5, 0.0, 0.3, 0.2])


def test_every_key_has_numbers_of_its_own() -> None:
    """Two tokens, two choices, or drafts and decisions that meet the same numbers, or those of the Gumbel noise."""
    keys = list(itertools.product((0, 2**64 - 1), (0, 1), (0, 1, 5)))
    chances = [KeyedRandom(*key, stream) for key in keys for stream in RandomStream]
    numbers = [chance.uniform() for chance in chances for _ in range(5)]
    noise = [bits / 2**53 for key in keys for bits in oracle.bits(*key, 20)]
    assert len({*numbers, *noise}) == len(numbers) + len(noise)
    again = KeyedRandom(0, 0, 0, RandomStream.VERIFY)
    assert [again.uniform() for _ in range(5)] == numbers[:5]
    nested = int(output_key(int(output_key(0, 0, 0)), 1, 2))
    assert numbers[2] == (nested >> 11) / 2**53


@pytest.mark.parametrize("stride", [1, 2])
def test_numbers_are_uniform_and_independent(stride: int) -> None:
    """Numbers of one key, or the first numbers of neighbouring keys, that share structure: pairs in an 8 x 8 grid."""
    chance = KeyedRandom(7, 0, 3, RandomStream.VERIFY)
    in_a_row = [chance.uniform() for _ in range(12_800)]
    of_neighbours = [KeyedRandom(7, 0, index, RandomStream.VERIFY).uniform() for index in range(12_800)]
    for numbers in (in_a_row, of_neighbours):
        cells = (np.array(numbers) * 8).astype(int)
        pairs = cells[:-stride:2] * 8 + cells[stride::2][: len(cells[:-stride:2])]
        counts = np.bincount(pairs, minlength=64)
        assert surprise(counts, np.full(64, len(pairs) / 64)) < 6


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
        node = add_node(tree, node, token)
    for _ in range(12):
        add_node(tree, int(rng.integers(len(tree))), int(rng.integers(vocab_size)))
    return tree


@pytest.mark.parametrize("rule", ON_TREES)
def test_greedy_outputs_are_those_of_the_keyed_sampler(rule: AcceptanceRule) -> None:
    """Penalties or the minimum length that do not see the path above a node."""
    params = SamplingParams(**{field: getattr(NOISY, field) for field in PENALTIES})
    request, num_steps = Request("a", (2, 5, 5), params, speculation=Speculation(rule=rule, lossy=True)), 0
    for case in range(8):
        rng = np.random.default_rng(case)
        table = rng.normal(0, 1.0, (7, 7)).astype(np.float32)
        plain, output = KeyedSampler(request, 4, 0, (0, 3), []), [5]
        for _ in range(16):
            output.append(plain(table[output[-1]]))
        sampler, found = RejectionSampler(request, 4, 0, (0, 3), []), [5]
        while len(found) < len(output):
            right = output[len(found) : len(found) + int(rng.integers(4))]
            tree = drafted(rng, found[-1], right, 7)
            found += sampler.verify(tree, {}, rows_of(tree, table), len(output) - len(found)).tokens
            num_steps += 1
        assert found == output
    assert num_steps < 8 * 10


def decoded(
    request: Request, seed: int, output: list[int], table: np.ndarray, draft_chance: Callable[[int], KeyedRandom]
) -> list[int]:
    """Output tokens until there are `max_tokens`, with one chain of two drawn tokens a step."""
    sampler = RejectionSampler(request, seed, 0, (0,), output)
    while len(output) < request.params.max_tokens:
        tree, draws = DraftTree(output[-1] if output else 0), {}
        chance = draft_chance(len(output))
        for node in range(2):
            probs = token_probs(-table[tree.token_ids[node]], SamplingParams(temperature=1.0))
            draws[node] = Draw(draw_iid(probs, 1, chance), probs)
            add_node(tree, node, draws[node].tokens[0])
        left = request.params.max_tokens - len(output)
        output = [*output, *sampler.verify(tree, draws, rows_of(tree, table), left).tokens]
    return output


def test_a_seed_and_its_drafts_give_the_output_again() -> None:
    """Keys that depend on more than seed, choice and output index; a sampler that cannot resume between steps."""
    table = np.random.default_rng(3).normal(0, 1.0, (7, 7)).astype(np.float32)
    request = Request("a", (1, 2), NOISY, speculation=Speculation(rule=AcceptanceRule.BLOCK))

    def chance_of(seed: int) -> Callable[[int], KeyedRandom]:
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
    request = Request("a", (0,), params, speculation=Speculation(rule=AcceptanceRule.WITHOUT_REPLACEMENT))
    for seed in range(1500):
        sampler = RejectionSampler(request, seed, 0, (), [])
        known: Prefix = ()
        while len(known) < LENGTH:
            chance = KeyedRandom(seed, 0, len(known), draft_stream)
            known = (*known, *one_step(sampler, known, chance))
        counts[known] += 1
    return np.array(list(counts.values()))


def one_step(sampler: RejectionSampler, known: Prefix, chance: KeyedRandom) -> list[int]:
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
    request = Request("a", (0,), params, speculation=Speculation(rule=AcceptanceRule.IID))
    tokens = [RejectionSampler(request, seed, 0, (), [])(logits) for seed in range(1500)]
    assert surprise(np.bincount(tokens, minlength=V), 1500 * token_probs(logits, params)) < 6
