"""Which runs of a head may go on from a checkpoint."""

import re
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from test_drafter_training import make_trainer

from ragspec.drafting.eagle.layout import EagleFamily
from ragspec.drafting.heads.learning import Inputs, LossWeights
from ragspec.errors import ConfigError
from ragspec.training.heads.trainer import DrafterPlan
from ragspec.training.trainer import WorkerGroup

OBJECTIVE_CHANGES: dict[str, Any] = {"num_steps": 2, "position_decay": 0.5, "inputs": Inputs.UNSHIFTED, "noise": 0.0}
OBJECTIVE_CHANGES |= {"loss_weights": LossWeights(1.0, 0.2)}
PLAN_CHANGES = {
    "seed": 1, "max_tokens": 200, "step_tokens": 240, "micro_tokens": 60, "peak_lr": 2e-3, "final_lr_share": 0.1,
    "warmup_steps": 9, "weight_decay": 0.0, "ema_decay": 0.9, "answers": "target", "num_answers": 7,
}  # fmt: skip
LENGTH_CHANGES: dict[str, Any] = {"total_tokens": 9_000, "minutes": 3.0, "checkpoint_every_s": 5.0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trainer = make_trainer(EagleFamily.EAGLE)
    trainer.train_step()
    trainer.save(tmp_path / "checkpoint.safetensors")
    return tmp_path / "checkpoint.safetensors"


def test_a_checkpoint_of_another_plan_is_refused(checkpoint: Path) -> None:
    """Half of the run would follow one plan and half another, and its record would name only the second."""
    trainer = make_trainer(EagleFamily.EAGLE)
    plan = trainer.plan
    others = {name: replace(plan, **{name: value}) for name, value in PLAN_CHANGES.items()}
    for name, value in OBJECTIVE_CHANGES.items():
        others[name] = replace(plan, objective=replace(plan.objective, **{name: value}))
    for name, value in (OBJECTIVE_CHANGES | PLAN_CHANGES).items():
        trainer.plan = others[name]
        shown = asdict(value) if is_dataclass(value) else value
        with pytest.raises(ConfigError, match=f"its {name} is .*, and this run's is {re.escape(str(shown))}"):
            trainer.load(checkpoint)
        assert trainer.progress.step == 0


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    """A record of a step that had no such loss; and a run so long that its records did not fit the header of the file."""
    trainer, again = make_trainer(EagleFamily.EAGLE), make_trainer(EagleFamily.EAGLE)
    trainer.history = [
        {"step": float(n), "tokens": 1e7 + n / 3, **({"guide": 0.1 * n} if n % 2 else {})} for n in range(9)
    ]
    trainer.history *= 30_000
    trainer.save(tmp_path / "checkpoint.safetensors")
    again.load(tmp_path / "checkpoint.safetensors")
    assert again.history == trainer.history


def test_a_checkpoint_of_other_workers_is_refused(checkpoint: Path) -> None:
    """Every worker draws by its rank among all: with another number each draws other texts."""
    with pytest.raises(ConfigError, match="its num_workers is 1, and this run's is 2"):
        make_trainer(EagleFamily.EAGLE, WorkerGroup(0, 2)).load(checkpoint)


def test_the_first_difference_is_named(checkpoint: Path) -> None:
    """The head's shape comes before the plan: a list of everything hides what to mend."""
    trainer = make_trainer(EagleFamily.EAGLE3, WorkerGroup(0, 2))
    trainer.plan = replace(trainer.plan, seed=1)
    with pytest.raises(ConfigError, match=r"its family is eagle, and this run's is eagle3$"):
        trainer.load(checkpoint)


def test_the_length_of_a_run_may_change(checkpoint: Path) -> None:
    """A run that turns out too short must not begin again."""
    trainer = make_trainer(EagleFamily.EAGLE)
    trainer.plan = replace(trainer.plan, **LENGTH_CHANGES)
    trainer.load(checkpoint)
    assert trainer.progress.step == 1


def test_every_field_of_the_plan_is_either_compared_or_free() -> None:
    """A new option that resumes silently."""
    known = {"objective", *PLAN_CHANGES, *LENGTH_CHANGES}
    assert set(DrafterPlan.__dataclass_fields__) == known
