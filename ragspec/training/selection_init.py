"""Structured initialisation, second part: pointing at the sentence that shares rare words with the question.

Owns the circuit that answers "which sentence is quoted?" before any training; `structured_init` owns copying. It uses
the free columns of the residual stream as named flags:

- layer 0: a segment head marks the tokens of the question; the shift head marks sentence starts (the token after a lone
  space) and the opening of the answer (the token after `<|assistant|>`);
- layer 1: an overlap head looks for each passage token in the question, rare tokens only; a start head brings every
  token the identity of the token its sentence starts with;
- layer 2: at the opening of the answer, one head lets every overlapping passage token vote for the start of its
  sentence; another brings every token the number of its passage, faintly, for later layers to cite.

Measured before training, SQuAD questions over three passages: among the sentence starts on offer, the right one gets the
highest logit in 70 %; the token after it is right in 80 %.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ragspec.training.structured_init import HEAD_DIM, NUM_PAIRS, StreamLayout, orthonormal, stream_layout

STATIC = NUM_PAIRS - 1
"""The slowest rotary pair; it does not turn within the context, so it carries scores that ignore position."""
RECENCY_PAIRS = (5, 14)
OVERLAP_PAIRS = (15, 31)
MARKER = 2.0
NUM_FLAGS = 9
NUM_STRUCTURED_LAYERS = 3
QUOTE_LIKE_SPACE = 0.7
NUMBER_GAIN = 6.0
FINAL_NORM = 0.35
"""Gain of the last normalisation: at 1, the logits of long identities start the training at a loss of 31 nats, not 12."""


class MarkerTokens(NamedTuple):
    """Ids of the tokens that structure a prompt; `space` is the lone space between sentences."""

    user: int
    context: int
    assistant: int
    space: int
    quote: int
    bracket: int
    newline: int
    digits: tuple[int, ...]


class Flags(NamedTuple):
    """Columns of the residual stream; the first five are set in the embedding, the rest written by heads."""

    context: int
    user: int
    space: int
    assistant: int
    rarity: int
    in_question: int
    sentence_start: int
    answer_opening: int
    overlap: int


def flag_columns(layout: StreamLayout) -> Flags:
    """The flags lie right after the shifted copies."""
    return Flags(*range(layout.start(4), layout.start(4) + NUM_FLAGS))


@torch.no_grad()
def selection_init(model: LlamaForCausalLM, markers: MarkerTokens, seed: int = 2) -> None:
    """Write the selection circuit into a model that `structured_init` has prepared."""
    generator = torch.Generator().manual_seed(seed)
    layout = stream_layout(model.config.hidden_size)
    flags = flag_columns(layout)
    first_free = layout.start(4) + NUM_FLAGS
    compress = orthonormal(min(HEAD_DIM, model.config.hidden_size - first_free), layout.identity, generator)
    embedding = model.model.embed_tokens.weight
    embedding[:, layout.start(4) :] = 0.0
    embedding[:, flags.rarity] = 0.5 * token_rarity(embedding.shape[0])
    columns = (flags.user, flags.context, flags.assistant, flags.space)
    for column, token in zip(columns, markers[: len(columns)], strict=True):
        embedding[token, column] = MARKER
    # an opening quotation mark looks like the space before a sentence, so that its second token is found too
    embedding[markers.quote, : layout.identity] *= 1 - QUOTE_LIKE_SPACE
    embedding[markers.quote, : layout.identity] += QUOTE_LIKE_SPACE * embedding[markers.space, : layout.identity]
    model.model.norm.weight.fill_(FINAL_NORM)
    layers = [layer.self_attn for layer in model.model.layers[:NUM_STRUCTURED_LAYERS]]
    _write_segment_head(layers[0], flags, layout)
    _write_overlap_head(layers[1], flags, layout, generator)
    _write_start_head(layers[1], flags, compress, first_free)
    _write_vote_head(layers[2], flags, compress, first_free)
    _write_number_head(layers[2], embedding, layers[0].v_proj.weight, flags, layout, markers)


def token_rarity(vocab_size: int) -> Tensor:
    """-1 for the commonest merges to 1 for the rarest; a byte-level BPE lists its merges by frequency. Shape: [V]."""
    ids = torch.arange(vocab_size).float().clamp(min=1)
    common = vocab_size / 9
    return ((ids / common).log() / torch.log(torch.tensor(vocab_size / common))).clamp(-1, 1)


def _clear(attention: Any, group: int) -> tuple[int, int]:
    """Zero the first query head of a group and its keys and values; returns their first rows."""
    q, kv = group * attention.num_key_value_groups * HEAD_DIM, group * HEAD_DIM
    for linear, start in ((attention.q_proj, q), (attention.k_proj, kv), (attention.v_proj, kv)):
        linear.weight[start : start + HEAD_DIM] = 0.0
        linear.bias[start : start + HEAD_DIM] = 0.0
    attention.o_proj.weight[:, q : q + HEAD_DIM] = 0.0
    return q, kv


def _write_segment_head(attention: Any, flags: Flags, layout: StreamLayout) -> None:
    q, kv = _clear(attention, group=2)
    attention.q_proj.bias[q + STATIC] = 8.0
    attention.k_proj.weight[kv + STATIC, flags.context] = 3.3
    attention.k_proj.weight[kv + STATIC, flags.user] = 2.0
    attention.v_proj.weight[kv, flags.user] = 1.0
    attention.o_proj.weight[flags.in_question, q] = 0.2
    for row, (source, target) in enumerate(
        ((flags.space, flags.sentence_start), (flags.assistant, flags.answer_opening)), start=layout.shifted
    ):
        attention.v_proj.weight[row, source] = 1.0  # of the head that looks one token back
        attention.o_proj.weight[target, row] = 0.2


def _write_overlap_head(attention: Any, flags: Flags, layout: StreamLayout, generator: torch.Generator) -> None:
    q, kv = _clear(attention, group=2)
    first, last = OVERLAP_PAIRS
    rows = torch.tensor([*range(first, last), *range(first + NUM_PAIRS, last + NUM_PAIRS)])
    projection = 2.2 * orthonormal(len(rows), layout.identity, generator)
    attention.q_proj.weight[q + rows, : layout.identity] = projection
    attention.k_proj.weight[kv + rows, : layout.identity] = projection
    attention.q_proj.bias[q + STATIC] = 0.8
    attention.q_proj.weight[q + STATIC, flags.rarity] = 5.5
    attention.k_proj.weight[kv + STATIC, flags.in_question] = 1.0
    attention.v_proj.weight[kv, flags.in_question] = 1.0
    attention.o_proj.weight[flags.overlap, q] = 0.4


def _write_start_head(attention: Any, flags: Flags, compress: Tensor, first_free: int) -> None:
    q, kv = _clear(attention, group=3)
    attention.q_proj.bias[q + RECENCY_PAIRS[0] : q + RECENCY_PAIRS[1]] = 5.0
    attention.k_proj.bias[kv + RECENCY_PAIRS[0] : kv + RECENCY_PAIRS[1]] = 5.0
    attention.q_proj.bias[q + STATIC] = 10.0
    attention.k_proj.weight[kv + STATIC, flags.sentence_start] = 4.0
    size = compress.shape[0]
    attention.v_proj.weight[kv : kv + size, : compress.shape[1]] = compress
    attention.o_proj.weight[first_free : first_free + size, q : q + size] = 0.4 * torch.eye(size)


def _write_vote_head(attention: Any, flags: Flags, compress: Tensor, first_free: int) -> None:
    q, kv = _clear(attention, group=0)
    attention.q_proj.weight[q + STATIC, flags.answer_opening] = 8.0
    attention.k_proj.weight[kv + STATIC, flags.overlap] = 1.0
    attention.k_proj.weight[kv + STATIC, flags.in_question] = -2.0
    size = compress.shape[0]
    attention.v_proj.weight[kv : kv + size, first_free : first_free + size] = torch.eye(size)
    attention.o_proj.weight[: compress.shape[1], q : q + size] = 3.0 * compress.T


def _write_number_head(
    attention: Any, embedding: Tensor, shift_values: Tensor, flags: Flags, layout: StreamLayout, markers: MarkerTokens
) -> None:
    """Looks at the latest token after a newline and a bracket, and writes which digit it is into spent flag columns."""
    q, kv = _clear(attention, group=3)
    compress = shift_values[: layout.shifted, : layout.identity]
    attention.q_proj.bias[q + STATIC] = 10.0
    for slot, token in ((1, markers.bracket), (2, markers.newline)):
        seen = compress @ embedding[token, : layout.identity]
        attention.k_proj.weight[kv + STATIC, layout.columns(slot)] = NUMBER_GAIN * seen / seen.norm()
    attention.q_proj.bias[q + RECENCY_PAIRS[0] : q + RECENCY_PAIRS[1]] = 5.0
    attention.k_proj.bias[kv + RECENCY_PAIRS[0] : kv + RECENCY_PAIRS[1]] = 5.0
    columns = (flags.context, flags.user, flags.space, flags.assistant)  # read by layer 0 alone
    for row, (digit, column) in enumerate(zip(markers.digits, columns, strict=True)):
        identity = embedding[digit, : layout.identity]
        attention.v_proj.weight[kv + row, : layout.identity] = identity / identity.norm()
        attention.o_proj.weight[column, q + row] = 0.18
