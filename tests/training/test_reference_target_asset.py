"""The shipped reference target: form on disk, and that it does what its card says at all."""

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import ragspec
from ragspec.drafting.eagle.checkpoint import check_fits, read_head

ASSETS = Path(ragspec.__file__).parent / "assets"
TARGET = ASSETS / "reference_target"


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
