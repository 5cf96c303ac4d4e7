"""What every backend of tensors promises: exact kernels, the CPU's samples, and a quiet bus between host and device.

On a GPU both backends run (`infra/gpu/check.sh tests`); `tests/numerics/test_torch_backend.py` has the CPU's cases. That drafts
change no token there is `test_gpu_engine.py`'s.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipelines.benchmarks.gpu import TEXT, Shape, engine_over, random_target
from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.target import Target
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.backend import Backend
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.self_test import self_test
from ragspec.numerics.threads import num_processors
from ragspec.numerics.torch.backend import TorchBackend, TreeNorm
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.tree import DraftTree
from ragspec.verification.sampling import KeyedSampler

SMALL = Shape("small", hidden=128, layers=2, heads=4, kv_heads=2, inner=256, vocab=49_152)
SAMPLINGS = {
    "T=0": SamplingParams(max_tokens=24),
    "T=1": SamplingParams(max_tokens=24, temperature=1.0, seed=1),
    "top-p": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=40, seed=2),
    "penalties": SamplingParams(max_tokens=24, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=3),
}
SAMPLED_VOCAB = 4096
MAX_READ_BYTES = 16.0
"""A row brings its token and one number to the host."""
_ROWS = (1, 2, 7, 16, 33, 64)
_SHAPES = (
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(2, 2, 48, 0.15, window=21),
    AttentionShape(8, 1, 16, 0.2, softcap=3.0),
)


BACKENDS = [
    pytest.param("torch", id="torch on a GPU", marks=pytest.mark.gpu),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=BACKENDS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """A small target of random weights on one backend."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield random_target(SMALL, TargetConfig(device="cuda", backend=request.param))


def test_rows_do_not_see_each_other(target: Target) -> None:
    """A row's bits depend on the rows beside it: then drafts change tokens."""
    config = target.config
    assert self_test(target, target.max_context_tokens, config.numerics_dtype, num_processors()).passed


def test_the_device_samples_the_cpu_s_tokens(target: Target) -> None:
    """A token that the device drew differs from the keyed sample of the same row."""
    device = target.config.device
    rng, per_way = np.random.default_rng(0), 2_500
    for params in SAMPLINGS.values():
        rows = (rng.normal(size=(per_way, SAMPLED_VOCAB)) * 3).astype(np.float32)
        request = Request("r", tuple(range(40)), params)
        samplers = [KeyedSampler(request, seed, 0, (0,), [3, 3, 5]) for seed in range(per_way)]
        draws = [sampler.draws(DraftTree(root_token=0))[0] for sampler in samplers]
        tokens = TorchLogits(torch.from_numpy(rows).to(device)).sample(draws)
        assert tokens == [sampler(row) for sampler, row in zip(samplers, rows, strict=True)]


def test_kernels_are_exact_in_any_number_of_rows(target: Target) -> None:
    """Products, norms or attention are off, or their bits depend on the number of rows."""
    assert kernels_exact(target.backend)


def test_kernels_on_the_cpu_are_exact_and_one_that_is_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product, norm or attention of plain torch is off; or the check of kernels cannot fail."""
    norm = TreeNorm.forward
    assert kernels_exact(TorchBackend("cpu", torch.float32))
    monkeypatch.setattr(TreeNorm, "forward", lambda self, x: norm(self, x) * 1.001)
    assert not kernels_exact(TorchBackend("cpu", torch.float32))


def test_only_token_ids_and_a_few_numbers_cross_the_bus(target: Target) -> None:
    """A row of logits travels to the host in every step."""
    ids, source = tuple(target.tokenizer(TEXT).input_ids), (CopySource(SourceKind.PASSAGE, TEXT, "0"),)
    requests = [Request(name, ids, params, source) for name, params in SAMPLINGS.items()]
    reads = HostReads()
    with engine_over(target, EngineConfig(max_kv_tokens=4096), CostTable({1: [1.0, 1.001]}, (1, 64))) as engine:
        engine.between_steps(partial(reads.__enter__))  # modes belong to a thread: the engine's
        completions = engine.generate(requests)
        engine.between_steps(partial(reads.__exit__, None, None, None))
    num_rows = sum(len(c.token_ids) + c.stats.num_drafted + c.stats.num_prompt_tokens for c in completions)
    assert 0.0 < reads.read_bytes / num_rows <= MAX_READ_BYTES
    assert reads.sent_bytes / num_rows < 2 * target.vocab_size


def kernels_exact(backend: Backend) -> bool:
    """Whether products, norms and attention are float64's but for rounding, and a row's bits do not see the number of rows."""
    torch.manual_seed(3)
    return all(
        [
            *(_products_exact(backend, *sizes) for sizes in ((64, 64), (130, 96), (576, 1536))),
            *(_norm_exact(backend, width) for width in (64, 576)),
            *(_attention_exact(backend, shape, context) for shape in _SHAPES for context in (1, 63, 64, 130)),
        ]
    )


def _products_exact(backend: Backend, outputs: int, inputs: int) -> bool:
    weight, rows = (torch.randn(size, inputs, device=backend.device) for size in (outputs, 70))
    linear = backend.make_linear(weight, torch.randn(outputs, device=backend.device))
    whole, bias = linear(rows), linear.bias
    assert isinstance(bias, Tensor)
    exact = F.linear(rows.double(), weight.double(), bias.double())
    same = [torch.equal(linear(rows[5 : 5 + size]), whole[5 : 5 + size]) for size in _ROWS]
    return all(same) and torch.allclose(whole.double(), exact, atol=1e-4 * inputs**0.5, rtol=1e-4)


def _norm_exact(backend: Backend, width: int) -> bool:
    norm: Any = nn.Module()
    norm.weight, norm.variance_epsilon = torch.randn(width, device=backend.device), 1e-5
    rows = torch.randn(33, width, device=backend.device)
    exact = F.rms_norm(rows.double(), (width,), norm.weight.double(), 1e-5)
    return torch.allclose(backend.make_norm(norm)(rows).double(), exact, atol=1e-5, rtol=1e-5)


def _attention_exact(backend: Backend, shape: AttentionShape, num_context: int) -> bool:
    """The last rows of a text in one forward and one by one, against float64."""
    text = torch.randn(num_context + 9, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, device=backend.device)
    exact = _attention(text, shape)[num_context:]
    found = []
    for sizes in ((9,), (1,) * 9):
        pool, at, rows = backend.make_pool([shape], 256), 0, []
        slots = SequenceSlots(pool)
        for size in (num_context, *sizes):
            batch = Batch([ScheduledSequence(slots, [0] * size)])
            rows.append(backend.context(pool, batch.metadata).attend(0, text[at : at + size], shape, None))
            batch.keep(())
            at += size
        found.append(torch.cat(rows[1:]))
    return torch.equal(*found) and torch.allclose(found[0].double(), exact, atol=1e-4, rtol=1e-4)


def _attention(text: Tensor, shape: AttentionShape) -> Tensor:
    """Shapes: [T, heads + 2 KV heads, D] -> float64 [T, heads, D]."""
    counts, group = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], shape.num_heads // shape.num_kv_heads
    queries, keys, values = text.double().split(counts, 1)
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * shape.scale
    scores = torch.tanh(scores / shape.softcap) * shape.softcap if shape.softcap else scores
    at = torch.arange(len(text), device=text.device)
    hidden = at[None] > at[:, None]
    hidden = hidden | (at[None] <= at[:, None] - shape.window) if shape.window else hidden
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, -torch.inf), -1), values)


class HostReads(TorchFunctionMode):
    """Counts the bytes of tensors that the thread brings to the host or sends from there."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = self.sent_bytes = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__"):
            self.read_bytes += args[0].nbytes
        # as `to_device` calls it; devices do not matter on a CPU
        if name == "to" and (kwargs or {}).get("non_blocking"):
            self.sent_bytes += args[0].nbytes
        return function(*args, **kwargs or {})
