"""A head's layer as one compiled step is the layer of products and norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.heads.layer import HeadLayer, make_layer
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.backend import LayerModule
from ragspec.numerics.cpu.backend import CpuBackend
from ragspec.numerics.cpu.int8 import Int8Layer
from ragspec.numerics.cpu.int8_weights import WeightArena

WIDTH, INPUTS, BETWEEN, ROWS = 64, 128, 96, 40
SLOTS = np.random.default_rng(1).permutation(64).astype(np.int32)


def weights_of(generator: torch.Generator, *, has_norms: bool, has_biases: bool) -> dict[str, torch.Tensor]:
    sizes = {"q": (64, INPUTS), "k": (32, INPUTS), "v": (32, INPUTS), "o": (WIDTH, 64)}
    shapes = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
    shapes |= {"mlp.gate_proj": (BETWEEN, WIDTH), "mlp.up_proj": (BETWEEN, WIDTH), "mlp.down_proj": (WIDTH, BETWEEN)}
    tensors = {f"{name}.weight": torch.randn(size, generator=generator) / 8 for name, size in shapes.items()}
    if has_biases:
        tensors |= {f"self_attn.{name}_proj.bias": torch.randn(sizes[name][0], generator=generator) for name in "qkvo"}
    norms = {"post_attention_layernorm": WIDTH} | (
        {"self_attn.q_norm": 16, "self_attn.k_norm": 16} if has_norms else {}
    )
    return tensors | {f"{name}.weight": 1 + torch.randn(size, generator=generator) / 3 for name, size in norms.items()}


@pytest.mark.parametrize(("has_norms", "has_biases", "window"), [(False, False, 0), (True, False, 5), (True, True, 0)])
def test_the_compiled_layer_is_its_products_and_norms(
    has_norms: bool, has_biases: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, bias, rotation or window was left out; a row's bits depended on other rows; or keys were another layer's."""
    generator = torch.Generator().manual_seed(3)
    weights = weights_of(generator, has_norms=has_norms, has_biases=has_biases)
    shape = AttentionShape(4, 2, 16, 0.25, window)
    angles = torch.rand(ROWS + 8, 16, generator=generator) * 6
    stream, x = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, INPUTS, generator=generator)

    def layer() -> tuple[CpuBackend, LayerModule]:
        backend = CpuBackend(WeightArena(), kv_dtype=np.uint16)
        return backend, make_layer(weights, shape, 1e-5, (angles.cos(), angles.sin()), backend, 1)

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
