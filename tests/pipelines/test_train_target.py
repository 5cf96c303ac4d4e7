"""The training job through Ray Train: two workers, one model, the same one every time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_data import DATA, needs_data
from tiny_target import tiny_tokenizer
from transformers import AutoModelForCausalLM

from pipelines import train_target
from pipelines.train.training_run import is_probed
from ragspec.errors import ConfigError
from ragspec.training.reference.initialisation.model import SIZES
from ragspec.training.reference.initialisation.stream_layout import stream_layout
from ragspec.training.reference.sources import Sources
from ragspec.training.reference.tokenizer import train_tokenizer
from ragspec.training.reference.trainer import TargetPlan
from ragspec.training.trainer import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def test_probes_stand_at_even_shares_however_often_a_run_is_taken_up() -> None:
    """A run that was lengthened when it was taken up was never probed again."""
    due = [step for step in range(1, 101) if is_probed(8, step, (step - 1) / 100, step / 100)]
    assert due == [1, 13, 25, 38, 50, 63, 75, 88, 100]
    lengthened = [step for step in range(101, 201) if is_probed(8, step, (step - 1) / 200, step / 200)]
    assert lengthened == [125, 150, 175, 200]


def test_a_missing_data_directory_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, after the run's folder was made."""
    options = ["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["train_target", *options])
    with pytest.raises(SystemExit, match="error: there is no data directory"):
        train_target.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("what", "reason"), [
    ("nothing", "holds no exported model"), ("no tokenizer", "holds no exported model"),
    ("another tokenizer", "no model of this recipe"), ("too few embeddings", "tokens and embeddings for 100"),
])  # fmt: skip
def test_what_is_no_model_of_the_recipe_is_not_continued(
    what: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer was trained and written into the folder of another model, which then learnt from foreign numbers."""
    model = tmp_path / "model"
    if what != "nothing":
        model.mkdir()
        vocabulary = 100 if what == "too few embeddings" else 320
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocabulary}))
    if what == "another tokenizer":
        tiny_tokenizer().save_pretrained(model)
    if what == "too few embeddings":
        train_tokenizer(["The cat sat on the mat, and the dog on the log."] * 9, 320).save_pretrained(model)
    there = sorted(path.name for path in tmp_path.rglob("*"))
    options = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--continue-from", str(model)]
    monkeypatch.setattr(sys, "argv", ["train_target", *options])
    with pytest.raises(SystemExit, match=reason):
        train_target.main()
    assert sorted(path.name for path in tmp_path.rglob("*")) == there


def test_a_folder_of_another_size_is_refused(tmp_path: Path) -> None:
    """`cpu` and `gpu` are as wide: a run of one went on with the tokenizer of the other."""
    tokenizer, columns = tiny_tokenizer(), stream_layout(SIZES["gpu"].hidden_size).meaning
    write_checkpoint(
        tmp_path / "meanings.safetensors", {"meanings": torch.ones(len(tokenizer), columns)}, {"size": "cpu"}
    )
    run = train_target.TargetRun(data_dir=tmp_path, out=tmp_path, size="gpu", plan=TargetPlan(total_tokens=1))
    with pytest.raises(ConfigError, match="another size"):
        train_target.obtain_meanings(run, tokenizer, Sources())


@pytest.mark.slow
@pytest.mark.ray
@needs_data
def test_two_workers_write_the_same_model_twice(tmp_path: Path) -> None:
    """A worker that draws from the clock, or a second writer, would show as another model or a torn one."""
    models = []
    for out in (tmp_path / "first", tmp_path / "second"):
        options = ["--data", DATA, "--out", out, "--size", "tiny", "--tokens", "10000", "--seed", "3", "--workers", "2"]
        command = [sys.executable, "-m", "pipelines.train_target", *map(str, options)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=800)
        assert (out / "curves.png").stat().st_size > 1000
        models.append(AutoModelForCausalLM.from_pretrained(out / "model"))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
