"""What every backend promises: the same tokens with drafts as without, exact kernels, the CPU's samples, and a quiet bus."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ragspec.config import EngineConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.evaluation.suite import engine_over
from ragspec.evaluation.suites.backends.models import KV_SLOTS
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.backend import Backend
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.speculation import Speculation
from ragspec.tree import DraftTree
from ragspec.verification.sampling import KeyedSampler

_SAMPLINGS = {
    "T=0": SamplingParams(max_tokens=24),
    "T=1": SamplingParams(max_tokens=24, temperature=1.0, seed=1),
    "top-p": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=40, seed=2),
    "penalties": SamplingParams(max_tokens=24, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=3),
}
_NUM_SAMPLED, _SAMPLED_VOCAB = 10_000, 4096
TEXT = "The quick brown fox jumps over the lazy dog, and the river rises in the northern hills past the old mill. "
_ROWS = (1, 2, 7, 16, 33, 64)
_SHAPES = (
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(2, 2, 48, 0.15, window=21),
    AttentionShape(8, 1, 16, 0.2, softcap=3.0),
)


def identical_share(target: Target) -> float:
    """Share of outputs that are the same with drafts and in a batch as alone without drafts."""
    ids = tuple(target.tokenizer(TEXT).input_ids)
    source = (CopySource(SourceKind.PASSAGE, TEXT, "0"),)
    requests = [
        Request(f"{name} {cut}", ids[cut:] + ids[:12], params, source)
        for name, params in _SAMPLINGS.items()
        for cut in (0, 5)
    ]
    outputs = []
    with engine_over(
        Engine, target, EngineConfig(max_kv_tokens=KV_SLOTS), CostTable({1: [1.0, 1.001]}, (1, 64))
    ) as engine:
        outputs.append([completion.token_ids for completion in engine.generate(requests)])
        plain = [Request(r.id, r.prompt_ids, r.params, speculation=Speculation(drafters=())) for r in requests]
        outputs.append([engine.generate([request])[0].token_ids for request in plain])
    return float(np.mean([ours == theirs for ours, theirs in zip(*outputs, strict=True)]))


def equal_tokens_share(device: str) -> float:
    """Share of rows whose token, sampled on the device, is the token that the CPU samples."""
    rng, equal = np.random.default_rng(0), 0
    per_way = _NUM_SAMPLED // len(_SAMPLINGS)
    for params in _SAMPLINGS.values():
        rows = (rng.normal(size=(per_way, _SAMPLED_VOCAB)) * 3).astype(np.float32)
        request = Request("r", tuple(range(40)), params)
        samplers = [KeyedSampler(request, seed, 0, (0,), [3, 3, 5]) for seed in range(per_way)]
        draws = [sampler.draws(DraftTree(root_token=0))[0] for sampler in samplers]
        tokens = TorchLogits(torch.from_numpy(rows).to(device)).sample(draws)
        equal += sum(sampler(row) == token.token_id for sampler, row, token in zip(samplers, rows, tokens, strict=True))
    return equal / (per_way * len(_SAMPLINGS))


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
            batch.sequences[0].keep()
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


def crossing_bytes(target: Target) -> dict[str, float]:
    """Bytes that the host reads of the device and sends there in steps with drafts, a row."""
    ids, source = tuple(target.tokenizer(TEXT).input_ids), (CopySource(SourceKind.PASSAGE, TEXT, "0"),)
    requests = [Request(name, ids, params, source) for name, params in _SAMPLINGS.items()]
    reads, config = HostReads(), EngineConfig(max_kv_tokens=KV_SLOTS)
    with engine_over(Engine, target, config, CostTable({1: [1.0, 1.001]}, (1, 64))) as engine:
        engine.between_steps(partial(reads.__enter__))  # modes belong to a thread: the engine's
        completions = engine.generate(requests)
        engine.between_steps(partial(reads.__exit__, None, None, None))
    num_rows = sum(len(c.token_ids) + c.stats.num_drafted + c.stats.num_prompt_tokens for c in completions)
    return {"read, bytes a row": reads.read_bytes / num_rows, "sent, bytes a row": reads.sent_bytes / num_rows}
