"""Checkpoints, schedule and export of the training loop, on a tiny model with made-up data."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragspec.training.target_batches import ExampleEncoder
from ragspec.training.target_examples import Example, ExampleStream, Lengths
from ragspec.training.target_export import draw_curves, export_target
from ragspec.training.target_format import message
from ragspec.training.target_model import SIZES, build_target
from ragspec.training.target_tokenizer import marker_tokens, train_tokenizer
from ragspec.training.target_trainer import TargetTrainer, TrainingPlan

TEXTS = ["The cat sat on the mat. A dog ran home at noon."] * 20


class FakeStream:
    """Sentences of random words."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self) -> Example:
        words = " ".join(self.rng.choice("cat dog mat home noon sat ran".split()) for _ in range(12))
        return Example([message("user", words), message("assistant", words)])


def fake_stream(_: Lengths, seed: int) -> ExampleStream:
    return FakeStream(seed)  # type: ignore[return-value]


def make_trainer(total_tokens: int = 30_000) -> TargetTrainer:
    tokenizer = train_tokenizer(TEXTS, SIZES["tiny"].vocab_size)
    model = build_target(SIZES["tiny"], marker_tokens(tokenizer))
    return TargetTrainer(model, ExampleEncoder(tokenizer), fake_stream, TrainingPlan(total_tokens=total_tokens))


def test_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    """Optimizer state, averages or the data position lost at a kill would change the result."""
    unbroken = make_trainer()
    for _ in range(4):
        unbroken.train_step()
    broken = make_trainer()
    for _ in range(2):
        broken.train_step()
    broken.save(tmp_path / "checkpoint.pt")
    resumed = make_trainer()
    resumed.load(tmp_path / "checkpoint.pt")
    for _ in range(2):
        resumed.train_step()
    assert resumed.progress == unbroken.progress
    for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(unbroken.average, resumed.average, strict=True):
        assert torch.equal(a, b)


def test_interrupted_save_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in the middle of writing must not leave a torn file under the checkpoint's name."""
    trainer = make_trainer()
    trainer.save(tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def torn(_: object, file: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_run_ends_with_its_plan_and_the_loss_falls() -> None:
    """A schedule that never reaches 1 would train for ever."""
    trainer = make_trainer()
    records = list(trainer.run())
    assert trainer.share_done() >= 1.0
    assert records[-1]["answer_loss"] < records[0]["answer_loss"]
    assert records[-1]["lr"] < max(r["lr"] for r in records)


def test_export_loads_with_plain_transformers(tmp_path: Path) -> None:
    """The shipped model must need none of our code, in shards small enough for a repository."""
    trainer = make_trainer()
    trainer.history.append(trainer.train_step() | {"elapsed_s": 0.0})
    export_target(trainer.averaged_model(), trainer.encoder.tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert all(f.stat().st_size <= 15_000_000 for f in tmp_path.glob("*.safetensors"))
    draw_curves(trainer.history, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
