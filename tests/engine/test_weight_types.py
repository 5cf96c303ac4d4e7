"""The type in which a target's weights and keys are held: from the configuration and the model's hash alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tiny_target import save_model

from ragspec.config import TargetConfig
from ragspec.engine.checkpoints import catalogue
from ragspec.engine.checkpoints.catalogue import KnownModel, Shape
from ragspec.engine.checkpoints.target_files import with_known_weights
from ragspec.engine.target import Target
from ragspec.errors import ConfigError
from ragspec.numerics.self_test import self_test


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("types") / "model")


@pytest.fixture
def listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`folder`, listed as float by the hash of its weights."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setattr(
        catalogue,
        "MODELS",
        (
            *catalogue.MODELS,
            KnownModel("tiny", "", "", Shape(1, 1, 1, 1), sha256=digest, quantization="none", reason="it is tiny"),
        ),
    )
    return folder


def config(folder: Path, **options: object) -> TargetConfig:
    return TargetConfig.model_validate({"model": str(folder), "cache_dir": str(folder.parent / "cache"), **options})


def test_every_model_is_int8_on_the_cpu_backend(folder: Path) -> None:
    """A model other than the default ran in float32, five times slower."""
    target = Target.load(config(folder), 64)
    assert (target.config.quantization, target.config.weight_dtype, target.config.kv_dtype) == (
        "int8",
        "int8",
        "bfloat16",
    )
    assert target.backend.kv_itemsize == 2
    assert with_known_weights(config(folder, backend="torch")).quantization == "none"
    assert with_known_weights(config(folder, quantization="none")).weight_dtype == "float32"
    assert with_known_weights(TargetConfig()).quantization == "int8"


def test_a_model_listed_as_float_is_float_with_float_keys(listed: Path) -> None:
    """A listed exception that nothing reads, or float weights beside keys of int8."""
    target = Target.load(config(listed), 64)
    assert (target.config.weight_dtype, target.config.kv_dtype, target.backend.kv_itemsize) == ("float32", "float32", 4)
    assert with_known_weights(config(listed, quantization="int8")).is_int8
    with pytest.raises(ConfigError, match="max_weight_bytes needs int8 weights, and tiny is float: it is tiny"):
        with_known_weights(config(listed, max_weight_bytes=2**20))


def test_the_numerics_id_tells_the_types_apart(folder: Path) -> None:
    """A replay in other weights passed as the same text."""
    ids = set()
    for options in ({}, {"quantization": "none"}, {"kv_cache_dtype": "float32"}):
        target = Target.load(config(folder, **options), 512)
        ids.add(self_test(target, 40, target.config.numerics_dtype, 1).numerics_id)
    assert len(ids) == 3
    assert config(folder).numerics_dtype == "float32-int8-v2-kv-bfloat16"
