"""Targets for several engines in one process, each with its own weights and pool; and an index for shards."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from shard_parts import write_index
from tiny_target import save_model

from ragspec.config import TargetConfig
from ragspec.engine.target import Target


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Sequence[Target]]:
    """`targets(n)`: n equal ones."""
    model, loaded = save_model("llama", tmp_path_factory.mktemp("replicas") / "llama"), list[Target]()

    def first(count: int) -> Sequence[Target]:
        while len(loaded) < count:
            loaded.append(Target.load(TargetConfig(model=str(model)), num_kv_slots=2048))
        return loaded[:count]

    return first


@pytest.fixture
def index_dir(tmp_path: Path) -> Path:
    return write_index(tmp_path / "index")
