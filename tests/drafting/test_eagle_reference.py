"""The naive EAGLE heads are what the papers say, with transformers' Llama layer as the third opinion."""

from __future__ import annotations

import pytest
import torch
from drafting.eagle_reference import eagle3_outputs, eagle_outputs, random_head
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ragspec.drafting.eagle.layout import HeadCheckpoint

TOKENS = [3, 60, 7, 7, 21, 0, 44]


def inputs_of(head: HeadCheckpoint) -> tuple[Tensor, Tensor]:
    """Random embedding of the target and features of every token."""
    generator = torch.Generator().manual_seed(1)
    width = head.config.num_features
    return torch.randn(64, 32, generator=generator), 3 * torch.randn(len(TOKENS), width, generator=generator)


def outputs_of(head: HeadCheckpoint, embed: Tensor, tokens: list[int], features: Tensor) -> Tensor:
    run = eagle_outputs if head.config.family == "eagle" else eagle3_outputs
    return run(head, embed, tokens, features)


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
    found = outputs_of(head, embed, TOKENS, features)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # transformers rotates and norms in float32
