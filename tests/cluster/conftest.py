"""Targets for several engines in one process: each has its own weights and pool."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tiny_target import save_model

from ragspec.config import TargetConfig
from ragspec.engine.target import Target


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("replicas") / "llama")


@pytest.fixture(scope="session")
def targets(model_folder: Path) -> Callable[[int], Sequence[Target]]:
    """`targets(n)`: n equal ones."""
    loaded: list[Target] = []

    def first(count: int) -> Sequence[Target]:
        while len(loaded) < count:
            loaded.append(Target.load(TargetConfig(model=str(model_folder)), num_kv_slots=2048))
        return loaded[:count]

    return first
