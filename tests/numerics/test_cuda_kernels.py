"""The Triton kernels under Triton's interpreter, against float64, and whether a row sees its neighbours."""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle_cases as cases
import pytest
import torch
import torch.nn.functional as F
from oracle import fresh_forward
from tiny_target import SENTENCES, Tiny, save_model, target_config, tiny_engine, written
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ragspec.engine import target as target_module
from ragspec.engine.target import Target
from ragspec.numerics.attention import PAGE, AttentionShape
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import DecoderLayer
from ragspec.numerics.self_test import self_test
from ragspec.numerics.torch.int8 import TorchInt8Linear

pytest.importorskip("triton", reason="the extra `kernels` is not installed")

from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from ragspec.numerics.cuda import backend, kernels, tiles
from ragspec.numerics.cuda.backend import CudaBackend, ResidualTritonNorm, TritonInt8Linear

slow = pytest.mark.slow
BACKEND, BACKEND_16 = CudaBackend("cpu", torch.float32), CudaBackend("cpu", torch.bfloat16)


@pytest.fixture(autouse=True)
def _products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with BLAS, where a row's bits depend on its place in the tile; on a GPU they do not.

    It also takes the bits of bfloat16 for integers.
    """
    from triton.runtime import interpreter

    def floats(x: Any) -> np.ndarray:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.data.dtype == np.uint16 else x.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = floats(a).astype(d.data.dtype), floats(b).astype(d.data.dtype)
        products = left[:, :, None] * right  # [M, K, N]: numpy adds along K row by row
        return interpreter.TensorHandle(d.data + products.sum(1, dtype=d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


ROWS = (1, 7, 16, 17, 64, 65, 128, 129)
"""Numbers of rows on both sides of every tile's height and of every border of the table."""
CASES = [
    (64, 64, False, "bfloat16"),
    (40, 96, True, "float32"),
    (130, 37, True, "bfloat16"),
    (48, 300, True, "bfloat16"),
]


@pytest.fixture(params=[1, 2], ids=["whole", "split"])
def _parts(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of any length in so many parts."""
    monkeypatch.setattr(tiles, "_LONG", 10**9 if request.param == 1 else 0)


@pytest.mark.parametrize(("outputs", "inputs", "bias", "dtype"), CASES)
def test_products(_parts: None, outputs: int, inputs: int, bias: bool, dtype: str) -> None:
    """Bug guarded: a mask that lets a neighbour's memory in, an order of K that depends on the number of rows or on the tile."""
    torch.manual_seed(3)
    weight = torch.randn(outputs, inputs).to(getattr(torch, dtype))
    linear = BACKEND.make_linear(weight, torch.randn(outputs).to(weight.dtype) if bias else None)
    rows = torch.randn(max(ROWS) + 5, inputs).to(weight.dtype)
    whole, gated = linear(rows), linear.gated(rows)
    exact = F.linear(rows.double(), weight.double(), None if linear.bias is None else linear.bias.double())
    tolerance = {"atol": 1e-4 if dtype == "float32" else 0.3, "rtol": 1e-2}
    torch.testing.assert_close(whole.double(), exact, **tolerance)
    gate, up = exact.chunk(2, 1)
    torch.testing.assert_close(gated.double(), F.silu(gate) * up, **{**tolerance, "rtol": 0.03})
    for start, size in [*((0, size) for size in ROWS), (5, 1), (5, 16), (5, 65)]:
        assert torch.equal(linear(rows[start : start + size]), whole[start : start + size])
    for start, size in ((0, 1), (0, 16), (0, 17), (5, 64)):
        assert torch.equal(linear.gated(rows[start : start + size]), gated[start : start + size])
    assert not BACKEND._arrivals.any()


def truncated(x: torch.Tensor) -> torch.Tensor:
    """In bfloat16 as the interpreter rounds, toward zero."""
    return (x.float().view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()


def test_products_of_small_whole_numbers_are_exact_in_every_tile(_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an input left out or taken twice, where one tile ends and the next begins or between two parts."""
    torch.manual_seed(6)
    weight, rows = (torch.randint(-1, 2, size).bfloat16() for size in ((150, 300), (133, 300)))
    bias = torch.tensor([128.0, 0.0]).repeat_interleave(75).bfloat16()  # gates so great that silu changes none
    linear, quantised = BACKEND.make_linear(weight, bias), TritonInt8Linear(weight.float())
    exact = (rows.double() @ weight.double().t() + bias.double()).bfloat16()
    gate, up = exact.chunk(2, 1)
    every = {
        tiles.Tile(*tile) for device in tiles.tile_table().values() for weight in device.values() for tile in weight
    }
    assert len(every) >= 5
    for tile in every:
        monkeypatch.setattr(backend, "tile_for", lambda *_, tile=tile: tile)
        assert torch.equal(linear(rows), exact) and torch.equal(linear.gated(rows), truncated(gate.float() * up))
        assert torch.equal(quantised(rows.float()), TorchInt8Linear(weight.float())(rows.float()))


@pytest.mark.parametrize("gated", [False, True])
def test_a_tile_of_other_bits_is_not_written_however_fast(monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    """Bug guarded: the table gets a tile whose plain or gated products were not compared."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "infra" / "gpu")
    tune = importlib.import_module("tune")
    wrong, right, product_by = tiles.Tile(16, 32, 4, 4), tiles.Tile(16, 32, 4, 3), tune.with_tile

    def product(linear: Any, x: torch.Tensor, tile: tiles.Tile) -> torch.Tensor:
        is_gated = getattr(linear, "__name__", "") == "gated"
        return product_by(linear, x, tile) + (tile == wrong and is_gated == gated)

    monkeypatch.setattr(tune, "CHECKED_ROWS", (1, 17))
    monkeypatch.setattr(tune, "candidates", lambda *_: [wrong, right])
    monkeypatch.setattr(tune, "milliseconds", lambda linear, x, tile: float(tile != wrong))
    monkeypatch.setattr(tune, "with_tile", product)
    assert tune.fastest_tile(torch.randn(64, 64).bfloat16(), 1) == right


@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 64, False), (40, 96, True), (130, 37, True)])
def test_int8_products(outputs: int, inputs: int, bias: bool) -> None:
    """Bug guarded: a byte that lost its sign, a mask that lets a neighbour's memory in, a row rounded otherwise than in torch."""
    torch.manual_seed(5)
    weight, rows = torch.randn(outputs, inputs), 5 * torch.randn(133, inputs)
    rows[3] = 0.0
    linear, plain = (
        make(weight, torch.randn(outputs) if bias else None) for make in (TritonInt8Linear, TorchInt8Linear)
    )
    plain.bias = linear.bias
    for size in (1, 33, 133):
        assert torch.equal(linear(rows[:size]), plain(rows[:size]))


@pytest.mark.parametrize("width", [64, 37, 576])
def test_norms(width: int) -> None:
    """Bug guarded: padding counted into the mean, the sum of stream and block lost."""
    torch.manual_seed(4)
    weight = nn.Module()
    weight.weight, weight.variance_epsilon = nn.Parameter(torch.randn(width), requires_grad=False), 1e-5
    x, block = torch.randn(2, 33, width)
    total, normalised = ResidualTritonNorm(weight)(x, block)
    assert torch.equal(total, x + block)
    exact = F.rms_norm((x + block).double(), (width,), weight.weight.double(), 1e-5)
    torch.testing.assert_close(normalised.double(), exact, atol=1e-5, rtol=1e-5)
    assert torch.equal(BACKEND.make_norm(weight)(total), normalised)
    assert torch.equal(ResidualTritonNorm(weight)(x[7:9], block[7:9])[1], normalised[7:9])


SHAPES = [
    AttentionShape(4, 2, 16, 0.25),
    AttentionShape(3, 1, 12, 0.3),
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(2, 2, 48, 0.15, window=21),
    AttentionShape(8, 1, 16, 0.2, window=5, softcap=3.0),
    AttentionShape(4, 4, 8, 0.3, softcap=2.0),
]


def attended(shape: AttentionShape, pool: KvPool, batch: Batch, qkv: torch.Tensor) -> torch.Tensor:
    return backend_of(pool.keys[0].dtype).context(pool, batch.metadata).attend(0, qkv, shape, None).float()


def backend_of(dtype: torch.dtype) -> CudaBackend:
    return BACKEND if dtype == torch.float32 else BACKEND_16


CONTEXTS, DTYPES = (1, 62, 64, 130, 255), (torch.float32, torch.bfloat16)
CASES = [
    pytest.param(shape, CONTEXTS[(i + 2 * k) % 5], DTYPES[(i + k) % 2], marks=[] if i == 4 else slow)
    for i, shape in enumerate(SHAPES)
    for k in range(2)
]


@pytest.mark.parametrize(("shape", "context", "dtype"), CASES)
def test_a_row_is_the_same_as_text_and_as_a_node(
    shape: AttentionShape, context: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a block read for all rows and a block gathered for one row that differ in the last bit; a sibling seen; a
    row that depends on the height of its tile, or on the programs that share its chunks."""
    rng, num_new = np.random.default_rng(context), 4 + 128 * shape.num_kv_heads // shape.num_heads
    width = (context + num_new, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    text = torch.from_numpy(rng.normal(size=width).astype(np.float32)).to(dtype)

    def computed(*sizes: int, num_nodes: int = 0) -> torch.Tensor:
        """The rows of the text's end: after `context` tokens in chunks of these sizes, or as one chain of nodes with decoys."""
        pool = backend_of(dtype).make_pool([shape], 512)
        written(pool, 5)  # so that slots and positions differ
        slots, rows = written(pool, context), []
        for stored, own in zip((pool.keys, pool.values), text[:context, shape.num_heads :].chunk(2, 1), strict=True):
            stored[0].view(512 + PAGE, shape.num_kv_heads, -1)[slots.slots, :, : shape.head_dim] = own
        if num_nodes:
            parents = [-1, *(2 * n if n else 0 for n in range(num_nodes - 1) for _ in range(2))]
            order = [context, *(context + 1 + n for n in range(num_nodes - 1) for _ in range(2))]
            qkv = text[order].clone()
            qkv[1::2] += 1.0  # decoys
            batch = Batch([ScheduledSequence(slots, [0] * len(order), parents)])
            return attended(shape, pool, batch, qkv)[[0, *range(2, len(order), 2)]]
        at = context
        for size in sizes:
            batch = Batch([ScheduledSequence(slots, [0] * size)])
            rows.append(attended(shape, pool, batch, text[at : at + size]))
            batch.keep(())
            at += size
        return torch.cat(rows)

    whole = computed(num_new)
    for sizes in ((1, 1, 1), (2, num_new - 2), (9, num_new - 9)):
        assert torch.equal(computed(*sizes), whole[: sum(sizes)])
    assert torch.equal(computed(num_nodes=5), whole[:5])
    monkeypatch.setattr(backend, "_SPREAD_PAIRS", 0)
    assert torch.equal(computed(1, 1, 1), whole[:3]) and torch.equal(computed(num_nodes=5), whole[:5])
    assert not backend_of(dtype)._arrivals.any()


@pytest.mark.parametrize(
    ("context", "sizes", "window", "is_spread"),
    [
        *(
            (*case, is_spread)
            for case in ((127, (6, 36, 70), 0), (128, (6, 36, 70), 62))
            for is_spread in (True, False)
        ),
        *(pytest.param(4095, (6, 36, 70), 0, is_spread, marks=slow) for is_spread in (True, False)),
        *(pytest.param(n, (6, 36), n, n == 128, marks=slow) for n in (63, 128, 257)),
        pytest.param(5120, (6, 36, 70), 0, False, marks=slow),
        pytest.param(33_000, (6,), 0, True, marks=slow),
    ],
)
def test_contexts_are_added_up_position_by_position(
    context: int, sizes: tuple[int, ...], window: int, is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a position between two chunks, blocks or tiles, of a path or at the window's border, left out or taken twice.
    Scores are equal and values small whole numbers, so every order has the same sums. The rows: a tree's, and a text's in each
    height of tile."""
    monkeypatch.setattr(
        backend, "_SPREAD_PAIRS", 2**14 if is_spread else 0
    )  # each chunk on a program of its own, or all on one
    shape, parents, rng = (
        AttentionShape(4, 2, 16, 0.25, window=window),
        [-1, 0, 0, 1, 1, 3],
        np.random.default_rng(context),
    )
    pool, parts, exact, scheduled = BACKEND_16.make_pool([shape], 3 * (context + 9 * PAGE)), [], [], []
    for num_rows in sizes:
        slots, is_tree = written(pool, context), num_rows == len(parents)
        values = torch.from_numpy(rng.integers(0, 2, (context + num_rows, 2, 16)).astype(np.float32))
        pool.values[0].view(-1, 2, 16)[slots.slots] = values[:context].bfloat16()
        scheduled.append(ScheduledSequence(slots, [0] * num_rows, parents if is_tree else [-1]))
        for row in range(num_rows):
            path = [row]
            while path[-1]:
                path.append(parents[path[-1]] if is_tree else path[-1] - 1)
            seen = [*range(context), *(context + node for node in reversed(path))][-window:]
            exact.append((values[seen].sum(0) / len(seen)).repeat_interleave(2, 0))
        parts.append(values[context:])
    new = torch.cat(parts)
    qkv = torch.cat([new.new_zeros(len(new), 6, 16), new], 1).bfloat16()
    batch = Batch(scheduled)
    heights = {height for _, height in backend.CudaInputs(batch.metadata, pool).num_tiles}
    assert heights == set(backend.TILE_PAIRS[: len(sizes)])
    assert torch.equal(attended(shape, pool, batch, qkv), truncated(torch.stack(exact)).float())


def test_chunks_follow_each_other() -> None:
    """Bug guarded: a position of no chunk or of two."""
    edges = [0, *range(128, 4097, 128), *range(5120, 32_769, 1024), *range(36_864, 131_073, 4096)]
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        assert kernels.num_chunks(start + 1) == kernels.num_chunks(end) == number + 1


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen2", "bfloat16"), ("qwen3", "float32"), ("mistral", "bfloat16"), ("gemma2", "float32")],  # MATRIX: llama
)
@slow
def test_the_self_test_passes(tiny: Tiny, interpreted: Callable[..., Target], kind: str, dtype: str) -> None:
    """Bug guarded: a family whose norm, window or soft cap the kernels take for another."""
    target = interpreted(kind, dtype)
    assert isinstance(target.backend, CudaBackend)
    tested = self_test(target, 18, target.config.numerics_dtype, 1, chunks=(1, 16))
    assert tested.passed, tested.failures
    plain = tiny(kind, f"torch-{dtype}")
    assert not isinstance(plain.backend, CudaBackend)
    tokens = np.arange(26, dtype=np.int32)  # more than a window holds
    ours, theirs = (fresh_forward(each, tokens)[0] for each in (target, plain))
    np.testing.assert_allclose(ours, theirs, atol=(1e-3 if dtype == "float32" else 0.05) * np.abs(theirs).max())


MATRIX = [  # parameters, drafter, dtype, KV slots, tokens a step
    ("greedy", "half", "float32", 80, 64),
    ("T=1", "perfect", "bfloat16", 512, 16),
    ("top-p", "copy", "float32", 512, 23),
    ("top-k, min-p", "random", "bfloat16", 512, 16),
    ("penalties", "wrong", "float32", 512, 64),
    ("T=1", "off", "bfloat16", 64, 23),
]


@pytest.mark.parametrize(("name", "kind", "dtype", "num_kv_slots", "num_tokens"), MATRIX)
@slow
def test_drafts_batches_chunks_and_preemption_change_no_token(
    interpreted: Callable[..., Target], name: str, kind: str, dtype: str, num_kv_slots: int, num_tokens: int
) -> None:
    """Bug guarded: the engine over these kernels decides another token for a draft, a neighbour, a part of a prompt, or after a
    preemption."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = interpreted("llama", dtype, num_hidden_layers=1, **sizes)
    params = cases.params_key(replace(cases.PARAMS[name], max_tokens=6, ignore_eos=True))
    given = cases.requests_of(target, cases.PARAMS[params], SENTENCES[:3])
    requests = [
        replace(each, prompt_ids=each.prompt_ids[: 13 + n]) for n, each in enumerate(given)
    ]  # all outgrow a page
    expected = cases.truth(target, requests, params)
    drafter = None if kind == "off" else cases.drafters(target, expected)[kind]
    with tiny_engine(
        target, [drafter] if drafter else [], num_kv_slots, max_nodes=5, max_num_batched_tokens=num_tokens
    ) as engine:
        completions = engine.generate(requests)
        cases.assert_equal(completions, expected)
        cases.assert_pool_is_empty(engine)
        assert (engine.load().num_preemptions > 0) == (num_kv_slots < 512)
    assert cases.total(completions, "num_drafted") > 0 or num_kv_slots < 512


class Launches(TorchDispatchMode):
    """Counts torch operators that compute something, each a launch on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (function.is_view or "empty" in str(function)):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@slow
def test_a_layer_takes_eight_launches(interpreted: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a kernel or a torch operator more in every layer of every step."""
    target, launches, layers = interpreted("llama", "bfloat16"), Launches(), list[list[str]]()
    run, forward = GridExecutor.__call__, DecoderLayer.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.names.append(self.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, **kwargs)

    def in_layer(self: Any, *args: Any) -> Any:
        launches.names.clear()
        with launches:
            streams = forward(self, *args)
        layers.append(launches.names.copy())
        return streams

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    monkeypatch.setattr(DecoderLayer, "forward", in_layer)
    fresh_forward(target, np.arange(1, dtype=np.int32))
    product, norm = "product_kernel", "norm_kernel"
    layer = [norm, product, "rotate_kernel", "attention_kernel", product, norm, "gated_product_kernel", product]
    assert layers == [layer] * len(layers) != []


@pytest.mark.parametrize("contexts", [(250,), (63, 64, 65, 129)])
@slow
def test_a_step_reads_weights_and_keys_once_and_adds_no_sum_by_atomics(
    interpreted: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, contexts: tuple[int, ...]
) -> None:
    """Bug guarded: a tile or a split that reads weights again, a chunk that reads keys beyond its own; sums in any order."""
    monkeypatch.setattr(tiles, "_LONG", 0)  # all products in two parts
    target, num_bytes, counters = interpreted("llama", "bfloat16"), dict[str, int](), list[int]()
    load, add = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw
    places = {"weights": [x for name, x in target._model.state_dict().items() if "embed" not in name]}

    def counted(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        at, size = pointers.data[mask.data], pointers.get_element_ty().primitive_bitwidth // 8
        for name, tensors in places.items():
            num_read = sum(int(((x.data_ptr() <= at) & (at < x.data_ptr() + x.nbytes)).sum()) for x in tensors)
            num_bytes[name] = num_bytes.get(name, 0) + num_read * size
        return load(self, pointers, mask, *others)

    def noted(self: Any, operation: Any, pointers: Any, *others: Any) -> Any:
        counters.extend(pointers.data.ravel().tolist())
        return add(self, operation, pointers, *others)

    sequences = [ScheduledSequence(written(target.pool, context), [7]) for context in contexts]
    batch, places["keys and values"] = Batch(sequences), [*target.pool.keys, *target.pool.values]
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", noted)
    target.forward(batch.token_ids, batch.metadata, batch.logit_rows)
    least = {
        "weights": sum(x.nbytes for x in places["weights"]),
        "keys and values": sum(n + 1 for n in contexts) * target.token_bytes,
    }
    assert all(least[name] <= num_bytes[name] <= 1.05 * least[name] for name in least), (num_bytes, least)
    arrivals = target.backend._arrivals
    assert counters and all(0 <= at - arrivals.data_ptr() < arrivals.nbytes for at in counters)


@pytest.fixture
def interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Target]:
    """`interpreted(kind, dtype)`: a target on the cuda backend, whose kernels the interpreter runs on the CPU."""

    def load(kind: str, dtype: str, **sizes: int) -> Target:
        backend, folder = CudaBackend("cpu", getattr(torch, dtype)), save_model(kind, tmp_path / "model", **sizes)
        with monkeypatch.context() as patch:  # targets that other tests share are loaded after this one
            patch.setattr(target_module, "make_backend", lambda *_: backend)
            return Target.load(target_config(str(folder), f"torch-{dtype}"), num_kv_slots=512)

    return load
