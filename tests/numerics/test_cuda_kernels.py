"""The Triton kernels under Triton's interpreter, against float64, and whether a row sees its neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drafters import Half
from oracle import decode
from tiny_target import tiny_engine
from torch import nn

from ragspec.config import TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine import target as target_module
from ragspec.engine.target import Target
from ragspec.numerics.attention import PAGE, AttentionShape
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.self_test import self_test
from ragspec.numerics.torch.int8 import TorchInt8Linear, quantised_rows

pytest.importorskip("triton", reason="the extra `kernels` is not installed")

from ragspec.numerics.cuda.backend import CudaBackend, ResidualTritonNorm, TritonInt8Linear, TritonLinear

slow = pytest.mark.slow
SIZES = (1, 2, 7, 16, 33, 64)
BACKEND = CudaBackend("cpu", torch.float32)


@pytest.fixture(autouse=True)
def _products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with BLAS, where a row's bits depend on its place in the tile; on a GPU they do not.

    It also takes the bits of bfloat16 for integers.
    """
    from triton.runtime import interpreter

    def floats(x: Any) -> np.ndarray:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.data.dtype == np.uint16 else x.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        product = np.einsum("mk,kn->mn", floats(a), floats(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(
    ("outputs", "inputs", "bias", "dtype"),
    [(64, 64, False, torch.bfloat16), (40, 96, True, torch.float32), (130, 37, True, torch.bfloat16)],
)
def test_products(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    """Bug guarded: a mask that lets a neighbour's memory in, an order of K that depends on the number of rows."""
    torch.manual_seed(3)
    weight = torch.randn(outputs, inputs).to(dtype)
    linear = TritonLinear(weight, torch.randn(outputs).to(dtype) if bias else None)
    rows = torch.randn(70, inputs).to(dtype)
    whole = linear(rows)
    exact = F.linear(rows.double(), weight.double(), None if linear.bias is None else linear.bias.double())
    torch.testing.assert_close(whole.double(), exact, atol=1e-4 if dtype is torch.float32 else 0.2, rtol=1e-2)
    for size in SIZES:
        assert torch.equal(linear(rows[:size]), whole[:size])
        assert torch.equal(linear(rows[5 : 5 + size]), whole[5 : 5 + size])


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (40, 96), (130, 37)])
def test_int8_products(outputs: int, inputs: int) -> None:
    """Bug guarded: a byte that lost its sign, a mask that lets a neighbour's memory in, sums that are not whole."""
    torch.manual_seed(5)
    weight, rows = torch.randn(outputs, inputs), 5 * torch.randn(33, inputs)
    linear, plain = TritonInt8Linear(weight), TorchInt8Linear(weight)
    numbers = quantised_rows(F.pad(rows, (0, -inputs % 16))).numbers
    assert torch.equal(linear._sums(numbers), (numbers.long() @ linear.weight.long().t())[:, :outputs])
    assert torch.equal(linear(rows), plain(rows))


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


def attended(shape: AttentionShape, pool: KvPool, batch: Batch, qkv: torch.Tensor) -> np.ndarray:
    return BACKEND.context(pool, batch.metadata).attend(0, qkv, shape, None).numpy()


CASES = list(itertools.product(SHAPES, (1, 62, 63, 64, 130)))
QUICK = [(SHAPES[4], 62)]


@pytest.mark.parametrize(
    ("shape", "context"), [*QUICK, *(pytest.param(*case, marks=slow) for case in CASES if case not in QUICK)]
)
def test_a_row_is_the_same_as_text_and_as_a_node(shape: AttentionShape, context: int) -> None:
    """Bug guarded: a block read for all rows and a block gathered for one row that differ in the last bit; a sibling seen."""
    rng, num_new = np.random.default_rng(context), 9
    width = (context + num_new, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    text = torch.from_numpy(rng.normal(size=width).astype(np.float32))

    def computed(*sizes: int, tree: bool = False) -> np.ndarray:
        """The rows of the text's end: after `context` tokens in chunks of these sizes, or as one chain of nodes with decoys."""
        pool = BACKEND.make_pool([shape], 512)
        other, slots, rows = SequenceSlots(pool), SequenceSlots(pool), []
        other.keep(*other.reserve(5), [0, 1, 2, 3, 4])  # so that slots and positions differ
        slots.keep(*slots.reserve(context), list(range(context)))
        for stored, own in zip((pool.keys, pool.values), text[:context, shape.num_heads :].chunk(2, 1), strict=True):
            stored[0].view(512 + PAGE, shape.num_kv_heads, -1)[slots.slots, :, : shape.head_dim] = own
        if tree:
            parents = [-1, *(2 * n if n else 0 for n in range(num_new - 1) for _ in range(2))]
            order = [context, *(context + 1 + n for n in range(num_new - 1) for _ in range(2))]
            qkv = text[order].clone()
            qkv[1::2] += 1.0  # decoys
            batch = Batch([ScheduledSequence(slots, [0] * len(order), parents)])
            return attended(shape, pool, batch, qkv)[[0, *range(2, len(order), 2)]]
        at = context
        for size in sizes:
            batch = Batch([ScheduledSequence(slots, [0] * size)])
            rows.append(attended(shape, pool, batch, text[at : at + size]))
            batch.sequences[0].keep()
            at += size
        return np.concatenate(rows)

    whole = computed(num_new)
    for sizes in ((1,) * num_new, (2, 7), (4, 5)):
        np.testing.assert_array_equal(computed(*sizes), whole)
    np.testing.assert_array_equal(computed(tree=True), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
@slow
def test_the_self_test_passes(interpreted: Callable[..., Target], kind: str, dtype: str) -> None:
    """Bug guarded: a family whose norm, window or soft cap the kernels take for another."""
    target = interpreted(kind, dtype)
    assert isinstance(target.backend, CudaBackend)
    tested = self_test(target, 18, target.config.numerics_dtype, 1)
    assert tested.passed, tested.failures
    plain = target_of_torch(kind, dtype)
    tokens = np.arange(20, dtype=np.int32)
    ours, theirs = (logits_of(each, tokens) for each in (target, plain))
    np.testing.assert_allclose(ours, theirs, atol=(1e-3 if dtype == "float32" else 0.05) * np.abs(theirs).max())


@slow
def test_drafts_change_no_token(interpreted: Callable[..., Target]) -> None:
    """Bug guarded: the engine over these kernels decides another token for a draft than without."""
    target = interpreted("llama", "float32")
    for params in (SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=4)):
        prompts = [tuple(range(5 + i, 30 + 3 * i)) for i in range(2)]
        expected = [decode(target, prompt, params).token_ids for prompt in prompts]
        requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
        answers = {(request.id, 0): tokens for request, tokens in zip(requests, expected, strict=True)}
        with tiny_engine(target, [Half(answers)], max_nodes=5) as engine:
            assert [c.token_ids for c in engine.generate(requests)] == expected


def logits_of(target: Target, tokens: np.ndarray) -> np.ndarray:
    slots = SequenceSlots(target.pool)
    batch = Batch([ScheduledSequence(slots, tokens)])
    logits = target.forward(tokens, batch.metadata, np.arange(len(tokens), dtype=np.int32))
    slots.release()
    return logits


@pytest.fixture
def interpreted(tiny: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Target]]:
    """`interpreted(kind, dtype)`: a target on the cuda backend, whose kernels the interpreter runs on the CPU."""

    def load(kind: str, dtype: str) -> Target:
        config: TargetConfig = tiny(kind, f"torch-{dtype}").config
        with monkeypatch.context() as patch:
            backend = CudaBackend("cpu", getattr(torch, dtype))
            patch.setattr(target_module, "make_backend", lambda *_: backend)
            return Target.load(config, num_kv_slots=512)

    global target_of_torch
    target_of_torch = lambda kind, dtype: tiny(kind, f"torch-{dtype}")  # noqa: E731
    yield load


target_of_torch: Callable[..., Target]
