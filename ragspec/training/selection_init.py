"""Structured initialisation, second part: pointing at the sentence that shares rare words with the question.

Owns the circuit that answers "which sentence is quoted?" before any training; `structured_init` owns copying. Flags are
columns of the residual stream after the slots:

- layer 0: a segment head marks the tokens of the question and of the answer; the shift head marks sentence starts (the
  token after a lone space);
- layer 1: an overlap head looks for each passage token in the question, rare tokens only; a start head brings every
  token its sentence's signature, which is what stood around the sentence's first token;
- layer 2: while answering, a vote head collects the signatures of the overlapping tokens; another head brings every
  token the number of its passage;
- layer 3: a pointer head turns the mixture of signatures into the strongest one;
- layer 4: the match heads copy, in the sentence with that signature; one more brings along the passage's number;
- layer 5: a head averages that number over the last quoted tokens, to be cited after the quote.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ragspec.training.structured_init import (
    HEAD_DIM,
    NUM_PAIRS,
    NUM_SLOTS,
    RECENT,
    SELECTED,
    SENTENCE,
    PositionalHead,
    StreamLayout,
    orthonormal,
    positional_score,
    stream_layout,
)

STATIC = NUM_PAIRS - 1
"""The slowest rotary pair; it does not turn within the context, so it carries scores that ignore position."""
RECENCY_PAIRS = (5, 14)
OVERLAP_PAIRS = (15, 31)
QUESTION_PAIRS, QUESTION_GAIN, QUESTION_GATE = (14, 31), 3.0, -5.4
VOTE_RARITY, VOTE_GAIN = 1.1, 2.0
START_TOKEN_SHARE = 0.1
MARKER = 2.0
NUM_FLAGS = 12
NUM_STRUCTURED_LAYERS = 6
MATCH_LAYER = 4
OPENING_LIKE_SENTENCE_END = 0.7
NUMBER_GAIN = 6.0
CITED = PositionalHead(slot=0, distance=5, sharpness=3.5, pairs=(3, 13), gain=0.5)
FINAL_NORM = 0.35
"""Gain of the last normalisation: at 1, the logits of long identities start the training at a loss of 31 nats, not 12."""


class MarkerTokens(NamedTuple):
    """Ids of the tokens that structure a prompt; `space` is the lone space between sentences."""

    user: int
    context: int
    assistant: int
    question: int
    space: int
    quote: int
    bracket: int
    newline: int
    digits: tuple[int, ...]
    ends: tuple[int, ...]


class Flags(NamedTuple):
    """Columns of the residual stream; the first six are set in the embedding, the rest written by heads."""

    context: int
    user: int
    space: int
    assistant: int
    question: int
    rarity: int
    asked: int
    in_question: int
    sentence_start: int
    opening: int
    answering: int
    overlap: int


def flag_columns(layout: StreamLayout) -> Flags:
    """The flags lie right after the slots."""
    return Flags(*range(layout.start(NUM_SLOTS), layout.start(NUM_SLOTS) + NUM_FLAGS))


@torch.no_grad()
def selection_init(model: LlamaForCausalLM, markers: MarkerTokens, seed: int = 2) -> None:
    """Write the selection circuit into a model that `structured_init` has prepared."""
    generator = torch.Generator().manual_seed(seed)
    layout = stream_layout(model.config.hidden_size)
    flags = flag_columns(layout)
    embedding = model.model.embed_tokens.weight
    embedding[:, layout.start(SENTENCE) :] = 0.0
    embedding[:, flags.rarity] = 0.5 * token_rarity(embedding.shape[0])
    _resemble(embedding[:, : layout.identity], markers)
    columns = (flags.user, flags.context, flags.assistant, flags.question, flags.space)
    for column, token in zip(columns, markers[: len(columns)], strict=True):
        embedding[token, column] = MARKER
    model.model.norm.weight.fill_(FINAL_NORM)
    layers = [layer.self_attn for layer in model.model.layers[:NUM_STRUCTURED_LAYERS]]
    _write_segment_head(layers[0], flags, layout)
    _write_overlap_head(layers[1], flags, layout, generator)
    compress = layers[0].v_proj.weight[: layout.shifted, : layout.identity].clone()
    around_starts = [*markers.ends, markers.space, markers.newline, markers.bracket, markers.user]
    marks = compress @ embedding[around_starts, : layout.identity].T  # [shifted, marks]
    _write_start_head(layers[1], flags, layout, marks, len(markers.ends), generator)
    _write_question_head(layers[2], flags, layout, generator)
    _write_number_head(layers[2], embedding, compress, flags, layout, markers)
    _write_vote_head(layers[3], flags, layout)
    _write_opening(layers[MATCH_LAYER], flags)
    _write_cited_number(layers[MATCH_LAYER], flags, layout)
    _write_citation_head(layers[5], embedding, flags, layout, markers)


def _resemble(identity: Tensor, markers: MarkerTokens) -> None:
    """The answer's opening, `<|assistant|>"`, looks like a sentence's end and the space after it: so a start is copied."""
    share = OPENING_LIKE_SENTENCE_END
    identity[markers.quote] = (1 - share) * identity[markers.quote] + share * identity[markers.space]
    end = identity[[markers.ends[0], markers.ends[-1]]].sum(0) / 2**0.5
    identity[markers.assistant] = (1 - share) * identity[markers.assistant] + share * end


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


def _rows(pairs: tuple[int, int]) -> Tensor:
    """Both dimensions of the rotary pairs [first, last)."""
    first, last = pairs
    return torch.tensor([*range(first, last), *range(first + NUM_PAIRS, last + NUM_PAIRS)])


def _write_segment_head(attention: Any, flags: Flags, layout: StreamLayout) -> None:
    q, kv = _clear(attention, group=2)
    attention.q_proj.bias[q + STATIC] = 8.0
    for marker, score in ((flags.user, 2.0), (flags.context, 3.3), (flags.question, 4.6), (flags.assistant, 5.9)):
        attention.k_proj.weight[kv + STATIC, marker] = score
    segments = ((flags.user, flags.asked), (flags.question, flags.in_question), (flags.assistant, flags.answering))
    for row, (marker, target) in enumerate(segments):
        attention.v_proj.weight[kv + row, marker] = 1.0
        attention.o_proj.weight[target, q + row] = 0.2
    shifts = ((flags.space, flags.sentence_start), (flags.assistant, flags.opening))
    for row, (marker, target) in enumerate(shifts, start=layout.shifted):
        attention.v_proj.weight[row, marker] = 1.0  # of the head that looks one token back
        attention.o_proj.weight[target, row] = 0.2


def _write_overlap_head(attention: Any, flags: Flags, layout: StreamLayout, generator: torch.Generator) -> None:
    q, kv = _clear(attention, group=2)
    rows = _rows(OVERLAP_PAIRS)
    projection = 2.2 * orthonormal(len(rows), layout.identity, generator)
    attention.q_proj.weight[q + rows, : layout.identity] = projection
    attention.k_proj.weight[kv + rows, : layout.identity] = projection
    attention.q_proj.bias[q + STATIC] = 0.8
    attention.q_proj.weight[q + STATIC, flags.rarity] = 5.5
    attention.k_proj.weight[kv + STATIC, flags.asked] = 1.0
    attention.v_proj.weight[kv, flags.asked] = 1.0
    attention.o_proj.weight[flags.overlap, q] = 0.4


def _write_start_head(
    attention: Any, flags: Flags, layout: StreamLayout, marks: Tensor, num_ends: int, generator: torch.Generator
) -> None:
    """Looks at the latest sentence start; a start after a colon or a bracket counts for less.

    What all starts have around them (`marks`, the first of them sentence ends) is no part of the signature.
    """
    q, kv = _clear(attention, group=3)
    attention.q_proj.bias[q + RECENCY_PAIRS[0] : q + RECENCY_PAIRS[1]] = 6.0
    attention.k_proj.bias[kv + RECENCY_PAIRS[0] : kv + RECENCY_PAIRS[1]] = 6.0
    attention.q_proj.bias[q + STATIC] = 10.0
    attention.k_proj.weight[kv + STATIC, flags.sentence_start] = 4.0
    ends = marks[:, :num_ends]
    attention.k_proj.weight[kv + STATIC, layout.columns(2)] = 1.2 * (ends / ends.norm(dim=0)).sum(1)
    size = layout.shifted
    common = torch.linalg.qr(marks)[0]  # [shifted, marks]
    attention.v_proj.weight[kv : kv + size, layout.columns(RECENT)] = torch.eye(size) - common @ common.T
    first_token = START_TOKEN_SHARE * orthonormal(size, layout.identity, generator)
    attention.v_proj.weight[kv : kv + size, : layout.identity] = first_token
    attention.o_proj.weight[layout.columns(SENTENCE), q : q + size] = 0.4 * torch.eye(size)


def _write_question_head(attention: Any, flags: Flags, layout: StreamLayout, generator: torch.Generator) -> None:
    """Gives each token of the repeated question the mean signature of the sentences that hold it.

    A word that stands in many sentences so counts for little in each. The conversation's first token, whose signature is
    nearly zero, takes what matches nothing, and everything while no question is read.
    """
    q, kv = _clear(attention, group=0)
    rows, size = _rows(QUESTION_PAIRS), layout.shifted
    projection = QUESTION_GAIN * orthonormal(len(rows), layout.identity, generator)
    attention.q_proj.weight[q + rows, : layout.identity] = projection
    attention.k_proj.weight[kv + rows, : layout.identity] = projection
    attention.q_proj.bias[q + STATIC] = 48.0
    attention.q_proj.weight[q + STATIC, flags.in_question] = QUESTION_GATE
    scores = ((flags.user, 1.0), (flags.asked, -1.0), (flags.in_question, -1.5), (flags.answering, -1.0))
    for flag, score in scores:
        attention.k_proj.weight[kv + STATIC, flag] = score
    attention.v_proj.weight[kv : kv + size, layout.columns(SENTENCE)] = torch.eye(size)
    attention.o_proj.weight[layout.columns(SELECTED), q : q + size] = 0.5 * torch.eye(size)


def _write_vote_head(attention: Any, flags: Flags, layout: StreamLayout) -> None:
    q, kv = _clear(attention, group=0)
    attention.q_proj.weight[q + STATIC, flags.answering] = 4.0
    for flag, score in ((flags.in_question, 1.0), (flags.rarity, VOTE_RARITY), (flags.asked, -1.0)):
        attention.k_proj.weight[kv + STATIC, flag] = score
    size = layout.shifted
    attention.v_proj.weight[kv : kv + size, layout.columns(SELECTED)] = torch.eye(size)
    attention.o_proj.weight[layout.columns(SELECTED), q : q + size] = VOTE_GAIN * torch.eye(size)


def _number_columns(flags: Flags) -> tuple[int, ...]:
    return flags.context, flags.user, flags.space, flags.assistant  # read by layer 0 alone


def _cited_columns(flags: Flags) -> range:
    return range(flags.overlap + 1, flags.overlap + 5)


def _write_number_head(
    attention: Any, embedding: Tensor, compress: Tensor, flags: Flags, layout: StreamLayout, markers: MarkerTokens
) -> None:
    """Looks at the latest token after a newline and a bracket, and writes which digit it is into spent flag columns."""
    q, kv = _clear(attention, group=3)
    attention.q_proj.bias[q + STATIC] = 10.0
    for slot, token in ((1, markers.bracket), (2, markers.newline)):
        seen = compress @ embedding[token, : layout.identity]
        attention.k_proj.weight[kv + STATIC, layout.columns(slot)] = NUMBER_GAIN * seen / seen.norm()
    attention.q_proj.bias[q + RECENCY_PAIRS[0] : q + RECENCY_PAIRS[1]] = 5.0
    attention.k_proj.bias[kv + RECENCY_PAIRS[0] : kv + RECENCY_PAIRS[1]] = 5.0
    for row, (digit, column) in enumerate(zip(markers.digits, _number_columns(flags), strict=True)):
        identity = embedding[digit, : layout.identity]
        attention.v_proj.weight[kv + row, : layout.identity] = identity / identity.norm()
        attention.o_proj.weight[column, q + row] = 0.18


def _write_opening(attention: Any, flags: Flags) -> None:
    """Only sentence starts may follow the opening of the answer."""
    for group in range(2):
        q, kv = group * attention.num_key_value_groups * HEAD_DIM, group * HEAD_DIM
        attention.q_proj.weight[q + STATIC, flags.opening] += 2.0
        attention.k_proj.weight[kv + STATIC, flags.sentence_start] += 2.0


def _write_cited_number(attention: Any, flags: Flags, layout: StreamLayout) -> None:
    """A third match head, with the first one's queries and keys, that brings the passage's number."""
    copied_q, copied_kv = 0, 0
    q, kv = _clear(attention, group=2)
    for linear, start, source in ((attention.q_proj, q, copied_q), (attention.k_proj, kv, copied_kv)):
        linear.weight[start : start + HEAD_DIM] = linear.weight[source : source + HEAD_DIM]
        linear.bias[start : start + HEAD_DIM] = linear.bias[source : source + HEAD_DIM]
    columns = zip(_number_columns(flags), _cited_columns(flags), strict=True)
    for row, (number, cited) in enumerate(columns):
        attention.v_proj.weight[kv + row, number] = 1.0
        attention.o_proj.weight[cited, q + row] = 1.0


def _write_citation_head(
    attention: Any, embedding: Tensor, flags: Flags, layout: StreamLayout, markers: MarkerTokens
) -> None:
    q, kv = _clear(attention, group=0)
    attention.q_proj.bias[q : q + HEAD_DIM], attention.k_proj.bias[kv : kv + HEAD_DIM] = positional_score(CITED)
    for row, (digit, cited) in enumerate(zip(markers.digits, _cited_columns(flags), strict=True)):
        attention.v_proj.weight[kv + row, cited] = 1.0
        identity = embedding[digit, : layout.identity]
        attention.o_proj.weight[: layout.identity, q + row] = CITED.gain * identity / identity.norm()
