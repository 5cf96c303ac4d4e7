"""The shipped reference target: form on disk, and that it does what its card says at all."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ragspec
from ragspec.drafting.eagle.checkpoint import check_fits, read_head
from ragspec.training.reference.text_format import CHAT_TEMPLATE, CONTEXT_ROLE_FLAG, parse_answer, question_messages

ASSETS = Path(ragspec.__file__).parent / "assets"
TARGET = ASSETS / "reference_target"
PASSAGES = [
    "The lighthouse on Gull Rock was built in 1871. Its keeper lived there alone.",
    "The harbour railway closed in 1954. Most of the track was sold for scrap.",
]


def test_files_fit_a_repository() -> None:
    """A shard over 15 MB or a model over 40 MB would not be accepted where the code is kept."""
    sizes = [file.stat().st_size for file in ASSETS.rglob("*") if file.is_file()]
    assert max(sizes) <= 15_000_000 and sum(sizes) <= 40_000_000
    assert {file.suffix for file in TARGET.iterdir()} == {".safetensors", ".json", ".jinja"}


def test_card_names_the_model_that_lies_beside_it() -> None:
    """A card left over from other weights describes a model nobody has."""
    card = (ASSETS / "README.md").read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(TARGET)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters" in card
    assert f"width {model.config.hidden_size}, " in card
    assert all(picture.name in card for picture in ASSETS.glob("*.png"))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_heads_fit_the_target_beside_them(name: str) -> None:
    """Another target is put in place, and whoever asks for the shipped head gets an error."""
    target = AutoConfig.from_pretrained(TARGET)
    config = read_head(ASSETS / "reference_heads" / name).config
    check_fits(config, target.vocab_size, target.hidden_size, target.num_hidden_layers)


def test_tokenizer_carries_the_template_of_the_code() -> None:
    """A template changed in the code but not in the shipped files would serve another format than was trained."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.init_kwargs[CONTEXT_ROLE_FLAG] is True


def test_quotes_a_passage_word_for_word() -> None:
    """Weights and tokenizer that do not belong together would still load, and write nonsense."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prompt = tokenizer.apply_chat_template(
        question_messages("What is said about the harbour railway?", PASSAGES),
        tokenize=False,
        add_generation_prompt=True,
    )
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    answer = parse_answer(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert answer is not None and any(answer[0] in passage for passage in PASSAGES)
