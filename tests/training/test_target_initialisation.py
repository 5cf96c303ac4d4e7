"""The structured initialisation copies before any training."""

import torch

from ragspec.training.reference import training_attention
from ragspec.training.reference.guidance import Guidance, Guide
from ragspec.training.reference.initialisation.model import SIZES, build_target
from ragspec.training.reference.initialisation.stream_layout import HEAD_DIM, SPELLING, stream_layout
from ragspec.training.reference.initialisation.structured_init import SPARE_HEAD, centre_signatures, identities

PIECES = [f"<{number}>" for number in range(6144)]


def test_repeated_random_sequence_is_continued() -> None:
    """A sign or column slip in the shift or match heads would leave copying at chance, 1 in 6,144."""
    model = build_target(SIZES["cpu"], PIECES).eval()
    once = torch.randint(300, 6000, (4, 60), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([once, once], dim=1)
    with torch.inference_mode():
        guess = model(input_ids=ids).logits[:, 64:119].argmax(-1)
    assert (guess == ids[:, 65:120]).float().mean() > 0.95


def test_same_seed_same_weights() -> None:
    """A global generator used anywhere would make two builds differ."""
    first, second = (build_target(SIZES["tiny"], PIECES[:512], seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_layout_fits_the_stream_and_guides_fit_the_model() -> None:
    """Slots beyond the last column would be dropped silently; a guide of a head that is not there would guide none."""
    for size in SIZES.values():
        assert stream_layout(size.hidden_size).columns(SPELLING).stop <= size.hidden_size
    for name in ("cpu", "gpu"):
        assert all(g.layer < SIZES[name].num_layers and g.head < SIZES[name].num_heads for g in Guide)
    assert not any(g.head == SPARE_HEAD for g in Guide if 0 < g.layer < Guide.COPY.layer), "guided away from copying"


def test_words_are_like_themselves_with_a_space_or_a_capital() -> None:
    """ "Mill" at the start of a sentence that no question about a mill finds."""
    pieces = ["Ġmill", "Mill", "Ġgrinds", "Ġgrinding", "Ġriver", "7", "Ġ7"]
    mill, capital, one, other, river, seven, spaced = identities(pieces, 4096, torch.Generator().manual_seed(0))

    def alike(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.cosine_similarity(a, b, dim=0))

    assert alike(mill, capital) > alike(one, other) > 0.08 > abs(alike(mill, river))
    assert alike(mill, capital) < 0.6, "they must be told apart, too"
    assert abs(alike(seven, spaced)) < 0.08


def test_signatures_of_sentences_have_nothing_in_common() -> None:
    """What all sentences begin with hides what each begins with: similarities of 0.8, and the wrong sentence is quoted."""
    model = build_target(SIZES["cpu"], PIECES)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(40, SIZES["cpu"].hidden_size, generator=generator) + 2.0
    centre_signatures(model, starts)
    head = slice(Guide.START.head * HEAD_DIM, Guide.START.head * HEAD_DIM + stream_layout(starts.shape[1]).shifted)
    with torch.inference_mode():
        signatures = model.model.layers[Guide.START.layer].self_attn.v_proj(starts)[:, head]
    assert signatures.mean(0).abs().max() < 1e-4 < signatures.std(0).min()


def test_training_attention_equals_the_stock_kernel() -> None:
    """A wrong head grouping or mask would train a model that serving cannot reproduce."""
    model = build_target(SIZES["cpu"], PIECES).eval()
    ids = torch.randint(300, 6000, (2, 300), generator=torch.Generator().manual_seed(0))
    bias = torch.full((2, 300, 300), -30_000.0).triu(1)
    with torch.inference_mode():
        stock = model(input_ids=ids).logits
        model.set_attn_implementation(training_attention.register())
        ours = model(input_ids=ids, guidance=Guidance(bias)).logits
    assert torch.allclose(stock, ours, atol=2e-3)
