"""A head's layer as one compiled step is the layer of products and norms; the tests' own EAGLE layer is transformers'.

A head's memory of one sequence: the states that wait are right, and keep little memory of other sequences.
"""

import numpy as np
import pytest
import torch
from drafting.eagle_heads import random_head
from drafting.eagle_reference import head_outputs
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ragspec.drafting.eagle.drafter import HeadMemory, SlotMemory
from ragspec.drafting.eagle.layout import HeadCheckpoint
from ragspec.drafting.growing.draft import DraftBatch, ScheduledDraft
from ragspec.drafting.heads.layer import DecoderLayer, HeadAttention, HeadLayer, make_layer, prepare
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.backend import LayerModule
from ragspec.numerics.cpu.backend import CpuBackend
from ragspec.numerics.cpu.int8 import Int8Layer
from ragspec.numerics.cpu.int8_weights import WeightArena
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

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


TOKENS = [3, 60, 7, 7, 21, 0, 44]


def inputs_of(head: HeadCheckpoint) -> tuple[Tensor, Tensor]:
    """A random embedding of the target, and features of every token."""
    generator = torch.Generator().manual_seed(1)
    width = head.config.num_features
    return torch.randn(64, 32, generator=generator), 3 * torch.randn(len(TOKENS), width, generator=generator)


def llama_layer(head: HeadCheckpoint, wide: int) -> LlamaDecoderLayer:
    """transformers' layer with the head's weights, without its first norm and with projections of another width."""
    config = head.config
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(llama, 0).double()
    layer.input_layernorm = nn.Identity()
    for name in ("q_proj", "k_proj", "v_proj"):
        num_rows = getattr(layer.self_attn, name).out_features
        setattr(layer.self_attn, name, nn.Linear(wide, num_rows, bias=False).double())
    prefix = "layers.0." if config.family == "eagle" else "midlayer."
    own = {name.removeprefix(prefix): tensor.double() for name, tensor in head.tensors.items() if prefix in name}
    layer.load_state_dict({name: own[name] for name in layer.state_dict()})
    return layer


def attended_by_llama(head: HeadCheckpoint, layer: LlamaDecoderLayer, inputs: Tensor) -> Tensor:
    num_pairs = len(inputs)
    mask = torch.full((num_pairs, num_pairs), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    rotations = LlamaRotaryEmbedding(layer.self_attn.config)(inputs[None], torch.arange(num_pairs)[None])
    with torch.no_grad():
        return layer.self_attn(inputs[None], rotations, mask)[0][0]


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_the_layer_is_transformers_layer(family: str) -> None:
    """Rotation, head groups, scale or gate of the reference wrong: everything tested against it is wrong alike."""
    head = random_head(family, num_kv_heads=2, rope_theta=700.0)
    embed, features = inputs_of(head)
    tensors = {name: tensor.double() for name, tensor in head.tensors.items()}
    embeddings, features = embed.double()[TOKENS[1:]], features.double()[:-1]
    if family == "eagle":
        layer = llama_layer(head, 32)
        residual = inputs = torch.cat([embeddings, features], 1) @ tensors["fc.weight"].T
    else:
        layer = llama_layer(head, 64)
        residual = features @ tensors["fc.weight"].T
        pairs = (("input_layernorm", embeddings), ("hidden_norm", residual))
        norms = [nn.functional.rms_norm(rows, (32,), tensors[f"midlayer.{name}.weight"], 1e-5) for name, rows in pairs]
        inputs = torch.cat(norms, 1)
    attended = residual + attended_by_llama(head, layer, inputs)
    with torch.no_grad():
        wanted = attended + layer.mlp(layer.post_attention_layernorm(attended))
    found = head_outputs(head, embed, TOKENS, features)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # transformers rotates and norms in float32


SHAPE = AttentionShape(1, 1, 8, 1.0)


def make_cache(pool: KvPool, num_own_slots: int) -> KvPool:
    return KvPool([SHAPE], pool.num_slots + max(16, num_own_slots))


@pytest.mark.parametrize(("read_every", "counts"), [(0, [1] * 9 + [20]), (7, [1] * 9 + [20]), (40, [1, 2]), (15, [6])])
def test_states_wait_without_those_of_other_sequences(read_every: int, counts: list[int]) -> None:
    """One sequence that is not drafted for kept every step of a full batch in memory, for a whole window; or its states were
    taken for those of other positions where others between them had been read."""
    pool = KvPool([SHAPE], 1024)
    slots = SequenceSlots(pool)
    memory = HeadMemory(slots, SlotMemory(pool, make_cache, 1), window=256, max_read=40)
    rng, unread, step = np.random.default_rng(0), list[int](), 0
    while memory.end < 900:
        step += 1
        count, start = int(rng.choice(counts)) if memory.end else 300, memory.end
        states = torch.full((100 + count, 5), -1.0)  # of 100 other sequences, too
        states[:count] = torch.arange(start, start + count)[:, None]
        memory.append((states[:count], 2 * states[:count]))
        slots.keep(*slots.reserve(count), list(range(count)))
        unread = [at for at in [*unread, *range(start, start + count)] if at >= memory.end - 256]
        parts = {part.untyped_storage().data_ptr(): part.untyped_storage() for p in memory._pieces for part in p.states}
        assert sum(len(part) > 2 * 4 * 5 * 300 or len(part) == 4 * 5 * (100 + count) for part in parts.values()) <= 32
        assert sum(map(len, parts.values())) <= 2 * 4 * 5 * (256 + 300 + 16 * 120)
        assert memory.num_waiting == len(unread)
        if read_every and step % read_every == 0:
            pairs, expected = memory.pairs(list(range(1, 1000))), unread[-40:]
            assert pairs.positions.tolist() == expected and pairs.next_tokens == [at + 2 for at in expected]
            assert pairs.features.tolist() == [[float(at)] * 5 + [2.0 * at] * 5 for at in expected]
            memory.read(pairs)
            assert memory.num_waiting == 0  # the last pair is read
            unread = unread[:-40]
