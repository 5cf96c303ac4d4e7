"""The type in which a target's weights and keys are held: from the configuration alone."""

from pathlib import Path

import pytest
from tiny_target import save_model

from ragspec.config import TargetConfig
from ragspec.engine.target import Target


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
    assert target.config.numerics_dtype == "float32-int8-v2-kv-bfloat16"
    assert config(folder, backend="torch").weight_dtype == config(folder, quantization="none").weight_dtype == "float32"
