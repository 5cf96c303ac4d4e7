"""Structured initialisation: a small Llama that copies before its first training step.

Owns the starting weights of the reference target; never trains. The residual stream is split into
`[token identity | token 1 back | token 2 back | token 3 back | free use]`.

Layer 0 holds shift heads. Their query and key weights are zero; their *biases* alone make the rotary score peak at a
fixed distance (query bias = key bias rotated by that distance), so each head reads the token 1, 2 or 3 places back and
writes its compressed identity to the part of the stream that belongs to that distance.

Layer 1 holds match heads. The query reads the last three tokens (current, 1 back, 2 back), the key reads the three
tokens before its own position, both through random orthonormal projections placed in the slowly rotating rotary
dimensions. The score is highest where the last three tokens occurred before; value and output copy the identity of the
token found there towards the tied output embedding.

Needs `attention_bias=True`, a large `rope_theta` (slow dimensions), tied embeddings and a head dimension of 64.
Source: induction heads, Olsson et al. 2022 (arXiv 2209.11895), built here by hand.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

HEAD_DIM = 64
ROPE_THETA = 500_000.0
NUM_PAIRS = HEAD_DIM // 2
SHIFT_DISTANCES = (1, 2, 3)
SHIFT_SHARPNESS = 9.0
SHIFT_PAIRS = 16
"""Only the fast half of the rotary pairs tells distances of a few tokens apart; the rest would enlarge every score."""
MATCH_GAIN = 3.0
MATCH_PAIRS = ((26, 32), (20, 26), (14, 20))
"""Rotary pairs [first, last) that compare the newest token, the one before it, and the one before that."""


class StreamLayout(NamedTuple):
    """Where the residual stream keeps what; half-open column ranges `[start, start + size)`."""

    identity: int
    shifted: int

    @property
    def num_blocks(self) -> int:
        """Heads it takes to copy the whole identity."""
        return -(-self.identity // HEAD_DIM)

    def start(self, distance: int) -> int:
        """First column of the copy of the token `distance` places back (0 = the token itself)."""
        return 0 if distance == 0 else self.identity + (distance - 1) * self.shifted


def stream_layout(hidden_size: int) -> StreamLayout:
    """Two fifths for the identity, three twentieths for each shifted copy, the rest free."""
    return StreamLayout(identity=hidden_size * 2 // 5 // 2 * 2, shifted=min(HEAD_DIM, hidden_size * 3 // 20))


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random matrix with orthonormal rows. Shape: [rows, columns], rows <= columns."""
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0]
    return basis.T


@torch.no_grad()
def structured_init(model: LlamaForCausalLM, seed: int = 1) -> None:
    """Overwrite the embedding and the attention of layers 0 and 1 with copying circuits."""
    generator = torch.Generator().manual_seed(seed)
    layout = stream_layout(model.config.hidden_size)
    compress = orthonormal(layout.shifted, layout.identity, generator)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, 0.02, generator=generator)
    embedding[:, : layout.identity].normal_(0.0, 0.3, generator=generator)
    for index in (0, 1):
        attention = model.model.layers[index].self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            linear.weight.mul_(0.3)
            linear.bias.zero_()
    _write_shift_heads(model.model.layers[0].self_attn, layout, compress, ROPE_THETA)
    _write_match_heads(model.model.layers[1].self_attn, layout, compress, generator)


def _write_shift_heads(attention: Any, layout: StreamLayout, compress: Tensor, theta: float) -> None:
    heads_per_group = attention.num_key_value_groups
    angles = theta ** (-torch.arange(SHIFT_PAIRS).float() / NUM_PAIRS)
    attention.q_proj.weight[: len(SHIFT_DISTANCES) * HEAD_DIM] = 0.0
    for head, distance in enumerate(SHIFT_DISTANCES):
        q_start, kv_start = head * HEAD_DIM, head // heads_per_group * HEAD_DIM
        q_half = q_start + NUM_PAIRS
        attention.q_proj.bias[q_start : q_start + SHIFT_PAIRS] = SHIFT_SHARPNESS * torch.cos(angles * distance)
        attention.q_proj.bias[q_half : q_half + SHIFT_PAIRS] = -SHIFT_SHARPNESS * torch.sin(angles * distance)
        attention.k_proj.weight[kv_start : kv_start + HEAD_DIM] = 0.0
        attention.k_proj.bias[kv_start : kv_start + SHIFT_PAIRS] = SHIFT_SHARPNESS
        attention.v_proj.weight[kv_start : kv_start + HEAD_DIM] = 0.0
        attention.v_proj.weight[kv_start : kv_start + layout.shifted, : layout.identity] = compress
        attention.o_proj.weight[:, q_start : q_start + HEAD_DIM] = 0.0
        rows = slice(layout.start(distance), layout.start(distance) + layout.shifted)
        attention.o_proj.weight[rows, q_start : q_start + layout.shifted] = 0.3 * torch.eye(layout.shifted)


def _write_match_heads(attention: Any, layout: StreamLayout, compress: Tensor, generator: torch.Generator) -> None:
    for group in range(layout.num_blocks):
        q_start, kv_start = group * attention.num_key_value_groups * HEAD_DIM, group * HEAD_DIM
        attention.q_proj.weight[q_start : q_start + HEAD_DIM] = 0.0
        attention.k_proj.weight[kv_start : kv_start + HEAD_DIM] = 0.0
        for distance, (first, last) in enumerate(MATCH_PAIRS):
            rows = torch.tensor([*range(first, last), *range(first + NUM_PAIRS, last + NUM_PAIRS)])
            projection = orthonormal(len(rows), layout.shifted, generator) * MATCH_GAIN
            query_from = projection @ compress if distance == 0 else projection
            query_columns = slice(layout.start(distance), layout.start(distance) + query_from.shape[1])
            key_start = layout.start(distance + 1)
            attention.q_proj.weight[q_start + rows, query_columns] = query_from
            attention.k_proj.weight[kv_start + rows, key_start : key_start + layout.shifted] = projection
        _write_copy(attention, layout, group, q_start, kv_start)


def _write_copy(attention: Any, layout: StreamLayout, group: int, q_start: int, kv_start: int) -> None:
    """Value and output of one match head: one 64-wide block of the identity, passed on unchanged."""
    first = group * HEAD_DIM
    size = min(HEAD_DIM, layout.identity - first)
    attention.v_proj.weight[kv_start : kv_start + HEAD_DIM] = 0.0
    attention.o_proj.weight[:, q_start : q_start + HEAD_DIM] = 0.0
    attention.v_proj.weight[kv_start : kv_start + size, first : first + size] = torch.eye(size)
    attention.o_proj.weight[first : first + size, q_start : q_start + size] = torch.eye(size)
