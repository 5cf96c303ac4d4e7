"""Structured initialisation: a small Llama that copies before its first training step.

Owns the starting weights of the reference target; never trains. The residual stream is split into
`[token identity | token 1 back | token 2 back | recent tokens | signature | votes | before | meaning | spelling | free use]`.

Tokens of the same word have similar identities: with or without the space before them or a capital, and, less so, with
the same beginning. Tokens of similar neighbours in the training texts have similar
meanings (see `initialisation/meanings.py`);
no circuit reads them, all that is learnt may.

Layer 0 holds positional heads. Their query and key weights are zero; their *biases* alone make the rotary score peak at
a fixed distance (query bias = key bias rotated by that distance). Two sharp heads read the token 1 and 2 places back,
one blunt head averages the last seven or so; each writes the compressed identity to its part of the stream.

The head that copies compares the current token with the one before the key, the token before with the one two before the
key, and the recent tokens of both; value and output pass on the identity of the token found there towards the tied output
embedding. The head that locates: the same tokens with the key's own, so that what is known of a token in a passage is known
of its copy.

Which sentence is quoted travels as a signature: a random projection of what a sentence begins with and what stands before it.
The head that looks for sentence starts writes it to every token of the sentence. The head that looks for a question's words in
the passages brings each word the signatures of the sentences it stands in, a token of the answer gathers these votes, and the
head that copies compares them with the signature of each key. Where these heads look is learnt (`guidance`), not written here.

How a token is spelt is read by one head alone (`ragspec.training.reference.initialisation.spelling_head`).

Needs `attention_bias=True`, a large `rope_theta` (slow dimensions), tied embeddings and a head dimension of 128.
Source: induction heads, Olsson et al. 2022 (arXiv 2209.11895), built here by hand.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ragspec.training.reference.guidance import Guide
from ragspec.training.reference.initialisation.match_heads import (
    NUM_PAIRS,
    Comparison,
    orthonormal,
    pass_on,
    write_match_head,
)
from ragspec.training.reference.initialisation.spelling import spellings
from ragspec.training.reference.initialisation.spelling_head import write_spelling
from ragspec.training.reference.initialisation.stream_layout import (
    HEAD_DIM,
    MEANING,
    RECENT,
    SIGNATURE,
    SPELLING,
    VOTES,
    StreamLayout,
    stream_layout,
)

ROPE_THETA = 10_000_000.0
FINAL_NORM, FINAL_NORM_OF_MEANING = 0.35, 0.05
"""Gain of the last normalisation: at 1, the logits of long identities start the training at a loss of 28 nats, not 12. What a
token means says little of the next."""
MEANING_SCALE = 0.22
"""Standard deviation of what a token means, in the embedding."""
SPELLING_SCALE = 2.5
"""Length of how a token is spelt, in the embedding."""
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
MATCHING = (Comparison(0, 0, (44, 64), 3.0), Comparison(1, 1, (32, 44), 1.5))
SPARE_HEAD = 3
"""Guided in no layer behind the first: it copies where a model is too shallow for the layer that should."""
SIGNATURE_RECENT = 1.5
"""Weight of what stands before a sentence; many begin with the same word."""
PASSED_ON = 0.3
"""Gain of signatures and votes."""


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
            write_match_head(layers[guide.layer], guide.head, comparisons, layout, compress, generator)
    _write_signatures(layers, layout, generator)
    write_spelling(model.model.layers, layout, compress, generator)
    if Guide.COPY.layer < len(layers):
        saying = [(layers[Guide.COPY.layer], Guide.COPY.head), (layers[Guide.POINT.layer], Guide.POINT.head)]
    else:
        write_match_head(layers[-1], SPARE_HEAD, COPYING, layout, compress, generator)
        saying = [(layers[-1], SPARE_HEAD)]
    for attention, head in saying:  # the token that is looked at is the token that is said
        pass_on(attention, head, torch.eye(layout.identity), layout.columns(0), layout.columns(0))


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


def _write_positional_heads(attention: Any, layout: StreamLayout, compress: Tensor) -> None:
    angles = ROPE_THETA ** (-torch.arange(NUM_PAIRS).float() / NUM_PAIRS)
    for head, wanted in enumerate(POSITIONAL_HEADS):
        pass_on(attention, head, compress, layout.columns(0), layout.columns(wanted.slot), wanted.gain)
        start, (first, last) = head * HEAD_DIM, wanted.pairs
        attention.q_proj.weight[start : start + HEAD_DIM] = 0.0
        attention.k_proj.weight[start : start + HEAD_DIM] = 0.0
        turn, other = angles[first:last] * wanted.distance, start + NUM_PAIRS
        attention.q_proj.bias[start + first : start + last] = wanted.sharpness * torch.cos(turn)
        attention.q_proj.bias[other + first : other + last] = -wanted.sharpness * torch.sin(turn)
        attention.k_proj.bias[start + first : start + last] = wanted.sharpness


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
            pass_on(layers[guide.layer], guide.head, projection, columns, layout.columns(slot), PASSED_ON)
