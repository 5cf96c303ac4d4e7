"""The structured initialisation copies and points before any training."""

import random
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerFast

from ragspec.training import training_attention
from ragspec.training.selection_init import MarkerTokens, token_rarity
from ragspec.training.structured_init import stream_layout
from ragspec.training.target_format import question_messages
from ragspec.training.target_model import SIZES, build_target
from ragspec.training.target_tokenizer import marker_tokens, train_tokenizer

MARKERS = MarkerTokens(user=2, context=3, assistant=4, space=6, quote=7, bracket=8, newline=9, digits=(10, 11, 12, 13))


def test_repeated_random_sequence_is_continued() -> None:
    """A sign or column slip in the shift or match heads would leave copying at chance, 1 in 6,144."""
    model = build_target(SIZES["cpu"], MARKERS).eval()
    once = torch.randint(300, 6000, (4, 60), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([once, once], dim=1)
    with torch.inference_mode():
        guess = model(input_ids=ids).logits[:, 64:119].argmax(-1)
    assert (guess == ids[:, 65:120]).float().mean() > 0.95


def test_same_seed_same_weights() -> None:
    """A global generator used anywhere would make two builds differ."""
    first, second = (build_target(SIZES["tiny"], MARKERS, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_layout_fits_the_stream() -> None:
    """Flags beyond the last column would be dropped silently."""
    for size in SIZES.values():
        assert stream_layout(size.hidden_size).start(4) <= size.hidden_size


def test_rarity_rises_with_the_token_id() -> None:
    """Reversed, common words would decide which sentence is quoted."""
    rarity = token_rarity(6144)
    assert rarity[300] < rarity[2000] < rarity[6000]


def _sentence(rng: random.Random, words: list[str]) -> str:
    return " ".join(rng.sample(words, 6)).capitalize() + "."


def test_overlap_with_the_question_points_at_a_sentence() -> None:
    """The vote head must prefer the start of the sentence that shares words with the question over the others'."""
    rng = random.Random(1)
    words = ["".join(rng.choice(["ka", "lo", "mi", "ru", "te", "so", "vu"]) for _ in range(3)) for _ in range(200)]
    texts = [_sentence(rng, words) + " " + _sentence(rng, words) for _ in range(3000)]
    tokenizer = train_tokenizer(texts, SIZES["cpu"].vocab_size)
    markers = marker_tokens(tokenizer)
    model = build_target(replace(SIZES["cpu"], vocab_size=len(tokenizer)), markers).eval()
    right = sum(_points_right(model, tokenizer, markers, rng, words) for _ in range(20))
    assert right >= 12  # 5 expected by chance


def _points_right(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    markers: MarkerTokens,
    rng: random.Random,
    words: list[str],
) -> bool:
    shuffled = rng.sample(words, 24)
    sentences = [" ".join(shuffled[i : i + 6]).capitalize() + "." for i in range(0, 24, 6)]
    gold = rng.randrange(4)
    asked = " ".join(w.strip(".") for w in sentences[gold].split()[2:5])
    prompt = tokenizer.apply_chat_template(
        question_messages(f"{asked}?", [" ".join(sentences[:2]), " ".join(sentences[2:])]),
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = tokenizer(prompt + '"', add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    starts = [ids[i] for i in range(1, len(ids)) if ids[i - 1] == markers.space]
    return len(starts) == 4 and max(range(4), key=lambda n: logits[starts[n]].item()) == gold


def test_training_attention_equals_the_stock_kernel() -> None:
    """A wrong head grouping or mask would train a model that serving cannot reproduce."""
    model = build_target(SIZES["cpu"], MARKERS).eval()
    ids = torch.randint(300, 6000, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        stock = model(input_ids=ids).logits
        model.set_attn_implementation(training_attention.register())
        ours = model(input_ids=ids).logits
    assert torch.allclose(stock, ours, atol=2e-3)
