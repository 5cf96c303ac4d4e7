"""Checkpoints, schedule, workers and export of the training loop, on a tiny model with made-up data."""

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.train.training_run import draw_curves
from ragspec.errors import ConfigError
from ragspec.training.reference import training_attention
from ragspec.training.reference.batches import ExampleEncoder
from ragspec.training.reference.examples import Example, Lengths
from ragspec.training.reference.export import export_target
from ragspec.training.reference.guidance import Guidance, Guide
from ragspec.training.reference.initialisation.model import SIZES, build_target
from ragspec.training.reference.initialisation.spelling_head import left_alone
from ragspec.training.reference.initialisation.stream_layout import HEAD_DIM, SPELLING, stream_layout
from ragspec.training.reference.packs import Pack, PackStream, Turn
from ragspec.training.reference.steps import draw_rows
from ragspec.training.reference.text_format import message
from ragspec.training.reference.tokenizer import token_pieces, train_tokenizer
from ragspec.training.reference.trainer import STAGES, TargetPlan, TargetTrainer
from ragspec.training.trainer import SINGLE_WORKER, WorkerGroup

TEXTS = ["The cat sat on the mat. A dog ran home at noon."] * 20


class FakeStream:
    """Sentences of random words."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self) -> Example:
        words = " ".join(self.rng.choice("cat dog mat home noon sat ran".split()) for _ in range(12))
        return Example([message("user", words), message("assistant", words)])

    def draw_pack(self) -> Pack:
        words = [" ".join(self.rng.choice("cat dog mat home noon sat ran".split()) for _ in range(9)) for _ in range(3)]
        sentences = [f"The {each}." for each in words]
        turns = [Turn(f"Who {sentence[5:9]}?", sentence, 1, "cat") for sentence in sentences]
        return Pack([" ".join(sentences)], turns)


def fake_stream(_: Lengths, seed: int) -> PackStream:
    return FakeStream(seed)  # type: ignore[return-value]


def make_trainer(total_tokens: int = 30_000, workers: WorkerGroup = SINGLE_WORKER, size: str = "tiny") -> TargetTrainer:
    tokenizer = train_tokenizer(TEXTS, SIZES["tiny"].vocab_size)
    model = build_target(SIZES[size], token_pieces(tokenizer))
    model.set_attn_implementation(training_attention.register())
    plan = TargetPlan(total_tokens=total_tokens, warmup_steps=1)
    return TargetTrainer(model, ExampleEncoder(tokenizer), fake_stream, plan, workers=workers)


def test_resumed_run_equals_an_unbroken_one(tmp_path: Path) -> None:
    """Optimizer state, averages or the data position lost at a kill would change the result."""
    unbroken = make_trainer()
    for _ in range(4):
        unbroken.train_step()
    broken = make_trainer()
    for _ in range(2):
        broken.train_step()
    broken.save(tmp_path / "checkpoint.safetensors")
    resumed = make_trainer()
    resumed.load(tmp_path / "checkpoint.safetensors")
    for _ in range(2):
        resumed.train_step()
    assert resumed.progress == unbroken.progress
    for a, b in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(unbroken.average, resumed.average, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("change", "reason"), [
    ({"seed": 1}, "its seed is 0, and this run's is 1"),
    ({"first_stage": 1}, "its first_stage is 0, and this run's is 1"),
    ({"positional_lr_share": 0.5}, "its positional_lr_share is 0.2"),
])  # fmt: skip
def test_a_checkpoint_of_another_plan_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Half of the run would follow one plan and half another, and the card would name only the second."""
    first, other = make_trainer(), make_trainer()
    first.save(tmp_path / "checkpoint.safetensors")
    other.plan = replace(other.plan, **change)
    with pytest.raises(ConfigError, match=reason):
        other.load(tmp_path / "checkpoint.safetensors")
    other.plan = replace(first.plan, total_tokens=77, minutes=2.0)
    other.load(tmp_path / "checkpoint.safetensors")


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    """A tensor's shape in a traceback is all that was said."""
    make_trainer(size="cpu").save(tmp_path / "checkpoint.safetensors")
    with pytest.raises(ConfigError, match="its vocab_size is 6144, and this run's is 512"):
        make_trainer().load(tmp_path / "checkpoint.safetensors")


def test_interrupted_save_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in the middle of writing must not leave a torn file under the checkpoint's name."""
    trainer = make_trainer()
    trainer.save(tmp_path / "checkpoint.safetensors")
    before = (tmp_path / "checkpoint.safetensors").read_bytes()

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    trainer.train_step()
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path / "checkpoint.safetensors")
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_structured_layers_take_smaller_steps() -> None:
    """At the common rate the heads that look back, whose scores are one large product, are soon gone."""
    trainer = make_trainer(size="cpu")
    shares = {id(p): group["lr_share"] for group in trainer.optimizer.param_groups for p in group["params"]}
    found = {name: shares[id(p)] for name, p in trainer.model.named_parameters()}
    assert set(found.values()) == {0.2, 0.3, 1.0}
    slow = ("model.embed", "model.layers.0.")
    assert all((share < 1) == name.startswith(slow) for name, share in found.items())


def test_nothing_is_written_over_how_a_word_is_spelt() -> None:
    """What is learnt in the columns of spellings before they are read: two misspelt words in three are lost."""
    trainer = make_trainer(size="cpu")
    for _ in range(2):
        trainer.train_step()
    model, columns = trainer.model, stream_layout(trainer.model.config.hidden_size).columns(SPELLING)
    ids = torch.arange(300, 364)[None]
    with torch.inference_mode():
        streams = model(
            input_ids=ids, guidance=Guidance(torch.zeros(1, 64, 64)), output_hidden_states=True
        ).hidden_states
    for layer in range(1, Guide.SPELL.layer + 1):
        assert torch.equal(streams[layer][..., columns], streams[0][..., columns])
        assert not torch.equal(streams[layer][..., : columns.start], streams[0][..., : columns.start])
    values = model.model.layers[Guide.SPELL.layer].self_attn.v_proj
    head = slice(Guide.SPELL.head * HEAD_DIM, (Guide.SPELL.head + 1) * HEAD_DIM)
    assert not values.bias[head].any() and not values.weight[head, : columns.start].any()
    fresh = make_trainer(size="cpu").model.model.layers[Guide.SPELL.layer].self_attn.v_proj
    assert not torch.equal(values.weight[head, columns], fresh.weight[head, columns]), "what it passes on is learnt"
    assert not left_alone(make_trainer().model), "a model too shallow to spell"


def _train_as(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    trainer = make_trainer(workers=WorkerGroup(rank, 2))
    trainer.history.append(trainer.train_step())
    trainer.save(Path(folder) / f"{rank}.safetensors")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_workers_train_one_model_on_the_data_of_both(tmp_path: Path) -> None:
    """Gradients that are not summed let workers drift apart; a mean of their means weighs short answers too much."""
    torch.multiprocessing.spawn(_train_as, args=(str(tmp_path),), nprocs=2)
    first, second, alone = (make_trainer() for _ in range(3))
    first.load(tmp_path / "0.safetensors")
    second.load(tmp_path / "1.safetensors")
    stage = STAGES[0]
    batches = []
    for rank in range(2):
        stream = fake_stream(stage.lengths, rank)
        batches += draw_rows(stream, alone.rows, stage.max_tokens, stage.step_tokens, alone.plan.micro_tokens)
    total, num_guided = sum(b.weights.sum() for b in batches), sum((b.num_guided for b in batches), Counter[Guide]())
    looking = Counter[str]()
    for batch in batches:
        losses, guided = alone.token_losses(batch)
        looking.update({f"guide_{g.name.lower()}": float(each.detach()) / num_guided[g] for g, each in guided.items()})
        loss = (losses * batch.weights).sum() / total
        loss = loss + sum(guide.weight * each / num_guided[guide] for guide, each in guided.items())
        loss.backward()
    torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 1.0)
    for group in alone.optimizer.param_groups:
        group["lr"] = alone.learning_rate(0.0) * group["lr_share"]
    alone.optimizer.step()
    assert {name: first.history[0][name] for name in looking} == pytest.approx(looking, rel=1e-3)
    assert first.progress.tokens == second.progress.tokens == sum(b.ids.numel() for b in batches)
    for a, b, c in zip(*(t.model.parameters() for t in (first, second, alone)), strict=True):
        assert torch.equal(a, b)
        difference = (a - c).abs().mean()
        assert difference < 1e-6  # on average: the sign of a gradient that is nearly zero is noise


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
    trainer.probes.append({"tokens": 10, "quote_exact": 0.5})
    draw_curves(trainer, "answer_loss", "", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
