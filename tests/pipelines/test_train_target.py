"""The training job through Ray Train: two workers, one model, the same one every time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real_data import DATA, needs_data
from transformers import AutoModelForCausalLM

from pipelines import train_target
from pipelines.training_run import is_probed

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
