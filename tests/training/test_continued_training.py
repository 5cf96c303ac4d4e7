"""A run of the target over weights that are trained already."""

from dataclasses import asdict

import pytest
from test_target_training import fake_stream, make_trainer

from ragspec.training.reference.examples import Lengths
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.trainer import STAGES, TargetPlan, continued


def lengths_drawn(plan: TargetPlan) -> list[Lengths]:
    """The length class of each step of a run, from its first to its last share."""
    trainer, drawn = make_trainer(), []

    def stream_for(lengths: Lengths, seed: int) -> PackStream:
        drawn.append(lengths)
        return fake_stream(lengths, seed)

    trainer.plan, trainer.stream_for = plan, stream_for
    for share in (0.0, 0.05, 0.09, 0.3, 0.8, 0.99):
        trainer.progress.tokens = round(share * plan.total_tokens)
        trainer.train_step()
    return drawn


def test_a_continued_run_takes_half_the_rate_and_no_shortest_examples() -> None:
    """The full rate undoes what was learnt; any other change would make it another run."""
    plan = TargetPlan(total_tokens=70_000, minutes=9.0, seed=3, warmup_steps=4, peak_lr=8e-4, ema_decay=0.9)
    found = asdict(continued(plan, "weights"))
    changed = ("peak_lr", "first_stage", "continued_from")
    assert [found.pop(name) for name in changed] == [pytest.approx(4e-4), 1, "weights"]
    assert found == {name: value for name, value in asdict(plan).items() if name in found}
    assert (plan.peak_lr, plan.first_stage) == (8e-4, 0)


@pytest.mark.slow
def test_a_plan_from_stage_one_never_draws_examples_of_stage_zero() -> None:
    """A trained model would spend a tenth of the run on texts shorter than any it is asked about."""
    plan, stages = TargetPlan(total_tokens=1_000_000, warmup_steps=1), [stage.lengths for stage in STAGES]
    assert lengths_drawn(plan) == [stages[0]] * 3 + stages[1:]
    assert lengths_drawn(continued(plan, "weights")) == [stages[1]] * 3 + stages[1:]
