"""The training job through Ray Train: two workers, one model, the same one every time."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.train_target import Run, train_together
from ragspec.training.target_trainer import TrainingPlan

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(not DATA.is_dir(), reason="the training data is not beside the checkout")
def test_two_workers_write_the_same_model_twice(tmp_path: Path) -> None:
    """A worker that draws from the clock, or a second writer, would show as another model or a torn one."""
    models = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        train_together(Run(DATA, tmp_path / name, "tiny", TrainingPlan(total_tokens=10_000, seed=3)), num_workers=2)
        assert (tmp_path / name / "curves.png").stat().st_size > 1000
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / name / "model"))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
