"""Decoders, layers and linears with int8 weights: each builds its table of phases from a transformers module, and runs it.

    >>> decoder = Int8Decoder(model.model, rotary, ranks)
    >>> hidden, tapped = decoder(token_ids, context)

In a tensor-parallel group each rank has some heads and outputs, as in `ragspec.numerics.layers`; parts are gathered between
phases. Integer sums make every split exact.
"""

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
from ragspec.numerics.cpu.thread_pool import Phases, run
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.sharding import FFN_MULTIPLE, without_padding


class _Segment(NamedTuple):
    """Phases [first, last), then `gathered` is filled with the parts of all ranks. Of streamed weights: a layer's phases."""

    first: int
    last: int
    gathered: Buffer | None


_OWN = {Buffer.HEADS: Buffer.OWN_HEADS, Buffer.INNER: Buffer.OWN_INNER, Buffer.BLOCK: Buffer.OWN_BLOCK}
"""Where a rank's part of a gathered buffer is. On one rank both are the same memory."""


class _LayerPhases(nn.Module):
    """The phases of decoder layers, and the arrays between them. `shape`: of a rank's attention. `width`: of the stream."""

    def __init__(self, shape: AttentionShape, width: int, ranks: Ranks, arena: WeightArena) -> None:
        super().__init__()
        self._shape, self._width, self._ranks, self._arena = shape, width, ranks, arena
        self._table = PhaseTable(ranks, arena)
        self._segments: list[_Segment] = []

    def _add_attention(self, layer: Any, index: int, window: int, source: dict[Column, int]) -> None:
        """`source`: the phase that quantises the layer's input."""
        table, attention = self._table, layer.self_attn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if projections[0].bias is None else torch.cat([p.bias.detach() for p in projections])
        weight = torch.cat([p.weight.detach() for p in projections])
        table.add_product(Kind.PRODUCT, source, Buffer.QKV, weight, bias)
        norms = [table.add_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
        table.add(Kind.ROTATE, layer=index, norm_weight=norms[0], key_norm=norms[1])
        self._num_writing = len(table)
        table.add(Kind.ATTEND, layer=index, window=window)
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

    def _make_room(self, widest_input: int = 0) -> Buffers:
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
        return Buffers(own | whole, max(widest_input, *whole.values()), _OWN if self._ranks.size == 1 else {})

    def _attention_of(self, context: Any) -> tuple[int, tuple[Any, ...]]:
        """The number of attention tiles, and the last arguments of the compiled step."""
        metadata, pool = context.metadata, context.pool
        arguments = attention_arguments(metadata, (pool.keys, pool.values), self._shape)
        return len(metadata.tiles) * self._shape.num_kv_heads, arguments


class Int8Decoder(_LayerPhases):
    """Layers and final norm of a Llama, Mistral, Qwen2 or Qwen3 model. Same interface as `ragspec.numerics.layers.Decoder`.

    Shapes: token_ids int64 [N] -> normalised hidden states [N, H], and by tap the stream, [N, H].
    """

    def __init__(self, model: Any, cos: Tensor, sin: Tensor, ranks: Ranks, arena: WeightArena) -> None:
        shape = shape_of(model.layers[0].self_attn, ranks.size)
        super().__init__(shape, int(model.config.hidden_size), ranks, arena)
        self.embedding, table = model.embed_tokens, self._table
        self._tap_phases: list[int] = []
        for layer in model.layers:
            self._tap_phases.append(len(table))
            norm = table.add(Kind.NORM, norm_weight=table.add_norm(layer.input_layernorm))
            window = shape_of(layer.self_attn, ranks.size).window
            self._add_attention(layer, layer.self_attn.layer_idx, window, norm)
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
        num_rows = len(token_ids)
        states, tapped = (np.empty((*lead, num_rows, self._width), np.float32) for lead in ((), (len(taps),)))
        floats, quantised = self._room.of(num_rows, {Buffer.STATES: states, Buffer.TAPS: tapped})
        floats[Buffer.STREAM][:] = self.embedding(token_ids).float().numpy().reshape(-1)
        floats[Buffer.BLOCK][:] = 0.0
        phases = self._phases.copy() if taps else self._phases
        for place, tap in enumerate(taps):
            phases[self._tap_phases[tap], Column.TAP] = place
        num_tiles, attention = self._attention_of(context)
        arguments = (*self._arena.arrays, self._rotations, floats, quantised, *attention)
        for number, segment in enumerate(self._segments):
            with self._arena.layer(number):
                run(phases[segment.first : segment.last], num_rows, num_tiles, *arguments)
            if segment.gathered is not None:
                self._gather(segment.gathered, floats, num_rows)
        return torch.from_numpy(states), {tap: torch.from_numpy(tapped[place]) for place, tap in enumerate(taps)}

    def _gather(self, buffer: Buffer, floats: Sequence[Floats], num_rows: int) -> None:
        own = torch.from_numpy(floats[_OWN[buffer]]).view(num_rows, -1)
        whole = torch.from_numpy(floats[buffer]).view(num_rows, -1)
        whole.copy_(without_padding(self._ranks.all_gather(own), whole.shape[1]))


class Int8Layer(_LayerPhases):
    """One decoder layer over inputs of its own, of another width than the stream perhaps. `index`: of its keys in the pool.

    Shapes: stream [N, H], x [N, inputs] -> [N, H], float32.
    """

    def __init__(
        self, layer: Any, shape: AttentionShape, rotations: tuple[Tensor, Tensor], index: int, arena: WeightArena
    ) -> None:
        super().__init__(shape, layer.self_attn.o_proj.weight.shape[0], ONE_RANK, arena)
        self.shape = shape
        quantiser = self._table.add(Kind.QUANTISE, source=Buffer.STATES)
        self._add_attention(layer, index, shape.window, quantiser)
        self._add_feed_forward(layer)
        self._phases = self._table.finish()
        self._rotations = tuple(table.numpy() for table in rotations)
        self._room = self._make_room(layer.self_attn.q_proj.weight.shape[1])

    def forward(self, stream: Tensor, x: Tensor, context: Any) -> Tensor:
        floats = self._run(self._phases, x, context, stream)
        return torch.from_numpy((floats[Buffer.STREAM] + floats[Buffer.BLOCK]).reshape(-1, self._width))

    def write(self, x: Tensor, context: Any) -> None:
        """Only write the rows' keys and values."""
        self._run(self._phases[: self._num_writing], x, context)

    def _run(self, phases: Phases, x: Tensor, context: Any, stream: Tensor | None = None) -> tuple[Floats, ...]:
        floats, quantised = self._room.of(len(x), {Buffer.STATES: x.contiguous().numpy()})
        if stream is not None:
            floats[Buffer.STREAM][:] = stream.numpy().reshape(-1)
        num_tiles, attention = self._attention_of(context)
        run(phases, len(x), num_tiles, *self._arena.arrays, self._rotations, floats, quantised, *attention)
        return floats


def _padded_outputs(part: Tensor) -> Tensor:
    return with_zeros(part, -len(part) % FFN_MULTIPLE)


def _by_turns(parts: Sequence[Tensor]) -> Tensor:
    """Blocks of 16 outputs of gate and up in turns. Shapes: [F, ...] twice -> [2 F, ...]."""
    return torch.stack([part.view(-1, 16, *part.shape[1:]) for part in parts], 1).flatten(0, 2)


def has_int8_shape(model: Any) -> bool:
    """Whether the kernels can run this decoder: SiLU, and widths that are multiples of 16."""
    config, attention = model.config, model.layers[0].self_attn
    heads = config.num_attention_heads * attention.head_dim
    return config.hidden_act == "silu" and are_whole_blocks(config.hidden_size, heads, attention.head_dim)


def are_whole_blocks(*widths: int) -> bool:
    return not any(width % LANES for width in widths)


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
        run(self._phases, len(rows), 0, *self._arena.arrays, _NO_ROTATIONS, floats, quantised, *_NO_ATTENTION)
        return torch.from_numpy(out)[:, : self.out_features].view(*x.shape[:-1], self.out_features).to(x.dtype)
