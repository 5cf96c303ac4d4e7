"""The torch backend beside the CPU's: the same noise and tokens, and nothing large leaves the device."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drafters import add_node
from drafting.medusa_heads import position_drafter
from head_parts import drafter_for, free, head_for
from oracle import fresh_forward
from oracle_cases import generated
from pydantic import ValidationError
from tiny_target import SENTENCES, Tiny, save_model, target_config, tiny_engine

from ragspec.config import TargetConfig
from ragspec.core import CopySource, Passage, Request, SamplingParams, Segment, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.draft_model import ModelDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.eagle.drafter import EagleDrafter
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.growing import beam
from ragspec.drafting.growing import drafter as growing_drafter
from ragspec.drafting.growing.draft import make_shape
from ragspec.drafting.lookahead import LookaheadDrafter
from ragspec.drafting.self_draft import SelfDrafter
from ragspec.engine import target as target_module
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.numerics import batch
from ragspec.numerics.cpu.int8 import Int8Linear
from ragspec.numerics.noise import bits, gumbel, output_key
from ragspec.numerics.self_test import self_test
from ragspec.numerics.torch import attention, backend, graphs, sampling, transfer
from ragspec.numerics.torch.attention import tree_sum
from ragspec.numerics.torch.backend import TiledLinear
from ragspec.numerics.torch.int8 import TorchInt8Linear, quantised_rows
from ragspec.numerics.torch.sampling import TorchLogits, gumbel_rows
from ragspec.rag.citations import quote_grammar
from ragspec.speculation import AcceptanceRule, Speculation
from ragspec.tree import DraftTree
from ragspec.verification.probabilities import KeyedRandom, RandomStream, row_probs, token_probs
from ragspec.verification.sampling import KeyedSampler, TokenCounts, logprob

SEEDS = (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)


def test_the_noise_is_the_same() -> None:
    """A shift that repeats the sign, or a product that is not taken modulo 2**64: other text on another device."""
    for seed, index in itertools.product(SEEDS, (0, 3, 2**31)):
        key = output_key(seed, 1, index)
        ours = gumbel_rows(torch.tensor([(int(key) ^ 2**63) - 2**63]), torch.arange(1000))[0].numpy()
        np.testing.assert_allclose(ours, [gumbel(bits(key, np.uint64(v))) for v in range(1000)], rtol=1e-14)


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1e-9),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.8),
    SamplingParams(temperature=0.9, top_p=0.5),
    SamplingParams(temperature=2.0, min_p=0.2, top_k=40),
    SamplingParams(
        temperature=0.8,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={3: 5.0, 9: -100.0},
        min_tokens=2,
        top_p=0.9,
    ),
    SamplingParams(temperature=1.0, top_k=500, top_p=1e-9),
    SamplingParams(temperature=3.0, top_k=90, top_p=0.999, min_p=1e-6),
    SamplingParams(temperature=1.0, min_p=1.0),
]


def some_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    tree = DraftTree(root_token=5)
    for _ in range(num_nodes):
        add_node(tree, int(rng.integers(0, len(tree))), int(rng.integers(0, 96)))
    return tree


def test_ten_thousand_rows_get_the_same_tokens() -> None:
    """Ties broken by another rank, a penalty of a node's path lost, an end token allowed too early, rows mixed up."""
    rng, num_rows = np.random.default_rng(4), 0
    for round_number in range(40):
        draws, expected, parts = [], [], []
        for params in PARAMS:
            request = Request("r", tuple(rng.integers(0, 96, 9).tolist()), params)
            seed, output = int(rng.integers(0, 2**63)) * 2 + 1, [4, 4, 7][: round_number % 4]
            sampler = KeyedSampler(request, seed, round_number, (0, 1), output)
            tree = some_tree(rng, 31)
            # coarse steps: many logits are equal
            logits = (rng.normal(size=(len(tree), 96)) * 3).round(round_number % 3).astype(np.float32)
            draws += sampler.draws(tree)
            parts.append(logits)
            for node in range(len(tree)):
                path = [tree.token_ids[n] for n in tree.ancestors(node)[1:]]
                walker = KeyedSampler(request, seed, round_number, (0, 1), output)
                walker.take(path)
                expected.append(walker(logits[node]))
        rows = np.concatenate(parts)
        num_rows += len(rows)
        assert TorchLogits(torch.from_numpy(rows)).sample(draws) == expected
        some = slice(7, 9)
        assert TorchLogits(torch.from_numpy(rows[some])).sample(draws[some]) == expected[some]
    assert num_rows >= 10_000


def test_a_large_vocabulary_is_not_sorted_and_gets_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that differ in the last digit alone, zeros of both signs, excluded tokens, masks, or ties at the border counted
    twice or not; a sort of 3,000 tokens in every row."""
    rng, draws, expected, rows = np.random.default_rng(8), [], [], []
    for number, params in enumerate(PARAMS[3:] * 20):
        row = rng.normal(size=3000).astype(np.float32) * np.float32(10.0 ** (number % 5 - 2))
        row[rng.integers(0, 3000, 900)] = (0.0, -0.0, 1.0, -np.inf)[number % 4]
        row[rng.integers(0, 3000, 400)] = np.nextafter(row[0], np.float32(np.inf))
        sampler = KeyedSampler(Request("r", (3, 4), params), number, 0, (0, 1), [5])
        rows.append(row)
        draws += sampler.draws(DraftTree(root_token=5))
        expected.append(sampler(row))
    logits, widths, sort = TorchLogits(torch.from_numpy(np.stack(rows))), list[int](), torch.sort
    monkeypatch.setattr(torch, "sort", lambda x, **options: widths.append(x.shape[1]) or sort(x, **options))
    assert logits.sample(draws) == expected
    best = logits.best(draws, 4).tolist()
    (found,) = logits.log_probs([2], [7], 6)
    first_of_finite = [(row[0], token) for row, token in zip(best, expected, strict=True) if row[-1]]
    assert len(first_of_finite) > 100 and all(first == token for first, token in first_of_finite)
    assert [v for v, _ in found.top] == [v for v, _ in logprob(rows[2], 7, 6).top]
    assert widths == [4, 6]


def test_rows_without_a_draw_change_no_other_row() -> None:
    """A sequence that samples on the host shifted the tokens of its neighbours, or its NaN spread."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 96)).astype(np.float32)
    logits[1] = np.nan
    sampler = KeyedSampler(Request("r", (1,), SamplingParams(temperature=1.0, top_p=0.9)), 7, 0, (), [])
    draw = sampler.draws(DraftTree(root_token=1))[0]
    tokens = TorchLogits(torch.from_numpy(logits)).sample([draw, None, draw])
    for row in (0, 2):
        one = KeyedSampler(Request("r", (1,), SamplingParams(temperature=1.0, top_p=0.9)), 7, 0, (), [])
        assert tokens[row] == one(logits[row])


def test_sums_and_products_do_not_see_their_neighbours() -> None:
    """A sum whose order depends on the padding, a product whose bits depend on the number of rows."""
    x = torch.randn(5, 37, generator=torch.manual_seed(2))
    for width in (37, 38, 63, 64, 200):
        padded = torch.nn.functional.pad(x, (0, width - 37))
        assert torch.equal(tree_sum(padded), tree_sum(x))
    np.testing.assert_allclose(tree_sum(x)[:, 0].numpy(), x.double().sum(1).numpy(), rtol=1e-5)
    linear = TiledLinear(torch.randn(40, 37), torch.randn(40))
    rows = torch.randn(200, 37)
    whole = linear(rows)
    np.testing.assert_allclose(whole, torch.nn.functional.linear(rows, linear.weight, linear.bias), atol=1e-4)
    for size in (1, 2, 7, 16, 33, 64, 65):
        assert torch.equal(linear(rows[:size]), whole[:size])
        assert torch.equal(linear(rows[100 : 100 + size]), whole[100 : 100 + size])


@pytest.mark.parametrize("params", PARAMS)
def test_tokens_and_probabilities_are_the_cpus(params: SamplingParams) -> None:
    """A log-probability after the warps, a rank that counts itself."""
    rng, request = np.random.default_rng(3), Request("r", tuple(range(9)), params)
    for seed in range(30):
        row = (rng.normal(size=96) * 2).astype(np.float32)
        logits = TorchLogits(torch.from_numpy(row[None]))
        host, device = (KeyedSampler(request, seed, 0, (0, 1), [4, 4, 7]) for _ in range(2))
        token = host(row)
        (sampled,) = logits.sample(device.draws(DraftTree(root_token=5)))
        assert sampled == token
        (ours,), theirs = logits.log_probs([0], [token], 5), logprob(row, token, 5)
        assert (ours.token_id, [v for v, _ in ours.top]) == (token, [v for v, _ in theirs.top])
        np.testing.assert_allclose(
            [ours.logprob, *(p for _, p in ours.top)], [theirs.logprob, *(p for _, p in theirs.top)]
        )
        counts = TokenCounts((1, 2), [5])
        probs, exact = row_probs(logits, 0, params, counts), token_probs(row, params, counts)
        np.testing.assert_allclose([probs[v] for v in range(96)], exact, atol=1e-14)
        assert [probs.rank(v) for v in (0, 50)] == [
            int((exact > exact[v]).sum() + (exact[:v] == exact[v]).sum()) for v in (0, 50)
        ]
        assert exact[KeyedRandom(seed, 0, 0, RandomStream.VERIFY).categorical(probs)] > 0.0


@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 64, False), (40, 96, True), (130, 37, True)])
def test_int8_sums_are_whole(outputs: int, inputs: int, bias: bool) -> None:
    """A byte that lost its sign, a sum that left 32 bits or was rounded, a scale of another row."""
    weight, rows = torch.randn(outputs, inputs), 5 * torch.randn(70, inputs)
    rows[3], rows[4] = 0.0, 1e4
    linear = TorchInt8Linear(weight, torch.randn(outputs) if bias else None)
    numbers = quantised_rows(torch.nn.functional.pad(rows, (0, -inputs % 16))).numbers
    assert torch.equal(linear._sums(numbers), (numbers.long() @ linear.weight.long().t())[:, :outputs])
    whole = linear(rows)
    apart = torch.linalg.norm(
        whole - Int8Linear(weight, linear.bias)(rows), dim=1
    )  # the CPU's kernels round to larger steps
    assert (apart <= 0.03 * torch.linalg.norm(whole, dim=1)).all()
    for size in (1, 2, 7, 16, 33, 64):
        assert torch.equal(linear(rows[5 : 5 + size]), whole[5 : 5 + size])


def test_an_int8_target_is_bitwise_and_near_the_cpus(tiny: Tiny) -> None:
    """Weights quantised twice or not at all. Our activations are rounded to smaller steps than the CPU's."""
    ours, cpus, text = tiny("llama", "torch-int8"), tiny("llama", "int8"), np.arange(5, 45, dtype=np.int32)
    assert self_test(ours, 90, ours.config.numerics_dtype, 1).passed
    logits = [fresh_forward(target, text)[0] for target in (ours, cpus, tiny("llama", "torch-float32"))]
    to_cpu, to_float = (np.linalg.norm(logits[0] - other) / np.linalg.norm(other) for other in logits[1:])
    assert 0 < to_float < 0.03 and to_cpu < 0.1


def test_padded_rows_change_no_bit(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded row wrote into a sequence's slot or was seen by another row; or padding gave every forward a shape of its own."""
    target, shapes = tiny("llama", "torch-float32"), list[tuple[int, ...]]()
    run = graphs.TieredForwards.run

    def noted(self: Any, token_ids: np.ndarray, inputs: Any, *others: Any) -> Any:
        shapes.append((inputs.num_rows, inputs.num_seen, inputs.num_positions))
        return run(self, token_ids, inputs, *others)

    monkeypatch.setattr(graphs.TieredForwards, "run", noted)
    padded = self_test(target, 150, "float32", 1)
    num_padded, num_forwards = len({*shapes}), len(shapes)
    shapes.clear()
    monkeypatch.setattr(backend, "row_tier", lambda num_rows, captures: 0)
    exact = self_test(target, 150, "float32", 1)
    assert padded == exact and padded.passed
    assert num_padded < len({*shapes}) and len(shapes) == num_forwards


def test_a_replayed_forward_reads_its_buffer_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that the host put into a kernel's arguments stayed that of the forward that was captured."""
    target = tiny("llama", "torch-float32")
    expected, num_replays = self_test(target, 90, "float32", 1), 0

    def capture(self: Any, packed: torch.Tensor, inputs: Any, compute: Any) -> Any:
        """In place of a graph: the captured call, which the host does not prepare again."""
        hidden, tapped = graphs._split(packed, inputs, compute)

        def replay() -> None:
            nonlocal num_replays
            num_replays += 1
            hidden.copy_(graphs._split(packed, inputs, compute)[0])

        return graphs._Captured(SimpleNamespace(replay=replay), packed, (hidden, tapped))

    monkeypatch.setattr(graphs.TieredForwards, "_capture", capture)
    monkeypatch.setattr(target.backend._forwards, "captures", True)
    assert self_test(target, 90, "float32", 1) == expected
    assert num_replays > 2 * len(target.backend._forwards._graphs) > 0
    target.reset_pool(2048)
    assert not target.backend._forwards._graphs


class OnDevice(torch.Tensor):
    """Stands for a tensor of another device: the host cannot read it but through `to_host`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in FORBIDDEN:
            raise AssertionError(f"the host reads device memory by {name}")
        return super().__torch_function__(function, types, args, kwargs or {})


FORBIDDEN = {
    *("numpy", "cpu", "item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__", "__iter__"),
    *("data_ptr", "equal", "allclose", "nonzero", "unique"),
}


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes by direction, and how often the host waits; every tensor of the device is an `OnDevice`."""
    counted = {"to_device": 0, "to_host": 0, "waits": 0}

    def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        counted["to_device"] += array.nbytes
        return torch.from_numpy(array).as_subclass(OnDevice)

    def to_host(tensor: torch.Tensor) -> np.ndarray:
        counted["to_host"] += tensor.nbytes
        counted["waits"] += 1
        assert isinstance(tensor, OnDevice), "a result of the step was made on the host"
        return tensor.as_subclass(torch.Tensor).numpy()

    def queued_to_host(tensor: torch.Tensor) -> torch.Tensor:
        counted["to_host"] += tensor.nbytes
        return tensor.as_subclass(torch.Tensor)

    for module in (attention, backend, batch, beam, growing_drafter, sampling, target_module, transfer):
        for name, stand_in in (("to_device", to_device), ("to_host", to_host), ("queued_to_host", queued_to_host)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    yield counted


DRAFTERS = ("copy", "eagle", "eagle3", "medusa", "hydra", "hydra++", "draft_model", "lookahead", "confidence")
RULES = ("chain", "traversal", "typical", "top_beta")
KINDS = ("greedy", "top-p", "penalties", "log-probabilities", "schema", "quotes", *RULES)
PAIRS = [
    pytest.param(name, drafter, marks=[] if j == i % len(DRAFTERS) and i % 3 else pytest.mark.slow)
    for (i, name), (j, drafter) in itertools.product(enumerate(KINDS), enumerate(DRAFTERS))
]


def some_drafter(name: str, target: Target, folder: Path) -> Drafter:
    if name == "copy":
        return CopyDrafter(target.tokenizer, target.eos_ids)
    if name == "lookahead":
        return LookaheadDrafter()
    if name == "self":
        return SelfDrafter(target, [0], make_shape("dynamic", 3, 2, 4), free())
    if name == "confidence":
        network = EagleNetwork(head_for(target, "eagle"), target, 300)
        return EagleDrafter(network, make_shape("dynamic", 3, 2, 4, num_nodes=6), free())
    if name == "draft_model":
        small = Target.load(target_config(str(save_model("llama", folder, num_hidden_layers=1)), "torch-float32"), 512)
        return ModelDrafter(small, target.vocab_size, make_shape("dynamic", 3, 2, 4), free(), PrefixCache(small.pool))
    return drafter_for(target, name) if "eagle" in name else position_drafter(target, folder, name)


@pytest.mark.parametrize(("name", "drafter"), PAIRS)
def test_only_ids_cross(tiny: Tiny, crossings: dict[str, int], tmp_path: Path, name: str, drafter: str) -> None:
    """Logits, hidden states or keys went to the host: at 150,000 tokens of vocabulary the bus is slower than the model."""
    params = {"greedy": PARAMS[0], "penalties": PARAMS[7]}.get(name, PARAMS[5])
    schema = '{"enum": ["the mill and the river", "the bridge"]}' if name == "schema" else ""
    logprobs = 2 if name == "log-probabilities" else None
    params = replace(params, max_tokens=12, seed=3, logprobs=logprobs, json_schema=schema)
    rule = AcceptanceRule(name) if name in RULES else AcceptanceRule.KEYED
    speculation = Speculation(rule=rule, lossy=name in ("typical", "top_beta"))
    target = tiny("llama", "torch-float32")
    sources = tuple(CopySource(SourceKind.PASSAGE, text, str(i)) for i, text in enumerate([*SENTENCES, schema]))
    prompts = [tuple(target.tokenizer(text).input_ids) for text in SENTENCES[:3]]
    mark = tuple(target.tokenizer('"', add_special_tokens=False).input_ids)
    quotable = [Passage("", 0, text, 0, len(text)) for text in SENTENCES]
    quotes = {"grammar": quote_grammar(quotable), "segment": Segment(mark)} if name == "quotes" else {}
    requests = [Request(f"r{i}", p, params, sources, speculation=speculation, **quotes) for i, p in enumerate(prompts)]
    completions = generated(target, [some_drafter(drafter, target, tmp_path)], [requests], max_nodes=6)
    num_rows = sum(len(c.token_ids) + c.stats.num_drafted + c.stats.num_prompt_tokens for c in completions)
    assert all(c.token_ids for c in completions) and sum(c.stats.num_drafted for c in completions)
    has_head = drafter not in ("copy", "lookahead")
    children = 2 * (3 + 3 + 1) * 8 if has_head else 0  # of a head's node: ids, scores, whether these are numbers
    log_probs = 6 * 8 if params.logprobs else 0
    one_row_of_logits = 4 * target.vocab_size
    numbers = 0 if rule is AcceptanceRule.KEYED else one_row_of_logits // 4  # that the rule reads of its rows
    candidates = 8 if drafter == "lookahead" else 0
    assert 0 < crossings["to_host"] <= (8 + children + log_probs + numbers + candidates) * num_rows
    assert crossings["to_device"] < num_rows * one_row_of_logits * (1.25 if has_head else 0.5)


@pytest.mark.parametrize(
    "drafter",
    [
        *("eagle", "draft_model"),
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("eagle3", "medusa", "hydra", "hydra++", "self", "confidence")
        ),
    ],
)
def test_a_step_waits_twice(
    tiny: Tiny, crossings: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """A draft waited for the device at each level; or its nodes read other paths than they would level by level."""
    target = tiny("llama", "torch-float32")
    texts = [target.tokenizer(text).input_ids for text in SENTENCES[:3]]
    params = [replace(PARAMS[i], max_tokens=(14, 9, 5)[n], seed=3) for n, i in enumerate((0, 5, 7))]
    requests = [Request(f"r{n}", tuple(text), params[n]) for n, text in enumerate(texts)]
    found, waits, expected = [], [], []
    for level_by_level in (False, True):
        if level_by_level:
            monkeypatch.setattr(growing_drafter, "needs_host", lambda drafts: True)
        made, lists, num_steps = some_drafter(drafter, target, tmp_path), [], 0
        monkeypatch.setattr(made, "propose", lambda *args, of=made.propose, to=lists: to.append(of(*args)) or to[-1])
        crossings["waits"] = 0
        with tiny_engine(target, [made], fixed_nodes=6, max_num_batched_tokens=256) as engine:
            completions = engine.generate(requests)
            assert engine.num_drafter_failures == 0
            num_steps = engine.load().num_steps
        # cells of acceptance, not their tables, which are another drafter's; products of paths differ in their last bit
        drafts = [
            [(p.token_id, p.parent, round(p.path_prob, 12), p.origin.feedback.cell) for draft in step for p in draft]
            for step in lists
        ]
        found.append((drafts, [c.token_ids for c in completions]))
        waits.append(crossings["waits"])
        expected.append(num_steps + sum(any(draft) for draft in lists))
    assert found[0] == found[1]
    assert waits[0] == expected[0] < waits[1]


def test_a_read_of_device_memory_is_seen() -> None:
    """The test above cannot fail."""
    tensor = torch.ones(2).as_subclass(OnDevice)
    for read in (tensor.numpy, tensor.cpu, (tensor + 1).sum().item, tensor[0].__bool__):
        with pytest.raises(AssertionError, match="the host reads"):
            read()


@pytest.mark.parametrize("settings", [{"backend": "cpu", "device": "cuda"}, {"backend": "cuda"}, {"device": "tpu"}])
def test_impossible_combinations_are_refused(settings: dict[str, Any]) -> None:
    """A target that would silently run elsewhere, or in other numbers, than configured."""
    with pytest.raises(ValidationError):
        TargetConfig(**settings)


def test_the_default_target_runs_unquantised_on_torch() -> None:
    """`quantization: auto` asked a backend without int8 products for them."""
    assert TargetConfig().is_int8
    assert not TargetConfig(backend="torch").is_int8
    assert TargetConfig(device="cuda:1").backend_name == "cuda"
    assert TargetConfig(device="cuda:1").numerics_dtype == TargetConfig(device="cuda").numerics_dtype
    assert TargetConfig(device="cuda").numerics_dtype != TargetConfig(backend="torch").numerics_dtype


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("torch-bfloat16", 2)])
def test_the_pool_takes_no_more_than_its_bytes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, dtype: str, itemsize: int
) -> None:
    """An index on the same device found no memory left, or half of the memory given was never used; or the target did not load,
    because the pool was sized as if FAISS's index and scratch were not there."""
    config = tiny("llama", dtype).config
    slot_bytes = 2 * 2 * 2 * 16 * itemsize  # layers, keys and values, KV heads, head_dim
    target = Target.load(config, 2048, max_kv_bytes=100 * slot_bytes)
    assert target.pool.num_slots == 96
    assert Target.load(config, 2048, max_kv_bytes=10**9).pool.num_slots == 2048
    with pytest.raises(ModelError, match="max_kv_bytes"):
        Target.load(config, 2048, max_kv_bytes=15 * slot_bytes)
    for num_free, num_slots in ((100, 80), (1000, 96)):
        monkeypatch.setattr(target_module, "free_bytes", lambda device, free=num_free: free * slot_bytes)
        target.reset_pool(2048)
        assert target.pool.num_slots == num_slots
    reserved = 40 * slot_bytes  # heads found no memory after the pool
    monkeypatch.setattr(target_module, "free_bytes", lambda device: 100 * slot_bytes)
    assert Target.load(config, 2048, reserved_bytes=reserved).pool.num_slots == 48
    monkeypatch.setattr(target_module, "free_bytes", lambda device: slot_bytes)
    with pytest.raises(ModelError, match="free memory"):
        target.reset_pool(2048)
