"""A run of any trainer that ends early and goes on, beside one that does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ragspec.training.trainer import Trainer

T = TypeVar("T", bound=Trainer[Any, Any, Any])


def unbroken_and_resumed(
    make: Callable[[], T], path: Path, before: Callable[[T], object] = lambda trainer: None
) -> tuple[T, T]:
    """A run of four steps, and one that goes on from its checkpoint after two; `before` may change the trainer that loads it."""
    unbroken, broken, resumed = make(), make(), make()
    for trainer, num_steps in ((unbroken, 4), (broken, 2)):
        for _ in range(num_steps):
            trainer.train_step()
    broken.save(path / "checkpoint.safetensors")
    before(resumed)
    resumed.load(path / "checkpoint.safetensors")
    for _ in range(2):
        resumed.train_step()
    assert resumed.progress == unbroken.progress
    return unbroken, resumed
