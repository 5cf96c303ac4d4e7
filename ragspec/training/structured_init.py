"""Structured initialisation: a small Llama that copies before its first training step.

Owns the starting weights of the reference target; never trains. The residual stream is split into
`[token identity | token 1 back | token 2 back | recent tokens | signature | votes | before | meaning | spelling | free use]`.

Tokens of the same word have similar identities: with or without the space before them or a capital, and, less so, with
the same beginning. Tokens of similar neighbours in the training texts have similar meanings (`ragspec.training.meanings`);
no circuit reads them, all that is learnt may.

Layer 0 holds positional heads. Their query and key weights are zero; their *biases* alone make the rotary score peak at
a fixed distance (query bias = key bias rotated by that distance). Two sharp heads read the token 1 and 2 places back,
one blunt head averages the last seven or so; each writes the compressed identity to its part of the stream.

A match head compares a few things through random orthonormal projections placed in the slowly rotating rotary
dimensions. The head that copies: the current token with the one before the key, the token before with the one two before
the key, and the recent tokens of both; value and output pass on the identity of the token found there towards the tied
output embedding. The head that locates: the same tokens with the key's own, so that what is known of a token in a passage
is known of its copy.

Which sentence is quoted travels as a signature: a random projection of what a sentence begins with and what stands before it.
The head that looks for sentence starts writes it to every token of the sentence. The head that looks for a question's words in
the passages brings each word the signatures of the sentences it stands in, a token of the answer gathers these votes, and the
head that copies compares them with the signature of each key. Where these heads look is learnt (`guidance`), not written here.

Which word is corrected is found by what stands before it: a head that looks for the beginnings of words writes the two
tokens before a word to each of its own. The head that spells compares them with the last two tokens written, and passes on
how the word is spelt (`ragspec.training.spelling`) towards the words that are spelt alike.

Needs `attention_bias=True`, a large `rope_theta` (slow dimensions), tied embeddings and a head dimension of 128.
Source: induction heads, Olsson et al. 2022 (arXiv 2209.11895), built here by hand.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ragspec.training.guidance import Guide
from ragspec.training.spelling import spellings

HEAD_DIM = 128
ROPE_THETA = 10_000_000.0
NUM_PAIRS = HEAD_DIM // 2
RECENT, SIGNATURE, VOTES, BEFORE, MEANING, SPELLING = 3, 4, 5, 6, 7, 8
"""Slots of the stream after distances 0, 1 and 2: the average of the recent tokens; of a sentence; of the question's words; what
stands before a word."""
FINAL_NORM, FINAL_NORM_OF_MEANING = 0.35, 0.05
"""Gain of the last normalisation: at 1, the logits of long identities start the training at a loss of 31 nats, not 12. What a
token means says little of the next."""
MEANING_SCALE = 0.22
"""Standard deviation of what a token means, in the embedding."""
SPELLING_SCALE, SPELT_AS = 2.5, 4.0
"""Length of how a token is spelt, in the embedding; gain of the head that passes it on. At 1.4 and 1 copying hid it."""
OWN, WORD, STEM = 0.24, 0.15, 0.1
"""Of an identity's standard deviation: what is the token's alone, the word's, its beginning's."""
STEM_LETTERS = 5


class PositionalHead(NamedTuple):
    """Looks `distance` tokens back; more and faster rotary pairs [first, last) make it sharper. Writes to slot `slot`."""

    slot: int
    distance: int
    sharpness: float
    pairs: tuple[int, int]
    gain: float


POSITIONAL_HEADS = (
    PositionalHead(slot=1, distance=1, sharpness=8.0, pairs=(0, 28), gain=0.3),
    PositionalHead(slot=2, distance=2, sharpness=8.0, pairs=(0, 28), gain=0.3),
    PositionalHead(slot=RECENT, distance=4, sharpness=3.0, pairs=(5, 21), gain=0.6),
)


class Comparison(NamedTuple):
    """One part of a match: the query's slot against the key's slot, in rotary pairs [first, last)."""

    query_slot: int
    key_slot: int
    pairs: tuple[int, int]
    gain: float


COPYING = (
    Comparison(0, 1, (54, 64), 3.0),
    Comparison(1, 2, (45, 54), 3.0),
    Comparison(RECENT, RECENT, (38, 45), 3.2),
    Comparison(VOTES, SIGNATURE, (28, 38), 2.0),
)
LOCATING = (
    Comparison(0, 0, (52, 64), 3.0),
    Comparison(1, 1, (40, 52), 3.0),
    Comparison(RECENT, RECENT, (28, 40), 3.2),
)
SPELLING_PAIRS, SPELLING_GAIN, SPELLING_WITHIN = (38, 64), 3.0, 0.5
"""How the two tokens before a word are compared. `WITHIN`: weight of the word that is being written."""
MATCHING = (Comparison(0, 0, (44, 64), 3.0), Comparison(1, 1, (32, 44), 1.5))
SPARE_HEAD = 2
"""Guided in no layer before the one that should copy: it copies where a model is too shallow for that."""
SIGNATURE_RECENT = 1.5
"""Weight of what stands before a sentence; many begin with the same word."""
PASSED_ON = 0.3
"""Gain of signatures and votes."""
DISTANCE_PAIRS, DISTANCE_PENALTY = (10, 23), 2.2
"""Near keys score less: the text just written is not copied again."""


class StreamLayout(NamedTuple):
    """Where the residual stream keeps what; half-open column ranges `[start, start + size)`."""

    identity: int
    shifted: int
    meaning: int
    spelling: int

    def start(self, slot: int) -> int:
        """First column of a slot: 0 = the token itself, 1 and 2 = tokens back, then as named above."""
        if slot == SPELLING:
            return self.start(MEANING) + self.meaning
        return 0 if slot == 0 else self.identity + (slot - 1) * self.shifted

    def columns(self, slot: int) -> slice:
        """All columns of a slot."""
        size = {0: self.identity, MEANING: self.meaning, SPELLING: self.spelling}.get(slot, self.shifted)
        return slice(self.start(slot), self.start(slot) + size)


def stream_layout(hidden_size: int) -> StreamLayout:
    """Two fifths, at most a head, are the identity, a thirteenth each shifted slot and the spelling, a tenth the meaning."""
    part = hidden_size // 13
    return StreamLayout(min(HEAD_DIM, hidden_size * 2 // 5), part, hidden_size // 10, part)


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random matrix with orthonormal rows, or columns where there are fewer. Shape: [rows, columns]."""
    basis: Tensor = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), generator=generator))[0]
    return basis.T if rows <= columns else basis


@torch.no_grad()
def structured_init(
    model: LlamaForCausalLM, pieces: Sequence[str], meanings: Tensor | None = None, seed: int = 1
) -> None:
    """Overwrite the embedding and some heads with copying circuits.

    `pieces`: the tokens' strings. Shapes: meanings [at most num tokens, at least `stream_layout(...).meaning`], mean square 1.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = stream_layout(model.config.hidden_size)
    compress = orthonormal(layout.shifted, layout.identity, generator)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, 0.02, generator=generator)
    embedding[: len(pieces), : layout.identity] = identities(pieces, layout.identity, generator)
    model.model.norm.weight.fill_(FINAL_NORM)
    if meanings is not None:
        meaning = layout.columns(MEANING)
        embedding[: len(meanings), meaning] = MEANING_SCALE * meanings[:, : layout.meaning]
        model.model.norm.weight[meaning] = FINAL_NORM_OF_MEANING
    embedding[: len(pieces), layout.columns(SPELLING)] = SPELLING_SCALE * spellings(pieces, layout.spelling)
    layers = [layer.self_attn for layer in model.model.layers]
    _write_positional_heads(layers[0], layout, compress)
    for guide, comparisons in ((Guide.MATCH, MATCHING), (Guide.LOCATE, LOCATING), (Guide.COPY, COPYING)):
        if guide.layer < len(layers):
            _write_match_head(layers[guide.layer], guide.head, comparisons, layout, compress, generator)
    _write_signatures(layers, layout, generator)
    _write_spelling(model.model.layers, layout, compress, generator)
    if Guide.COPY.layer < len(layers):
        _write_passing_on(layers[Guide.COPY.layer], Guide.COPY.head, layout)
    else:
        _write_match_head(layers[-1], SPARE_HEAD, COPYING, layout, compress, generator)
        _write_passing_on(layers[-1], SPARE_HEAD, layout)
    if Guide.POINT.layer < len(layers):
        _write_passing_on(layers[Guide.POINT.layer], Guide.POINT.head, layout)


def left_alone(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Parameters of which training must leave a part at zero, each with 1 where it may change; none where all is in use.

    Nothing else is written where the spelling stands before it is read, and what is passed on is the spelling alone. Why: after
    2.8 M tokens without this, 7 % of misspelt words were nearest to what was meant, and 60 % by their embedding.
    """
    columns = stream_layout(model.config.hidden_size).columns(SPELLING)
    spelled = slice(Guide.SPELL.head * HEAD_DIM, (Guide.SPELL.head + 1) * HEAD_DIM)
    masks: dict[str, Tensor] = {}
    for number, layer in enumerate(model.model.layers[: Guide.SPELL.layer + 1]):
        path, attention = f"model.layers.{number}", layer.self_attn
        if number < Guide.SPELL.layer:
            masks[f"{path}.self_attn.o_proj.weight"] = _ones_but(attention.o_proj.weight, columns)
            masks[f"{path}.mlp.down_proj.weight"] = _ones_but(layer.mlp.down_proj.weight, columns)
        else:
            mask = masks[f"{path}.self_attn.v_proj.weight"] = _ones_but(attention.v_proj.weight, spelled)
            mask[:, columns] = 1.0
    parameters = dict(model.named_parameters())
    return {name: mask for name, mask in masks.items() if not parameters[name][mask == 0].any()}


def _ones_but(weight: Tensor, rows: slice) -> Tensor:
    mask = torch.ones_like(weight)
    mask[rows] = 0.0
    return mask


@torch.no_grad()
def centre_signatures(model: LlamaForCausalLM, normed: Tensor) -> None:
    """Take from all signatures what they have in common. `normed`: what layer START reads at starts of sentences, [N, hidden]."""
    attention = model.model.layers[Guide.START.layer].self_attn
    rows = slice(Guide.START.head * HEAD_DIM, Guide.START.head * HEAD_DIM + stream_layout(normed.shape[1]).shifted)
    attention.v_proj.bias[rows] = -(attention.v_proj.weight[rows] @ normed.mean(0))


def identities(pieces: Sequence[str], size: int, generator: torch.Generator) -> Tensor:
    """A random vector for each token, in part its word's and its stem's. Shape: [num tokens, size]."""
    shared: dict[str, Tensor] = {}

    def of(name: str) -> Tensor:
        if name not in shared:
            shared[name] = torch.randn(size, generator=generator)
        return shared[name]

    rows = []
    for piece in pieces:
        word = piece.removeprefix("Ġ").lower()
        own = torch.randn(size, generator=generator)
        if word.isalpha() and len(word) > 1:
            rows.append(OWN * own + WORD * of("word " + word) + STEM * of("stem " + word[:STEM_LETTERS]))
        else:
            rows.append((OWN**2 + WORD**2 + STEM**2) ** 0.5 * own)
    return torch.stack(rows)


def _clear_values(attention: Any, head: int) -> slice:
    """Zero what a head passes on; returns its rows."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    attention.v_proj.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    return rows


def _write_passing_on(attention: Any, head: int, layout: StreamLayout) -> None:
    """The token that is looked at is the token that is said."""
    rows = _clear_values(attention, head)
    rows = slice(rows.start, rows.start + layout.identity)
    attention.v_proj.weight[rows, : layout.identity] = torch.eye(layout.identity)
    attention.o_proj.weight[: layout.identity, rows] = torch.eye(layout.identity)


def _write_positional_heads(attention: Any, layout: StreamLayout, compress: Tensor) -> None:
    angles = ROPE_THETA ** (-torch.arange(NUM_PAIRS).float() / NUM_PAIRS)
    for head, wanted in enumerate(POSITIONAL_HEADS):
        start = _clear_values(attention, head).start
        attention.q_proj.weight[start : start + HEAD_DIM] = 0.0
        attention.k_proj.weight[start : start + HEAD_DIM] = 0.0
        first, last = wanted.pairs
        turn = angles[first:last] * wanted.distance
        attention.q_proj.bias[start + first : start + last] = wanted.sharpness * torch.cos(turn)
        attention.q_proj.bias[start + NUM_PAIRS + first : start + NUM_PAIRS + last] = -wanted.sharpness * torch.sin(
            turn
        )
        attention.k_proj.bias[start + first : start + last] = wanted.sharpness
        attention.v_proj.weight[start : start + layout.shifted, : layout.identity] = compress
        passed = wanted.gain * torch.eye(layout.shifted)
        attention.o_proj.weight[layout.columns(wanted.slot), start : start + layout.shifted] = passed


def _write_signatures(layers: Sequence[Any], layout: StreamLayout, generator: torch.Generator) -> None:
    """What the heads that choose the sentence pass on to each other."""
    size, known = layout.shifted, layout.start(SIGNATURE)
    signature = torch.zeros(size, known)
    for slot, gain in ((0, 1.0), (RECENT, SIGNATURE_RECENT)):
        columns = layout.columns(slot)
        signature[:, columns] = gain * orthonormal(size, columns.stop - columns.start, generator)
    passed = {Guide.START: (signature, slice(0, known), SIGNATURE)}
    passed[Guide.MATCH] = (torch.eye(size), layout.columns(SIGNATURE), VOTES)
    passed[Guide.GATHER] = (torch.eye(size), layout.columns(VOTES), VOTES)
    for guide, (projection, columns, slot) in passed.items():
        if guide.layer < len(layers):
            attention = layers[guide.layer]
            start = _clear_values(attention, guide.head).start
            attention.v_proj.weight[start : start + size, columns] = projection
            attention.o_proj.weight[layout.columns(slot), start : start + size] = PASSED_ON * torch.eye(size)


def _write_spelling(layers: Sequence[Any], layout: StreamLayout, compress: Tensor, generator: torch.Generator) -> None:
    """From what stands before a word to how it is spelt."""
    if Guide.SPELL.layer >= len(layers):
        return
    size, one, two = layout.shifted, layout.columns(1), layout.columns(2)
    turned = orthonormal(size, size, generator)  # so that the second token before is not taken for the first
    attention = layers[Guide.WORD.layer].self_attn
    start = _clear_values(attention, Guide.WORD.head).start
    attention.v_proj.weight[start : start + size, one] = torch.eye(size)
    attention.v_proj.weight[start : start + size, two] = turned
    attention.o_proj.weight[layout.columns(BEFORE), start : start + size] = PASSED_ON * torch.eye(size)

    attention = layers[Guide.SPELL.layer].self_attn
    _write_match_head(attention, Guide.SPELL.head, (), layout, compress, generator)
    start, (first, last) = Guide.SPELL.head * HEAD_DIM, SPELLING_PAIRS
    rows = start + torch.tensor([*range(first, last), *range(first + NUM_PAIRS, last + NUM_PAIRS)])
    projection = orthonormal(len(rows), size, generator) * SPELLING_GAIN
    attention.q_proj.weight[rows, layout.columns(0)] = projection @ compress
    attention.q_proj.weight[rows, one] = projection @ (turned + SPELLING_WITHIN * torch.eye(size))
    attention.k_proj.weight[rows, layout.columns(BEFORE)] = projection
    passed = _clear_values(attention, Guide.SPELL.head)
    passed = slice(passed.start, passed.start + layout.spelling)
    attention.v_proj.weight[passed, layout.columns(SPELLING)] = torch.eye(layout.spelling)
    for layer in layers[: Guide.SPELL.layer]:  # nothing else is written where it is read
        layer.self_attn.o_proj.weight[layout.columns(SPELLING)] = 0.0
        layer.mlp.down_proj.weight[layout.columns(SPELLING)] = 0.0
    attention.o_proj.weight[layout.columns(SPELLING), passed] = SPELT_AS * torch.eye(layout.spelling)


def _write_match_head(
    attention: Any,
    head: int,
    comparisons: Sequence[Comparison],
    layout: StreamLayout,
    compress: Tensor,
    generator: torch.Generator,
) -> None:
    start = head * HEAD_DIM
    for linear in (attention.q_proj, attention.k_proj):
        linear.weight[start : start + HEAD_DIM] = 0.0
    near = start + torch.arange(*DISTANCE_PAIRS)
    attention.q_proj.bias[near] = -DISTANCE_PENALTY
    attention.k_proj.bias[near] = DISTANCE_PENALTY
    for query_slot, key_slot, (first, last), gain in comparisons:
        rows = start + torch.tensor([*range(first, last), *range(first + NUM_PAIRS, last + NUM_PAIRS)])
        projection = orthonormal(len(rows), layout.shifted, generator) * gain
        for linear, slot in ((attention.q_proj, query_slot), (attention.k_proj, key_slot)):
            linear.weight[rows, layout.columns(slot)] = projection @ compress if slot == 0 else projection
