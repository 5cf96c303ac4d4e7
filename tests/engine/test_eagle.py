"""The EAGLE drafter in the engine: its states are those of a naive re-computation, and it changes no output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafters import Half
from drafting.eagle_heads import random_head
from drafting.eagle_reference import draft_outputs, eagle3_outputs, eagle_outputs, head_logits
from oracle_cases import PARAMS, PROMPTS, assert_equal, assert_pool_is_empty, generated, requests_of, total, truth
from tiny_target import Free, tiny_engine

from ragspec.core import Request, SamplingParams
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Budget, SequenceView
from ragspec.drafting.eagle.drafter import EagleDrafter
from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.growing.shapes import make_shape
from ragspec.engine.target import Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.cpu.int8 import Int8Layer
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.speculation import ON, AcceptanceRule, Speculation
from ragspec.tree import Proposal

Tiny = Callable[..., Target]
FAMILIES = ["eagle", "eagle3"]
TAPS = (0, 1, 2)


def head_for(target: Target, family: str, **fields: Any) -> HeadCheckpoint:
    if family == "poss":
        family, fields = "eagle", {"num_layers": 2, "positions_per_layer": 2, **fields}
    if family == "eagle3":
        fields = {"aux_layers": TAPS, "draft_vocab": 200, **fields}
    return random_head(family, hidden=target.hidden_size, vocab=target.vocab_size, **fields)


def free() -> CostTable:
    """A head that costs nothing, however long it takes here: whether it is asked must not depend on this machine."""
    return Free(1e-9)


def drafter_for(target: Target, family: str, tree: str = "dynamic", **options: Any) -> EagleDrafter:
    network = EagleNetwork(head_for(target, family), target, 300)
    return EagleDrafter(network, make_shape(tree, 3, 2, 4), free(), **options)


def features_of(target: Target, tokens: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """All tokens in one fresh forward. Shape: [T, F]."""
    slots = SequenceSlots(target.backend.make_pool(target.shapes, 512))
    pool, target.pool = target.pool, slots.pool
    ids = np.array(tokens, np.int32)
    _, tapped = target.forward_tapped(
        ids, Batch([ScheduledSequence(slots, ids)]).metadata, np.array([0], np.int32), taps
    )
    target.pool = pool
    return torch.cat([tapped[tap] for tap in taps], 1)


def naive_outputs(target: Target, head: HeadCheckpoint, tokens: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    features = features_of(target, tokens, taps).double()
    outputs = eagle_outputs if head.config.family is EagleFamily.EAGLE else eagle3_outputs
    return outputs(head, target.embedding, tokens, features)


class NotesReads:
    """Mixed into a drafter with a head: notes, at every draft, the text and the state that the draft grew from, and how much of
    the text it had not read.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], torch.Tensor, int]] = []

    def _read(self, drafts: list[Any], rows: DraftBatch, cache: KvPool) -> torch.Tensor:
        states: torch.Tensor = super()._read(drafts, rows, cache)  # type: ignore[misc]
        for draft, state in zip(drafts, states, strict=True):
            unread = int((~draft.memory._read[: draft.memory.end]).sum())
            self.seen.append((list(draft.sequence.tokens), state.clone(), unread))
        return states


class Watched(NotesReads, EagleDrafter): ...


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
DIALECTS: dict[str, dict[str, Any]] = {
    "EAGLE-1": {"family": "eagle"},
    "EAGLE-3": {"family": "eagle3"},
    "sliding window": {"family": "eagle3", "window": 3},
    "llama3": {"family": "eagle", "rope": {"rope_type": "llama3", **LLAMA3}},
    "linear": {"family": "eagle3", "rope": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"family": "eagle3", "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "EAGLE-Qwen2": {"family": "eagle", "fc_bias": True, "qkv_bias": True},
    "Qwen3": {"family": "eagle3", "qk_norm": True, "output_bias": True, "qkv_bias": True},
    "two layers of EAGLE-1": {"family": "eagle", "num_layers": 2, "window": 5},
    "three layers of EAGLE-3": {"family": "eagle3", "num_layers": 3},
    "PosS-1": {"family": "eagle", "num_layers": 3, "positions_per_layer": 1},
    "PosS-2": {"family": "eagle", "num_layers": 2, "positions_per_layer": 2, "qkv_bias": True},
    "one specialist": {"family": "eagle", "num_layers": 1, "positions_per_layer": 1},
}


def differs(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Beyond what rounding to float32, or weights and inputs in int8, explain."""
    if dtype == torch.int8:
        return bool(torch.linalg.norm(found.double() - wanted) > 0.15 * torch.linalg.norm(wanted))
    return not torch.allclose(found.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(("path_length", "dtype"), [(n, torch.float32) for n in (0, 1, 3)] + [(3, torch.int8)])
def test_a_tree_of_nodes_is_what_each_path_alone_would_give(
    tiny: Tiny, name: str, path_length: int, dtype: torch.dtype
) -> None:
    """A node saw its sibling, not its parent, or stood at another rotary position; a specialist attended to keys that another
    specialist computed."""
    target = tiny()
    head = head_for(target, **DIALECTS[name])
    network = EagleNetwork(head, target, 300, dtype)
    assert all(isinstance(layer, Int8Layer) == (dtype == torch.int8) for layer in network._layers)
    tokens = [9, 30, 31, 32, 200, 7, 8, 120]
    features = features_of(target, tokens, network.taps)
    num_pairs = len(tokens) - 1
    pool = KvPool(target.shapes, 512)
    cache = network.make_cache(pool)
    slots = np.array([3, 40, 41, 5, 200, 201, 77, *range(300, 320)], np.int32)
    rows = DraftBatch([ScheduledDraft(slots[:num_pairs], num_pairs, num_pairs, slots[num_pairs:])])
    states = network.first(np.array(tokens[1:], np.int32), features[:-1], cache, rows.chains())
    assert not differs(states, naive_outputs(target, head, tokens, network.taps), dtype)
    parents, drafted = [-1, -1, 0, 0, 1, 3], [11, 12, 13, 14, 15, 16]
    levels = [[0, 1], [2, 3, 4], [5]]
    paths = {0: (0,), 1: (1,), 2: (0, 2), 3: (0, 3), 4: (1, 4), 5: (0, 3, 5)}
    wanted = draft_outputs(head, target.embedding, tokens, features.double(), drafted, parents=parents)
    below = {-1: states[-1]}
    for level in levels[:path_length]:
        above = torch.stack([below[parents[node]] for node in level])
        ids = np.array([drafted[node] for node in level], np.int32)
        depth = len(paths[level[0]])
        out = network.further(ids, above, cache, rows.level([[paths[node] for node in level]]), depth)
        below |= {node: out[i] for i, node in enumerate(level)}
        for node in level:
            assert not differs(below[node], wanted[node], dtype)
    if head.config.family is EagleFamily.EAGLE3:
        assert not differs(torch.tensor(network.logits(states)), head_logits(head, states.double()), dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 16}, {"num_kv_slots": 256}, {"enable_prefix_caching": False}]
)
def test_states_are_right_after_copies_prefixes_chunks_and_preemption(
    tiny: Tiny, family: str, options: dict[str, Any]
) -> None:
    """Keys of rejected nodes stayed, a shared prefix that branches off kept the wrong pair, a chunk's states were lost."""
    target = tiny()
    network = EagleNetwork(head_for(target, family), target, 300)
    requests = requests_of(target, PARAMS["T=1"])
    longer = [
        Request(f"x{i}", (*r.prompt_ids[: 6 + i], 50 + i, *r.prompt_ids[6:]), r.params) for i, r in enumerate(requests)
    ]
    expected = truth(target, requests, "T=1") | truth(target, longer, "T=1")
    answers = {key: plain.token_ids for key, plain in expected.items()}
    watched = Watched(network, make_shape("dynamic", 3, 2, 4), free(), max_read=256)
    with tiny_engine(target, [Half(answers), watched], **options) as engine:
        for batch in (requests, longer, requests[::2], longer):
            assert_equal(engine.generate(batch), expected)
        assert engine._planner.num_failures == 0
        assert_pool_is_empty(engine)
    whole = [(tokens, state) for tokens, state, unread in watched.seen if not unread]
    assert len(whole) > (0.5 if options.get("enable_prefix_caching", True) else 0.999) * len(watched.seen)
    checked = whole[:: max(1, len(whole) // 60)]
    assert len(checked) > 12
    for tokens, state in checked:
        wanted = naive_outputs(target, head_for(target, family), tokens, network.taps)[-1]
        assert torch.allclose(state.double(), wanted, atol=5e-4), len(tokens)


@pytest.mark.parametrize("family", [*FAMILIES, pytest.param("poss", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in PARAMS), ("T=1", "torch-float32")])
def test_no_output_changes(tiny: Tiny, family: str, name: str, dtype: str) -> None:
    """A head's draft, of whatever shape, changed a token; or nothing was drafted at all."""
    target = tiny("llama", dtype)
    requests = requests_of(target, PARAMS[name])
    expected = truth(target, requests, name)
    for tree in ("dynamic", "static", "chain"):
        completions = generated(target, [drafter_for(target, family, tree)], [requests])
        assert_equal(completions, expected)
        assert total(completions, "num_drafted") > 0


class Fitted(EagleDrafter):
    """Its logits are the target's own: what such a head proposes is nearly always right."""

    target: Target

    def _picks(self, drafts: list[Any], logits: Any, depth: int) -> np.ndarray:
        rows = [self._true(draft, node) for draft in drafts for node in draft.open]
        return super()._picks(drafts, np.stack(rows)[:, self.network.draft_ids], depth)

    def _true(self, draft: Any, node: Any) -> np.ndarray:
        tokens, number = [], node.number
        while number >= 0:
            tokens.insert(0, draft.proposals[number].token_id)
            number = draft.proposals[number].parent
        text = [*draft.sequence.tokens, *tokens]
        return logits_after(self.target, text)


def logits_after(target: Target, tokens: Sequence[int]) -> np.ndarray:
    slots = SequenceSlots(KvPool(target.shapes, 512))
    pool, target.pool = target.pool, slots.pool
    ids = np.array(tokens, np.int32)
    logits = target.forward(ids, Batch([ScheduledSequence(slots, ids)]).metadata, np.array([len(ids) - 1], np.int32))
    target.pool = pool
    return logits[0]


class Near(Fitted):
    """Its law is the target's, shifted by a fixed amount a token: near enough to be accepted, far enough to be rejected."""

    known: dict[tuple[int, ...], np.ndarray]

    def _true(self, draft: Any, node: Any) -> np.ndarray:
        tokens, number = [], node.number
        while number >= 0:
            tokens.insert(0, draft.proposals[number].token_id)
            number = draft.proposals[number].parent
        text = (*draft.sequence.tokens, *tokens)
        if text not in self.known:
            shift = np.random.default_rng(5).normal(size=self.target.vocab_size).astype(np.float32)
            self.known[text] = logits_after(self.target, text) + 0.7 * shift
        return self.known[text]


def near(target: Target) -> Near:
    drafter = Near(EagleNetwork(head_for(target, "eagle"), target, 300), make_shape("dynamic", 3, 2, 3), free())
    drafter.target, drafter.known = target, {}
    return drafter


@pytest.mark.parametrize("name", ["greedy", "T=1", "top-p", "top-k, min-p"])
def test_with_the_targets_logits_and_noise_the_first_child_is_the_token(tiny: Tiny, name: str) -> None:
    """The noise of another position, choice or seed, another temperature or other survivors than the target's."""
    target = tiny()
    params = PARAMS[name]
    requests = requests_of(target, params, PROMPTS[:4])
    expected = truth(target, requests, name)
    drafter = Fitted(EagleNetwork(head_for(target, "eagle"), target, 300), make_shape("chain", 1, 1, 3), free())
    drafter.target = target
    completions = generated(target, [drafter], [requests])
    assert_equal(completions, expected)
    assert total(completions, "num_accepted") >= 0.98 * total(completions, "num_drafted") > 20


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=40), SamplingParams(temperature=1.0, max_tokens=40)])
def test_as_many_are_accepted_as_were_expected(tiny: Tiny, params: SamplingParams) -> None:
    """Given the noise a child's chance is not its probability: estimates that are off make trees of the wrong size."""
    target = tiny()
    drafter, expected, accepted = near(target), 0.0, 0
    with tiny_engine(target, [drafter]) as engine:
        for turn in range(9):
            requests = [
                Request(f"{turn}-{i}", tuple(range(20 + 9 * turn + i, 30 + 9 * turn + i)), replace(params, seed=turn))
                for i in range(4)
            ]
            completions = engine.generate(requests)
            if turn > 3:
                expected += total(completions, "expected_accepted")
                accepted += total(completions, "num_accepted")
        assert engine._planner.num_failures == 0
    assert accepted > 150 and 0.85 < expected / accepted < 1.15, (expected, accepted)


def test_a_window_hides_what_is_older(tiny: Tiny) -> None:
    """Beyond the length that a head was trained on it saw everything, or nothing."""
    target = tiny()
    network = EagleNetwork(head_for(target, "eagle3"), target, 300)
    watched = Watched(network, make_shape("chain", 1, 1, 2), free(), window=24)
    request = Request("a", tuple(range(30, 90)), SamplingParams(max_tokens=20, ignore_eos=True))
    with tiny_engine(target, [watched]) as engine:
        engine.generate([request])
        assert engine._planner.num_failures == 0
    tokens, state, _ = watched.seen[-1]
    head, features = head_for(target, "eagle3"), features_of(target, tokens, network.taps).double()
    seen = eagle3_outputs(head, target.embedding, tokens[-25:], features[-25:])[-1]  # rotations are relative
    assert torch.allclose(state.double(), seen, atol=5e-4)
    everything = eagle3_outputs(head, target.embedding, tokens, features)[-1]
    assert len(tokens) > 70 and not torch.allclose(state.double(), everything, atol=5e-4)


def test_a_prompt_is_read_over_the_following_drafts(tiny: Tiny) -> None:
    """A head drafted from the last few tokens of a long prompt for ever, or older pairs attended to newer ones."""
    target, family = tiny(), "eagle3"
    head = head_for(target, family)
    network = EagleNetwork(head, target, 300)
    watched = Watched(network, make_shape("chain", 1, 1, 1), free(), window=40, max_read=7)
    request = Request("a", tuple(range(30, 90)), SamplingParams(max_tokens=30, ignore_eos=True))
    with tiny_engine(target) as engine:
        (expected,) = engine.generate([request])
    with tiny_engine(target, [watched]) as engine:
        (completion,) = engine.generate([request])
        assert engine._planner.num_failures == 0
    assert completion.token_ids == expected.token_ids
    are_whole = []
    for tokens, state, _ in watched.seen:
        features = features_of(target, tokens, network.taps).double()
        wanted = eagle3_outputs(head, target.embedding, tokens[-41:], features[-41:])[-1]
        are_whole.append(torch.allclose(state.double(), wanted, atol=5e-4))
    assert not are_whole[0] and all(are_whole[12:]) and len(are_whole) > 18


def paper_tree(
    log_probs: Callable[[list[tuple[int, ...]]], list[np.ndarray]], num_children: int, depth: int, total: int
) -> set[tuple[int, ...]]:
    """EAGLE-2's tree as token paths: `depth` levels from the best `num_children` paths, then the `total` - 1 best."""
    scores: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path, law in zip(frontier, log_probs(list(frontier)), strict=True):
            for token in np.argsort(-law)[:num_children].tolist():
                level[(*path, token)] = frontier[path] + float(law[token])
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:num_children])
        scores |= level
    return {path for path, _ in sorted(scores.items(), key=lambda item: -item[1])[: total - 1]}


@pytest.mark.parametrize(
    ("name", "dtype"), [("EAGLE-1", "torch-float32"), pytest.param("PosS-2", "float32", marks=pytest.mark.slow)]
)
def test_the_tree_by_confidence_is_the_papers(tiny: Tiny, name: str, dtype: str) -> None:
    """Nodes were ranked by learned acceptance or with the sampling noise, or a level lost nodes that the last ranking keeps."""
    target, kept = tiny("llama", dtype), []
    head = head_for(target, **DIALECTS[name])
    drafter = EagleDrafter(EagleNetwork(head, target, 300), make_shape("dynamic", 4, 4, 5, num_nodes=29), free())
    propose = drafter.propose

    def noted(sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        lists = propose(sequences, budget)
        kept.extend((list(s.tokens), proposals) for s, proposals in zip(sequences, lists, strict=True))
        return lists

    drafter.propose = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    with tiny_engine(target, [drafter]) as engine:
        engine.generate([Request("a", tuple(range(30, 50)), params)])
        assert engine._planner.num_failures == 0
    whole = [(tokens, proposals) for tokens, proposals in kept if len(proposals) == 29]
    assert len(whole) > 3
    for tokens, proposals in whole[:3]:
        features = features_of(target, tokens[:-1], drafter.taps).double()

        def log_probs(paths: list[tuple[int, ...]]) -> list[np.ndarray]:
            if paths == [()]:
                states = [eagle_outputs(head, target.embedding, tokens, features)[-1]]  # noqa: B023
            else:
                states = [draft_outputs(head, target.embedding, tokens, features, path)[-1] for path in paths]  # noqa: B023
            logits = target.logits_of(torch.stack(states).float())
            return list(torch.log_softmax(torch.as_tensor(np.asarray(logits)).double(), 1).numpy())

        paths: list[tuple[int, ...]] = []
        for proposal in proposals:
            above = paths[proposal.parent] if proposal.parent >= 0 else ()
            paths.append((*above, proposal.token_id))
        assert len(set(paths)) == 29 and set(paths) == paper_tree(log_probs, 4, 5, 30)


def test_drawn_children_are_kept_by_a_tree_of_so_many_nodes(tiny: Tiny) -> None:
    """Nodes drawn by chance were ranked and cut, which changes the distribution of the output."""
    target, kept = tiny(), []
    network = EagleNetwork(head_for(target, "eagle"), target, 300)
    drafter = EagleDrafter(network, make_shape("dynamic", 3, 3, 3, num_nodes=2), free())
    propose = drafter.propose

    def noted(sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        kept.extend(lists := propose(sequences, budget))
        return lists

    drafter.propose = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    drawn = Speculation(rule=AcceptanceRule.WITHOUT_REPLACEMENT)
    with tiny_engine(target, [drafter]) as engine:
        for way, most in ((drawn, 12), (ON, 2)):
            kept.clear()
            engine.generate([Request("a", tuple(range(30, 50)), params, speculation=way)])
            assert engine._planner.num_failures == 0
            assert max(map(len, kept)) == most if most == 2 else max(map(len, kept)) >= most
            assert all((proposal.draw is not None) == (way is drawn) for proposals in kept for proposal in proposals)


class Sick(EagleNetwork):
    def logits(self, hidden: torch.Tensor) -> np.ndarray:
        return np.full((len(hidden), self.config.draft_vocab_size), np.nan, np.float32)


def test_logits_that_are_no_numbers_are_no_draft(tiny: Tiny) -> None:
    """NaN from a head reached the tree, or ended the request."""
    target = tiny()
    requests = requests_of(target, PARAMS["T=1"], PROMPTS[:3])
    drafter = EagleDrafter(Sick(head_for(target, "eagle3"), target, 300), make_shape("dynamic", 3, 2, 4), free())
    with tiny_engine(target, [drafter]) as engine:
        completions = engine.generate(requests)
        assert engine._planner.num_failures > 0
        assert_pool_is_empty(engine)
    assert_equal(completions, truth(target, requests, "T=1"))
    assert total(completions, "num_drafted") == 0


def test_proposals_name_parents_before_children_and_never_more_than_certain(tiny: Tiny) -> None:
    """Path probabilities that rise with depth, or siblings that together exceed their parent."""
    target = tiny()
    drafter = drafter_for(target, "eagle3")
    kept: list[list[Proposal]] = []
    propose = drafter.propose

    def noted(sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        kept.extend(lists := propose(sequences, budget))
        return lists

    drafter.propose = noted  # type: ignore[method-assign]
    with tiny_engine(target, [drafter]) as engine:
        engine.generate(requests_of(target, PARAMS["T=1"]))
    assert any(proposal.parent >= 0 for proposals in kept for proposal in proposals)
    for proposals in kept:
        below: dict[int, float] = {}
        for i, proposal in enumerate(proposals):
            assert proposal.parent < i
            below[proposal.parent] = below.get(proposal.parent, 0.0) + proposal.path_prob
        for parent, mass in below.items():
            assert mass <= (proposals[parent].path_prob if parent >= 0 else 1.0) + 1e-9


def test_a_draft_takes_nothing_from_the_pool_that_sequences_live_on(tiny: Tiny) -> None:
    """Slots for the nodes of drafts came from the pool: pages promised to the step were gone, and every request of it failed."""
    target = tiny()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    requests = [Request(f"p{i}", tuple(range(5 + i, 11 + 2 * i)), params) for i in range(14)]
    with tiny_engine(target) as engine:
        expected = [completion.token_ids for completion in engine.generate(requests)]
    network = EagleNetwork(head_for(target, "eagle3"), target, 300)
    for enable_prefix_caching in (True, False):
        drafter = EagleDrafter(network, make_shape("dynamic", 4, 4, 6), free())
        completions = generated(
            target,
            [drafter],
            [requests],
            num_kv_slots=400,
            max_nodes=48,
            max_num_batched_tokens=128,
            enable_prefix_caching=enable_prefix_caching,
        )
        assert [completion.token_ids for completion in completions] == expected
        assert total(completions, "num_drafted") > 0
        assert not drafter._memories


class OneSick(EagleNetwork):
    """No number comes out for one request's rows, the first of each batch."""

    def first(self, token_ids: Any, features: Any, cache: Any, rows: Any) -> torch.Tensor:
        hidden = super().first(token_ids, features, cache, rows)
        if len(rows.row_start) == 4:
            hidden = hidden.clone()
            hidden[int(rows.row_start[1]) - 1] = torch.nan
        return hidden


class AllSick(EagleNetwork):
    """No number comes out for one request, whatever comes with it."""

    def first(self, token_ids: Any, features: Any, cache: Any, rows: Any) -> torch.Tensor:
        return torch.full_like(super().first(token_ids, features, cache, rows), torch.nan)


def test_a_sick_request_that_runs_alone_is_drafted_for_once(tiny: Tiny) -> None:
    """It was asked for in every step, and after 25 of them the head was benched for everybody."""
    target = tiny()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    network = AllSick(head_for(target, "eagle3"), target, 300)
    with tiny_engine(target, [EagleDrafter(network, make_shape("dynamic", 3, 2, 4), free())]) as engine:
        (completion,) = engine.generate([Request("sick", tuple(range(40, 60)), params)])
        assert len(completion.token_ids) == 40
        assert engine._planner.num_failures == 1


def test_one_sequence_without_numbers_costs_the_others_nothing(tiny: Tiny) -> None:
    """NaN for one of three sequences left all three without drafts."""
    target = tiny()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    requests = [Request(name, tuple(range(40 + i, 60 + i)), params) for i, name in enumerate(("sick", "a", "b"))]
    network = OneSick(head_for(target, "eagle3"), target, 300)
    completions = generated(target, [EagleDrafter(network, make_shape("dynamic", 3, 2, 4), free())], [requests])
    assert [completion.stats.num_drafted > 0 for completion in completions] == [False, True, True]
