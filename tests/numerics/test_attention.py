"""The attention kernel against the textbook, the norms against torch, and the model through both against transformers."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import fresh_forward
from safetensors.torch import load_file, save_file
from tiny_target import ARCHITECTURES, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ragspec.config import TargetConfig
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape, make_tiles
from ragspec.numerics.backend import Backend
from ragspec.numerics.batch import NODES, Batch, ScheduledSequence
from ragspec.numerics.cpu.backend import CpuBackend
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.norms import ResidualNorm, RootMeanSquareNorm
from ragspec.numerics.torch.backend import TorchBackend


def textbook(q: np.ndarray, k: np.ndarray, v: np.ndarray, shape: AttentionShape) -> np.ndarray:
    """One query over its visible keys, oldest first, in float64. Shapes: [heads, D], [T, KV heads, D] twice."""
    group = shape.num_heads // shape.num_kv_heads
    if shape.window:
        k, v = k[-shape.window :], v[-shape.window :]
    out = []
    for head in range(shape.num_heads):
        scores = k[:, head // group].astype(np.float64) @ q[head].astype(np.float64) * shape.scale
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        weights = np.exp(scores - scores.max())
        out.append(weights @ v[:, head // group] / weights.sum())
    return np.array(out)


SHAPES = [
    AttentionShape(4, 2, 16, 0.25),
    AttentionShape(3, 3, 8, 0.35),
    AttentionShape(8, 1, 16, 0.2, window=5),
    AttentionShape(4, 2, 16, 0.25, window=1),
    AttentionShape(2, 1, 12, 0.3, softcap=2.0),
]
BACKENDS = {
    "cpu": CpuBackend(),
    "cpu-bfloat16": CpuBackend(kv_dtype=np.uint16),
    "torch": TorchBackend("cpu", torch.float32),
}
PAIRS = [
    pytest.param(shape, backend, id=f"{name}-{i}", marks=pytest.mark.slow if (i + j) % 2 else [])
    for (i, shape), (j, (name, backend)) in itertools.product(enumerate(SHAPES), enumerate(BACKENDS.items()))
]


@pytest.mark.parametrize(("shape", "backend"), PAIRS)
def test_ragged_trees_over_a_scattered_cache(shape: AttentionShape, backend: Backend) -> None:
    """A row sees a sibling, misses an ancestor, or counts its window in slots instead of positions."""
    rng = np.random.default_rng(8)
    pool = backend.make_pool([shape], 2048)
    sequences = [SequenceSlots(pool) for _ in range(3)]
    history: list[list[tuple[np.ndarray, np.ndarray]]] = [[], [], []]
    for _ in range(8):
        sizes = [(int(rng.integers(1, 40)), int(rng.integers(0, 12))) for _ in sequences]
        trees = [[-1, *(int(rng.integers(0, n)) for n in range(1, m + 1))] for _, m in sizes]
        batch = Batch(
            [ScheduledSequence(s, [0] * (n + m), t) for s, (n, m), t in zip(sequences, sizes, trees, strict=True)]
        )
        num = len(batch.metadata.slots)
        qkv = rng.normal(size=(num, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)).astype(np.float32)
        if backend.make_pool([shape], 16).keys[0].dtype == np.uint16:
            stored = qkv[:, shape.num_heads :]
            stored[:] = torch.from_numpy(stored).bfloat16().float().numpy()
        out = backend.context(pool, batch.metadata).attend(0, torch.from_numpy(qkv), shape, None).numpy()
        row, kept = 0, list[list[int]]()
        for b, ((num_chain, num_nodes), parents) in enumerate(zip(sizes, trees, strict=True)):
            first = row
            new = [np.split(r[shape.num_heads :], 2) for r in qkv[row : row + num_chain + num_nodes]]
            for i in range(num_chain + num_nodes):
                seen = [*history[b], *(tuple(kv) for kv in new[: min(i + 1, num_chain)])]
                path: list[int] = []
                node = i - num_chain + 1
                while node > 0:
                    path.insert(0, node)
                    node = parents[node]
                seen += [tuple(new[num_chain - 1 + n]) for n in path]
                k, v = (np.stack([kv[j] for kv in seen]) for j in (0, 1))
                expected = textbook(qkv[first + i, : shape.num_heads], k, v, shape)
                np.testing.assert_allclose(out[first + i], expected, atol=2e-5)
                row += 1
            keep = [n for n in range(1, num_nodes + 1) if parents[n] == 0][:1]
            kept.append(keep)
            history[b] += [tuple(new[i]) for i in range(num_chain)] + [tuple(new[num_chain - 1 + n]) for n in keep]
        batch.keep(*kept)


def test_stored_numbers_are_the_nearest_bfloat16() -> None:
    """Keys cut off instead of rounded, or a NaN that becomes a number and hides a broken model."""
    shape, rng = AttentionShape(1, 1, 16, 1.0), np.random.default_rng(3)
    backend = CpuBackend(kv_dtype=np.uint16)
    pool = backend.make_pool([shape], 16)
    qkv = rng.normal(size=(8, 3, 16)).astype(np.float32)
    qkv[0, 1, :4] = np.nan, np.inf, -np.inf, np.finfo(np.float32).max
    qkv[0, 1, 4:6] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # halfway: to even
    batch = Batch([ScheduledSequence(SequenceSlots(pool), [0] * 8)])
    backend.context(pool, batch.metadata).attend(0, torch.from_numpy(qkv.copy()), shape, None)
    slots = batch.metadata.slots
    keys = pool.keys[0].reshape(16, 16).T[slots]  # one page: [head_dim, 16 slots]
    values = pool.values[0].reshape(16, 16)[slots]
    for stored, own in ((keys, qkv[:, 1]), (values, qkv[:, 2])):
        found = torch.from_numpy(stored.copy()).view(torch.bfloat16).float()
        np.testing.assert_array_equal(found.numpy(), torch.from_numpy(own).bfloat16().float().numpy())


def test_tiles_cover_every_row_once() -> None:
    """A row computed by nobody keeps what memory held before."""
    tiles = make_tiles(np.array([0, 1, 1, 34, 98], np.int32))
    rows = [row for first, last, _ in tiles for row in range(first, last)]
    assert rows == list(range(98))
    assert all(0 < last - first <= 32 for first, last, _ in tiles)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "cpu") for kind in ARCHITECTURES),
        *(pytest.param(k, "torch", marks=[pytest.mark.slow] * (k != "gemma2")) for k in ARCHITECTURES),
    ],
)
def test_logits_are_those_of_transformers(
    kind: str, backend: Literal["cpu", "torch"], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Replaced layers compute something else: a bias, norm, window, rotation, scale or soft cap lost, rows of another head."""
    folder = save_model(kind, tmp_path_factory.mktemp(kind) / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    target = Target.load(TargetConfig(model=str(folder), backend=backend, quantization="none"), num_kv_slots=512)
    tokens = np.random.default_rng(1).integers(0, target.vocab_size, 120).astype(np.int32)
    with torch.inference_mode():
        theirs = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    ours = fresh_forward(target, tokens)[0]
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert (ours.argmax(-1) == theirs.argmax(-1)).mean() > 0.99


def test_a_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """transformers makes up what is missing at random, and the answers were noise."""
    folder = save_model("llama", tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj"):
        Target.load(TargetConfig(model=str(folder)), num_kv_slots=64)


def test_attention_the_engine_does_not_know_is_refused(tmp_path: Path) -> None:
    """Chunked attention hides positions through a mask that the kernel never sees."""
    folder = save_model("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention", "chunked_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="chunked_attention"):
        Target.load(TargetConfig(model=str(folder)), num_kv_slots=64)


def test_a_rotation_that_follows_the_length_is_refused(tmp_path: pytest.TempPathFactory) -> None:
    """Dynamic rotary scaling gives a token other keys in a longer text, so nothing could be promised."""
    folder = save_model(
        "llama", tmp_path / "model", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    )
    with pytest.raises(ModelError, match="dynamic"):
        Target.load(TargetConfig(model=str(folder)), num_kv_slots=64)


def make_norm(width: int, dtype: torch.dtype) -> ResidualNorm:
    weight = nn.Parameter(torch.rand(width, dtype=dtype) + 0.5)
    return ResidualNorm(RootMeanSquareNorm(SimpleNamespace(weight=weight, variance_epsilon=1e-5)))


def rows(num_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    x, block = (torch.randn(num_rows, width, generator=generator).to(dtype) for _ in range(2))
    return x, block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64, 172, 320])
@torch.inference_mode()
def test_it_adds_and_normalises(width: int, dtype: torch.dtype) -> None:
    norm = make_norm(width, dtype)
    x, block = rows(5, width, dtype)
    kept = x.clone()
    total, normalised = norm(x, block)
    assert torch.equal(x, kept), "the stream given is not written to"
    assert torch.equal(total, x + block)
    expected = F.rms_norm(total, (width,), norm.norm.weight, 1e-5)
    torch.testing.assert_close(normalised, expected)
    torch.testing.assert_close(norm.norm(total), expected)
    torch.testing.assert_close(norm.norm(total.t().contiguous().t()), expected)


@torch.inference_mode()
def test_a_row_is_the_same_in_any_company() -> None:
    norm = make_norm(320, torch.float32)
    x, block = rows(70, 320, torch.float32)
    together = norm(x, block)[1]
    for row in (0, 1, 33, 69):
        assert torch.equal(norm(x[row : row + 1], block[row : row + 1])[1][0], together[row])
        assert torch.equal(norm.norm(x[row : row + 1])[0], norm.norm(x)[row])


@torch.inference_mode()
def test_a_row_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(2, 64)
    assert torch.equal(make_norm(64, torch.float32)(zeros, zeros)[1], zeros)


def test_each_sequence_gets_its_own_rows_and_no_other_prompts_memory() -> None:
    """Rows of another sequence or of a node that was not accepted; or a decoding sequence kept a whole prompt in memory."""
    pool = KvPool([AttentionShape(1, 1, 8, 1.0)], 256)
    parents = (-1, 0, 1, 0)
    decoding = [ScheduledSequence(SequenceSlots(pool), range(4), parents) for _ in range(2)]
    prompt = ScheduledSequence(SequenceSlots(pool), range(100), wants_logits=False)
    batch = Batch([decoding[0], prompt, decoding[1]])
    states = {3: torch.arange(108.0)[:, None].repeat(1, 5), 7: -torch.arange(108.0)[:, None]}
    tokens = {NODES: torch.arange(108)}
    first, middle, last = batch.features(states | tokens, [[1, 2], [], [3]])
    for own, rows in ((first, [0, 1, 2]), (middle, [*range(4, 104)]), (last, [104, 107])):
        assert own[3].tolist() == [[row] * 5 for row in rows] and own[7].flatten().tolist() == [-row for row in rows]
        assert own[3].untyped_storage().nbytes() <= max(len(rows), 5) * 5 * 4
    assert last[NODES].tolist() == [[n, parents[n], 104 + n] for n in range(4)]
    assert Batch([ScheduledSequence(SequenceSlots(pool), [1])]).features({}, [[]]) == [{}]
