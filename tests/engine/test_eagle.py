"""The EAGLE drafter in the engine: its states are those of a naive re-computation, and it changes no output."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drafters import Half, noted
from drafting.eagle_heads import LLAMA3
from drafting.eagle_reference import draft_outputs, head_logits, head_outputs
from head_parts import Near, NotesReads, differs, drafter_for, features_of, free, head_for, naive_outputs, near
from oracle_cases import (
    PARAMS,
    PROMPTS,
    asked,
    assert_equal,
    assert_pool_is_empty,
    generated,
    requests_of,
    total,
    truth,
)
from tiny_target import Tiny, tiny_engine

from ragspec.core import Request, SamplingParams
from ragspec.drafting.eagle.drafter import EagleDrafter
from ragspec.drafting.eagle.layout import EagleFamily
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.growing.draft import DraftBatch, ScheduledDraft, make_shape
from ragspec.drafting.heads.layer import FINAL
from ragspec.numerics.cpu.int8 import Int8Layer
from ragspec.numerics.kv_cache import KvPool
from ragspec.speculation import ON, AcceptanceRule, Speculation


class Watched(NotesReads, EagleDrafter): ...


DIALECTS: dict[str, dict[str, Any]] = {
    "EAGLE-1": {"family": "eagle"},
    "EAGLE-3": {"family": "eagle3"},
    "sliding window": {"family": "eagle3", "window": 3},
    "llama3": {"family": "eagle", "rope": LLAMA3 | {"original_max_position_embeddings": 64}},
    "linear": {"family": "eagle3", "rope": {"rope_type": "linear", "factor": 4.0}},
    "yarn": {"family": "eagle3", "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "EAGLE-Qwen2": {"family": "eagle", "fc_bias": True, "qkv_bias": True},
    "Qwen3": {"family": "eagle3", "qk_norm": True, "output_bias": True, "qkv_bias": True},
    "two layers of EAGLE-1": {"family": "eagle", "num_layers": 2, "window": 5},
    "three layers of EAGLE-3": {"family": "eagle3", "num_layers": 3},
    "the target's final state": {"family": "eagle3", "aux_layers": (FINAL,)},
    "PosS-1": {"family": "eagle", "num_layers": 3, "positions_per_layer": 1},
    "PosS-2": {"family": "eagle", "num_layers": 2, "positions_per_layer": 2, "qkv_bias": True},
    "one specialist": {"family": "eagle", "num_layers": 1, "positions_per_layer": 1},
}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_tree_of_nodes_is_what_each_path_alone_would_give(tiny: Tiny, name: str, dtype: torch.dtype) -> None:
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
    for level in levels:
        above = torch.stack([below[parents[node]] for node in level])
        ids = np.array([drafted[node] for node in level], np.int32)
        depth = len(paths[level[0]])
        out = network.outputs(ids, above, cache, rows.level([[paths[node] for node in level]]), depth)
        below |= {node: out[i] for i, node in enumerate(level)}
        for node in level:
            assert not differs(below[node], wanted[node], dtype)
    if head.config.family is EagleFamily.EAGLE3:
        assert not differs(torch.tensor(network.logits(states)), head_logits(head, states.double()), dtype)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {"max_num_batched_tokens": 16}),
        ("eagle", {"num_kv_slots": 256}),
        pytest.param("eagle", {}, marks=pytest.mark.slow),
        pytest.param("eagle3", {"enable_prefix_caching": False}, marks=pytest.mark.slow),
    ],
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
    assert_equal(
        generated(target, [Half(answers), watched], (requests, longer, requests[::2], longer), **options), expected
    )
    whole = [(tokens, state) for tokens, state, unread in watched.seen if not unread]
    assert len(whole) > (0.5 if options.get("enable_prefix_caching", True) else 0.999) * len(watched.seen)
    checked = whole[:: max(1, len(whole) // 60)]
    assert len(checked) > 12
    for tokens, state in checked:
        wanted = naive_outputs(target, head_for(target, family), tokens, network.taps)[-1]
        assert torch.allclose(state.double(), wanted, atol=5e-4), len(tokens)


@pytest.mark.parametrize("name", ["greedy", "top-p", "top-k, min-p"])
def test_with_the_targets_logits_and_noise_the_first_child_is_the_token(tiny: Tiny, name: str) -> None:
    """The noise of another position, choice or seed, another temperature or other survivors than the target's."""
    target = tiny()
    requests, expected = asked(target, name, PROMPTS[:4])
    completions = generated(target, [Near(target, ("chain", 1, 1, 3))], [requests])
    assert_equal(completions, expected)
    assert total(completions, "num_accepted") >= 0.98 * total(completions, "num_drafted") > 20


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_as_many_are_accepted_as_were_expected(tiny: Tiny, temperature: float) -> None:
    """Given the noise a child's chance is not its probability: estimates that are off make trees of the wrong size."""
    target = tiny()
    expected, accepted = 0.0, 0
    with tiny_engine(target, [near(target)]) as engine:
        for turn in range(6):
            params = SamplingParams(temperature=temperature, seed=turn, max_tokens=30)
            prompts = [tuple(range(20 + 9 * turn + i, 30 + 9 * turn + i)) for i in range(4)]
            completions = engine.generate([Request(f"{turn}-{i}", ids, params) for i, ids in enumerate(prompts)])
            if turn > 2:
                expected += total(completions, "expected_accepted")
                accepted += total(completions, "num_accepted")
        assert engine.num_drafter_failures == 0
    assert accepted > 60 and 0.8 < expected / accepted < 1.25, (expected, accepted)


def test_a_window_hides_what_is_older(tiny: Tiny) -> None:
    """Beyond the length that a head was trained on it saw everything, or nothing."""
    target = tiny()
    network = EagleNetwork(head_for(target, "eagle3"), target, 300)
    watched = Watched(network, make_shape("chain", 1, 1, 2), free(), window=24)
    request = Request("a", tuple(range(30, 90)), SamplingParams(max_tokens=20, ignore_eos=True))
    generated(target, [watched], [[request]])
    tokens, state, _ = watched.seen[-1]
    head, features = head_for(target, "eagle3"), features_of(target, tokens, network.taps).double()
    seen = head_outputs(head, target.embedding, tokens[-25:], features[-25:])[-1]  # rotations are relative
    assert torch.allclose(state.double(), seen, atol=5e-4)
    everything = head_outputs(head, target.embedding, tokens, features)[-1]
    assert len(tokens) > 70 and not torch.allclose(state.double(), everything, atol=5e-4)


def test_a_prompt_is_read_over_the_following_drafts(tiny: Tiny) -> None:
    """A head drafted from the last few tokens of a long prompt for ever, or older pairs attended to newer ones."""
    target, family = tiny(), "eagle3"
    head = head_for(target, family)
    network = EagleNetwork(head, target, 300)
    watched = Watched(network, make_shape("chain", 1, 1, 1), free(), window=40, max_read=20)
    request = Request("a", tuple(range(30, 90)), SamplingParams(max_tokens=30, ignore_eos=True))
    (expected,) = generated(target, (), [[request]])
    (completion,) = generated(target, [watched], [[request]])
    assert completion.token_ids == expected.token_ids
    are_whole = []
    for tokens, state, _ in watched.seen:
        features = features_of(target, tokens, network.taps).double()
        wanted = head_outputs(head, target.embedding, tokens[-41:], features[-41:])[-1]
        are_whole.append(torch.allclose(state.double(), wanted, atol=5e-4))
    assert not are_whole[0] and all(are_whole[3:]) and len(are_whole) > 6


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
    target = tiny("llama", dtype)
    head = head_for(target, **DIALECTS[name])
    drafter = EagleDrafter(EagleNetwork(head, target, 300), make_shape("dynamic", 4, 4, 5, num_nodes=29), free())
    kept = noted(drafter)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    generated(target, [drafter], [[Request("a", tuple(range(30, 50)), params)]])
    whole = [(tokens, proposals) for tokens, proposals in kept if len(proposals) == 29]
    assert len(whole) > 3
    for tokens, proposals in whole[:3]:
        features = features_of(target, tokens[:-1], drafter.taps).double()

        def log_probs(paths: list[tuple[int, ...]]) -> list[np.ndarray]:
            if paths == [()]:
                states = [head_outputs(head, target.embedding, tokens, features)[-1]]  # noqa: B023
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
    target = tiny()
    network = EagleNetwork(head_for(target, "eagle"), target, 300)
    drafter = EagleDrafter(network, make_shape("dynamic", 3, 3, 3, num_nodes=2), free())
    kept = noted(drafter)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=16, ignore_eos=True)
    drawn = Speculation(rule=AcceptanceRule.WITHOUT_REPLACEMENT)
    with tiny_engine(target, [drafter]) as engine:
        for way, most in ((drawn, 12), (ON, 2)):
            kept.clear()
            engine.generate([Request("a", tuple(range(30, 50)), params, speculation=way)])
            assert engine.num_drafter_failures == 0
            sizes = [len(proposals) for _, proposals in kept]
            assert max(sizes) == most if most == 2 else max(sizes) >= most
            assert all((proposal.draw is not None) == (way is drawn) for _, each in kept for proposal in each)


def test_logits_that_are_no_numbers_are_no_draft(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN from a head reached the tree, or ended the request."""
    target = tiny()
    requests = requests_of(target, PARAMS["T=1"], PROMPTS[:3])
    drafter = drafter_for(target, "eagle3")
    monkeypatch.setattr(drafter.network, "logits", lambda states: np.full((len(states), 200), np.nan, np.float32))
    with tiny_engine(target, [drafter]) as engine:
        completions = engine.generate(requests)
        assert engine.num_drafter_failures > 0
        assert_pool_is_empty(engine)
    assert_equal(completions, truth(target, requests, "T=1"))
    assert total(completions, "num_drafted") == 0


def test_proposals_name_parents_before_children_and_never_more_than_certain(tiny: Tiny) -> None:
    """Path probabilities that rise with depth, or siblings that together exceed their parent."""
    target = tiny()
    drafter = drafter_for(target, "eagle3")
    kept = noted(drafter)
    generated(target, [drafter], [requests_of(target, PARAMS["T=1"])])
    assert any(proposal.parent >= 0 for _, proposals in kept for proposal in proposals)
    for _, proposals in kept:
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
        options = {"num_kv_slots": 400, "max_nodes": 48, "max_num_batched_tokens": 128}
        completions = generated(target, [drafter], [requests], enable_prefix_caching=enable_prefix_caching, **options)
        assert [completion.token_ids for completion in completions] == expected
        assert total(completions, "num_drafted") > 0
        assert not drafter._memories


class Sick(EagleNetwork):
    """No number comes out for one request: the first of three, or the only request."""

    def first(self, token_ids: Any, features: Any, cache: Any, rows: Any) -> torch.Tensor:
        states = super().first(token_ids, features, cache, rows).clone()
        if len(rows.row_start) in (2, 4):
            states[: int(rows.row_start[1])] = torch.nan
        return states


@pytest.mark.parametrize("names", [("sick",), ("sick", "a", "b")])
def test_a_sequence_without_numbers_is_drafted_for_once_and_costs_the_others_nothing(
    tiny: Tiny, names: tuple[str, ...]
) -> None:
    """NaN for a sequence left all of its batch without drafts; or it was asked for in every step, and the head was benched."""
    target = tiny()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    requests = [Request(name, tuple(range(40 + i, 60 + i)), params) for i, name in enumerate(names)]
    network = Sick(head_for(target, "eagle3"), target, 300)
    with tiny_engine(target, [EagleDrafter(network, make_shape("dynamic", 3, 2, 4), free())]) as engine:
        completions = engine.generate(requests)
        assert engine.num_drafter_failures == (len(names) == 1)
    assert [completion.stats.num_drafted > 0 for completion in completions] == [name != "sick" for name in names]
