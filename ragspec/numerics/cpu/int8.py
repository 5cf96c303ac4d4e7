"""Decoders and linear layers with int8 weights: each builds its table of phases from a transformers module, and runs it.

    >>> decoder = Int8Decoder(model.model, rotary, ranks)
    >>> hidden, tapped = decoder(token_ids, context)

In a tensor-parallel group each rank has some heads and outputs, as in `ragspec.numerics.layers`; parts are gathered between
phases. Integer sums make every split exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Floats, attention_arguments, shape_of
from ragspec.numerics.cpu.int8_weights import WeightArena, with_zeros
from ragspec.numerics.cpu.kernels import Buffer, Column, Kind
from ragspec.numerics.cpu.llvm_code import LANES
from ragspec.numerics.cpu.phases import Buffers, PhaseTable
from ragspec.numerics.cpu.thread_pool import run
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.sharding import FFN_MULTIPLE, without_padding


class _Segment(NamedTuple):
    """Phases [first, last), then `gathered` is filled with the parts of all ranks. Of streamed weights: a layer's phases."""

    first: int
    last: int
    gathered: Buffer | None


_OWN = {Buffer.HEADS: Buffer.OWN_HEADS, Buffer.INNER: Buffer.OWN_INNER, Buffer.BLOCK: Buffer.OWN_BLOCK}
"""Where a rank's part of a gathered buffer is. On one rank both are the same memory."""


class Int8Decoder(nn.Module):
    """Layers and final norm of a Llama, Mistral, Qwen2 or Qwen3 model. Same interface as `ragspec.numerics.layers.Decoder`.

    Shapes: token_ids int64 [N] -> normalised hidden states [N, H], and by tap the stream, [N, H].
    """

    def __init__(self, model: Any, cos: Tensor, sin: Tensor, ranks: Ranks, arena: WeightArena) -> None:
        super().__init__()
        self.embedding, self._ranks = model.embed_tokens, ranks
        self._width = int(model.config.hidden_size)
        self._shape = shape_of(model.layers[0].self_attn, ranks.size)
        self._arena = arena
        self._table = table = PhaseTable(ranks, arena)
        self._tap_phases: list[int] = []
        self._segments: list[_Segment] = []
        for layer in model.layers:
            self._add_attention(layer)
            self._add_feed_forward(layer)
            arena.end_layer()
        self._tap_phases.append(len(table))
        table.add(Kind.FINAL_NORM, width=self._width, norm_weight=table.add_norm(model.norm))
        self._close_segment(None)
        if arena.streams:
            bounds = itertools.pairwise([*self._tap_phases, len(table)])
            self._segments = [_Segment(first, last, None) for first, last in bounds]
        self._phases = table.finish()
        self.rotations = (cos.float(), sin.float())
        """Cosines and sines. Shapes: [positions, head_dim]."""
        self._rotations = tuple(table.numpy() for table in self.rotations)
        self._room = self._make_room()

    def forward(self, token_ids: Tensor, context: Any, taps: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        num_rows, metadata, pool, shape = len(token_ids), context.metadata, context.pool, self._shape
        states, tapped = (np.empty((*lead, num_rows, self._width), np.float32) for lead in ((), (len(taps),)))
        floats, quantised = self._room.of(num_rows, {Buffer.STATES: states, Buffer.TAPS: tapped})
        floats[Buffer.STREAM][:] = self.embedding(token_ids).float().numpy().reshape(-1)
        floats[Buffer.BLOCK][:] = 0.0
        phases = self._phases.copy() if taps else self._phases
        for place, tap in enumerate(taps):
            phases[self._tap_phases[tap], Column.TAP] = place
        num_tiles = len(metadata.tiles) * shape.num_kv_heads
        attention = attention_arguments(metadata, (pool.keys, pool.values), shape)
        arguments = (*self._arena.arrays, self._rotations, floats, quantised, *attention)
        for number, segment in enumerate(self._segments):
            with self._arena.layer(number):
                run(phases[segment.first : segment.last], num_rows, num_tiles, *arguments)
            if segment.gathered is not None:
                self._gather(segment.gathered, floats, num_rows)
        return torch.from_numpy(states), {tap: torch.from_numpy(tapped[place]) for place, tap in enumerate(taps)}

    def _add_attention(self, layer: Any) -> None:
        table, attention, index = self._table, layer.self_attn, layer.self_attn.layer_idx
        self._tap_phases.append(len(table))
        norm = table.add(Kind.NORM, norm_weight=table.add_norm(layer.input_layernorm))
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if projections[0].bias is None else torch.cat([p.bias.detach() for p in projections])
        weight = torch.cat([p.weight.detach() for p in projections])
        table.add_product(Kind.PRODUCT, norm, Buffer.QKV, weight, bias)
        norms = [table.add_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
        table.add(Kind.ROTATE, layer=index, norm_weight=norms[0], key_norm=norms[1])
        table.add(Kind.ATTEND, layer=index, window=shape_of(attention, self._ranks.size).window)
        self._close_segment(Buffer.HEADS)
        self._add_output(Buffer.HEADS, attention.o_proj)

    def _add_feed_forward(self, layer: Any) -> None:
        table, mlp = self._table, layer.mlp
        norm = table.add(Kind.NORM, norm_weight=table.add_norm(layer.post_attention_layernorm))
        parts = [_padded_outputs(p.weight.detach()) for p in (mlp.gate_proj, mlp.up_proj)]
        biases = [p.bias for p in (mlp.gate_proj, mlp.up_proj)]
        bias = None if biases[0] is None else _by_turns([_padded_outputs(b.detach()) for b in biases])
        gated = table.add_product(Kind.GATED_PRODUCT, norm, Buffer.OWN_INNER, _by_turns(parts), bias)
        self._own_inner = gated.num_blocks * 16 // 2
        self._close_segment(Buffer.INNER)
        self._add_output(Buffer.INNER, mlp.down_proj)

    def _add_output(self, source: Buffer, linear: Any) -> None:
        """The product of gathered parts back into the stream."""
        num_more = -linear.weight.shape[1] % FFN_MULTIPLE if source is Buffer.INNER else 0
        quantiser = self._table.add(Kind.QUANTISE, source=source)
        weight = F.pad(linear.weight.detach(), (0, num_more)) if num_more else linear.weight.detach()
        product = self._table.add_product(Kind.PRODUCT, quantiser, Buffer.OWN_BLOCK, weight, linear.bias)
        self._own_block = product.num_blocks * 16
        if source is Buffer.INNER:
            self._inner = product.num_inputs
        self._close_segment(Buffer.BLOCK)

    def _close_segment(self, gathered: Buffer | None) -> None:
        """One rank gathers nothing: its phases are one segment."""
        first = self._segments[-1].last if self._segments else 0
        if self._ranks.size == 1:
            self._segments, first, gathered = [], 0, None
        self._segments.append(_Segment(first, len(self._table), gathered))

    def _gather(self, buffer: Buffer, floats: Sequence[Floats], num_rows: int) -> None:
        own = torch.from_numpy(floats[_OWN[buffer]]).view(num_rows, -1)
        whole = torch.from_numpy(floats[buffer]).view(num_rows, -1)
        whole.copy_(without_padding(self._ranks.all_gather(own), whole.shape[1]))

    def _make_room(self) -> Buffers:
        shape = self._shape
        own = {
            Buffer.OWN_HEADS: shape.num_heads * shape.head_dim,
            Buffer.OWN_INNER: self._own_inner,
            Buffer.OWN_BLOCK: self._own_block,
        }
        whole = {
            Buffer.STREAM: self._width,
            Buffer.BLOCK: self._width,
            Buffer.QKV: (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
            Buffer.HEADS: shape.num_heads * shape.head_dim * self._ranks.size,
            Buffer.INNER: self._inner,
            Buffer.ROW_SCALES: 1,
        }
        return Buffers(own | whole, max(whole.values()), _OWN if self._ranks.size == 1 else {})


def _padded_outputs(part: Tensor) -> Tensor:
    return with_zeros(part, -len(part) % FFN_MULTIPLE)


def _by_turns(parts: Sequence[Tensor]) -> Tensor:
    """Blocks of 16 outputs of gate and up in turns. Shapes: [F, ...] twice -> [2 F, ...]."""
    return torch.stack([part.view(-1, 16, *part.shape[1:]) for part in parts], 1).flatten(0, 2)


def has_int8_shape(model: Any) -> bool:
    """Whether the kernels can run this decoder: SiLU, and widths that are multiples of 16."""
    config, attention = model.config, model.layers[0].self_attn
    heads = config.num_attention_heads * attention.head_dim
    return config.hidden_act == "silu" and not any(
        width % 16 for width in (config.hidden_size, heads, attention.head_dim)
    )


_NO_ROWS = AttentionMetadata._make([*[np.empty(0, np.int32)] * 12, np.empty((0, 3), np.int32)])
_NO_POOL = (np.empty((1, 0), np.uint16), np.empty((1, 0), np.uint16))
_HEAD_DIM = 64
"""The most common one; with it, and with a pool in bfloat16, the kernel is compiled once for linears and decoders."""
_NO_ROTATIONS = (np.empty((0, _HEAD_DIM), np.float32), np.empty((0, _HEAD_DIM), np.float32))
_NO_ATTENTION = attention_arguments(_NO_ROWS, _NO_POOL, AttentionShape(1, 1, _HEAD_DIM, 1.0))


class Int8Linear(nn.Module):
    """`y = x W^T + b`, W in int8 with a scale for each output, x in whole numbers with a scale for each row.

    Shapes: x [..., in_features] -> y [..., out_features], in the dtype of x. In a group W is a rank's outputs. `arena`: where
    the weights lie; None: in an arena of their own.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, ranks: Ranks = ONE_RANK, arena: WeightArena | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._arena = arena or WeightArena()
        table = PhaseTable(ranks, self._arena)
        quantiser = table.add(Kind.QUANTISE, source=Buffer.STATES)
        self._num_more = -self.in_features % LANES
        product = table.add_product(
            Kind.PRODUCT, quantiser, Buffer.LOGITS, F.pad(weight.detach(), (0, self._num_more)), bias
        )
        self._num_outputs = product.num_blocks * LANES
        self._phases = table.finish()
        widths = {Buffer.LOGITS: self._num_outputs, Buffer.ROW_SCALES: 1}
        self._room = Buffers(widths, self.in_features + self._num_more, {})

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).float().contiguous()
        if self._num_more:
            rows = F.pad(rows, (0, self._num_more))
        out = np.empty((len(rows), self._num_outputs), np.float32)
        floats, quantised = self._room.of(len(rows), {Buffer.STATES: rows.numpy(), Buffer.LOGITS: out})
        run(
            self._phases,
            len(rows),
            0,
            *self._arena.arrays,
            _NO_ROTATIONS,
            floats,
            quantised,
            *_NO_ATTENTION,
        )
        return torch.from_numpy(out)[:, : self.out_features].view(*x.shape[:-1], self.out_features).to(x.dtype)
