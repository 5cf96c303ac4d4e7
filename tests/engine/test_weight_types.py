"""The type in which a target's weights and keys are held: from the configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_target import save_model

from ragspec.config import TargetConfig
from ragspec.engine.target import Target
from ragspec.numerics.self_test import self_test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("types") / "model")


def config(folder: Path, **options: object) -> TargetConfig:
    return TargetConfig.model_validate({"model": str(folder), "cache_dir": str(folder.parent / "cache"), **options})


def test_every_model_is_int8_on_the_cpu_backend(folder: Path) -> None:
    """A model other than the default ran in float32, five times slower."""
    target = Target.load(config(folder), 64)
    assert (target.config.weight_dtype, target.config.kv_dtype) == ("int8", "bfloat16")
    assert target.backend.kv_itemsize == 2
    assert config(folder, backend="torch").weight_dtype == config(folder, quantization="none").weight_dtype == "float32"


def test_the_numerics_id_tells_the_types_apart(folder: Path) -> None:
    """A replay in other weights passed as the same text."""
    ids = set()
    for options in ({}, {"quantization": "none"}, {"kv_cache_dtype": "float32"}):
        target = Target.load(config(folder, **options), 512)
        ids.add(self_test(target, 40, target.config.numerics_dtype, 1).numerics_id)
    assert len(ids) == 3
    assert config(folder).numerics_dtype == "float32-int8-v2-kv-bfloat16"
