"""A head's layer as one compiled step is the layer of products and norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.heads.layer import DecoderLayer, HeadAttention, HeadLayer, make_layer, prepare
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.backend import LayerModule
from ragspec.numerics.cpu.backend import CpuBackend
from ragspec.numerics.cpu.int8 import Int8Layer
from ragspec.numerics.cpu.int8_weights import WeightArena

WIDTH, INPUTS, BETWEEN, ROWS = 64, 128, 96, 40
SLOTS = np.random.default_rng(1).permutation(64).astype(np.int32)


def layer_of(shape: AttentionShape, *, has_norms: bool, has_biases: bool) -> DecoderLayer:
    """The same random weights at every call."""
    attention = HeadAttention(
        shape, INPUTS, WIDTH, 1e-5, qkv_bias=has_biases, output_bias=has_biases, qk_norm=has_norms
    )
    layer, generator = DecoderLayer(attention, BETWEEN, 1e-5), torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(old.shape, generator=generator) / 8 + float("norm" in name)
        for name, old in layer.state_dict().items()
    }
    prepare(layer, weights, torch.device("cpu"), torch.float32)
    return layer


@pytest.mark.parametrize(("has_norms", "has_biases", "window"), [(False, False, 0), (True, False, 5), (True, True, 0)])
def test_the_compiled_layer_is_its_products_and_norms(
    has_norms: bool, has_biases: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, bias, rotation or window was left out; a row's bits depended on other rows; or keys were another layer's."""
    generator = torch.Generator().manual_seed(3)
    shape = AttentionShape(4, 2, 16, 0.25, window)
    angles = torch.rand(ROWS + 8, 16, generator=generator) * 6
    stream, x = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, INPUTS, generator=generator)

    def layer() -> tuple[CpuBackend, LayerModule]:
        backend = CpuBackend(WeightArena(), kv_dtype=np.uint16)
        weights = layer_of(shape, has_norms=has_norms, has_biases=has_biases)
        return backend, make_layer(weights, (angles.cos(), angles.sin()), backend, 1)

    def outputs(backend: CpuBackend, made: LayerModule) -> list[torch.Tensor]:
        """Of all rows; of the last one alone; of a node below them."""
        pool, end = backend.make_pool([shape, shape], 64), slice(ROWS - 1, ROWS)
        whole, alone = (DraftBatch([ScheduledDraft(SLOTS[:ROWS], n, ROWS, SLOTS[ROWS:])]) for n in (ROWS, 1))
        found = [made(stream, x, backend.context(pool, whole.chains()))]
        pool.keys[0], pool.values[0] = 1, 1  # another layer's
        found.append(made(stream[end], x[end], backend.context(pool, alone.chains())))
        return [*found, made(stream[end], x[end], backend.context(pool, alone.level([[(2,)]])))]

    compiled = layer()
    monkeypatch.setattr(CpuBackend, "make_layer", lambda *given: None)
    plain = layer()
    assert isinstance(compiled[1], Int8Layer) and isinstance(plain[1], HeadLayer)
    with torch.inference_mode():
        found, wanted = outputs(*compiled), outputs(*plain)
    for own, theirs in zip(found, wanted, strict=True):
        assert torch.linalg.norm(own - theirs) < 0.003 * torch.linalg.norm(theirs)
    assert torch.equal(found[0][-1:], found[1]) and torch.equal(wanted[0][-1:], wanted[1])


def test_an_arena_in_use_takes_no_more_weights() -> None:
    """Kernels read the new weights behind the end of the arrays."""
    arena = WeightArena()
    arena.add_product(torch.ones(16, 16))
    assert len(arena.arrays[0]) == 256
    with pytest.raises(AssertionError):
        arena.add_product(torch.ones(16, 16))
