"""Vectors of how tokens are spelt."""

import random

import torch
from real_data import DATA, needs_data

from ragspec.training.grammar_errors import misspell
from ragspec.training.reference.guidance import Guide
from ragspec.training.reference.initialisation.model import SIZES, build_target
from ragspec.training.reference.initialisation.spelling import spellings
from ragspec.training.reference.initialisation.stream_layout import HEAD_DIM, MEANING, SPELLING, stream_layout
from ragspec.training.reference.initialisation.structured_init import MEANING_SCALE, SPELLING_SCALE
from ragspec.training.reference.tokenizer import token_pieces, train_tokenizer
from ragspec.training.sentences import sentences_of

WORDS = "there these house horse because became people purple believe friend different government".split()
PIECES = [f"Ġ{word}" for word in WORDS] + ["Ġb", "ec", "u", "ase", "Ġpe", "op", "el", ",", "Ġ7", "é"]


def nearest(pieces: list[str], vectors: torch.Tensor, written: list[str]) -> str:
    meant = torch.stack([vectors[pieces.index(piece)] for piece in written]).mean(0)
    return pieces[int((vectors @ meant).argmax())]


def test_the_tokens_of_a_misspelt_word_are_near_the_word() -> None:
    """Letters counted once for each token, or without their order: "purple" for "peopel"."""
    vectors = spellings(PIECES, 12)
    assert nearest(PIECES, vectors, ["Ġb", "ec", "u", "ase"]) == "Ġbecause"
    assert nearest(PIECES, vectors, ["Ġpe", "op", "el"]) == "Ġpeople"


def test_what_is_no_word_is_spelt_like_nothing() -> None:
    """A comma that looks like a word for want of letters."""
    vectors = spellings(PIECES, 12)
    norms = dict(zip(PIECES, vectors.norm(dim=1).tolist(), strict=True))
    assert norms[","] == norms["Ġ7"] == norms["é"] == 0 and abs(norms["Ġhouse"] - 1) < 1e-5
    assert spellings(PIECES, 400).shape == (len(PIECES), 400), "more columns than can be told apart stay empty"


def test_spellings_stand_in_their_slot_of_the_embedding() -> None:
    """Overwritten by what a slot beside it holds."""
    size = SIZES["cpu"]
    pieces = PIECES + [f"<{number}>" for number in range(size.vocab_size - len(PIECES))]
    layout = stream_layout(size.hidden_size)
    meanings = torch.ones(size.vocab_size, layout.meaning)
    embedding = build_target(size, pieces, meanings=meanings).model.embed_tokens.weight
    assert torch.allclose(embedding[:, layout.columns(SPELLING)], SPELLING_SCALE * spellings(pieces, layout.spelling))
    assert torch.allclose(embedding[:, layout.columns(MEANING)], MEANING_SCALE * meanings)


def test_the_head_that_spells_looks_at_the_word_that_comes_next() -> None:
    """A slot, a projection or a layer that does not fit: the head looks anywhere, and only training would find the word."""
    model = build_target(SIZES["cpu"], [f"<{number}>" for number in range(6144)]).eval()
    model.set_attn_implementation("eager")
    attention, head = model.model.layers[Guide.WORD.layer].self_attn, Guide.WORD.head * HEAD_DIM
    with torch.no_grad():  # every token is a word of its own, as trained
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight[head : head + HEAD_DIM] = 0.0
            linear.bias[head : head + 28] = 8.0
    once = torch.randint(300, 6000, (1, 30), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        weights = model(input_ids=torch.cat([once, once], dim=1), output_attentions=True).attentions
    looked_at = weights[Guide.SPELL.layer][0, Guide.SPELL.head, 31:59].argmax(-1)
    assert (looked_at == torch.arange(2, 30)).float().mean() > 0.8


@needs_data
def test_most_misspelt_words_are_nearest_to_what_was_meant() -> None:
    """A weight of pairs, a scale or a normalisation that hides the word (measured: 30 to 78 % by those alone)."""
    text = (DATA / "wikitext2/test.txt").read_text()[:600_000]
    tokenizer = train_tokenizer(sentences_of(text), SIZES["cpu"].vocab_size)
    pieces, rng = token_pieces(tokenizer), random.Random(0)
    vectors = spellings(pieces, stream_layout(SIZES["cpu"].hidden_size).spelling)
    words = [piece[1:] for piece in pieces if piece[0] == "Ġ" and len(piece) > 5 and piece[1:].isalpha()]
    written = {word: tokenizer.tokenize(f" {misspell(word, rng)}") for word in rng.sample(words, 500)}
    found = [nearest(pieces, vectors, tokens) == f"Ġ{word}" for word, tokens in written.items() if len(tokens) > 1]
    assert len(found) > 400 and sum(found) / len(found) > 0.65
