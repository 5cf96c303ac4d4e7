"""What a caller says of a deployment and what it is: the same, or an error."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ragspec.cluster.deployment import check_agreement
from ragspec.cluster.engine_server import check_weights
from ragspec.cluster.launch import with_full_paths
from ragspec.config import PipelineConfig, load_settings
from ragspec.engine.checkpoints import catalogue
from ragspec.engine.checkpoints.catalogue import KnownModel, Shape
from ragspec.errors import ConfigError, ModelError

SECTIONS = ("target", "engine.max_kv_tokens", "encoder", "retriever")


def config(**given: Any) -> PipelineConfig:
    return load_settings(PipelineConfig, **{name.replace("__", "."): value for name, value in given.items()})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"retriever__index_dir": "other"}, "retriever.index_dir"),
        ({"target__model": "./other"}, "target.model"),
        ({"retriever__mode": "sparse"}, "retriever.mode"),
        ({"encoder__model": "./other"}, "encoder.model"),
        ({"engine__max_kv_tokens": 65_536}, "engine.max_kv_tokens"),
    ],
)
def test_a_job_that_names_something_else_is_refused(
    given: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--index B --cluster of A was answered from A, without a word and with exit code 0."""
    monkeypatch.chdir(tmp_path)
    deployed = with_full_paths(config(retriever__index_dir="index", target__model="./model"))
    with pytest.raises(ConfigError, match=f"deployment 'ragspec' runs with {named} "):
        check_agreement("ragspec", deployed, config(**given), SECTIONS)
    if named != "target.model":
        check_agreement("ragspec", deployed, config(**given), ("target",))
        check_agreement("ragspec", deployed, config(**given), SECTIONS, own=(named,))


def test_what_is_the_same_or_not_said_is_no_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that a deployment was brought up with is refused, since its folders have full names there."""
    monkeypatch.chdir(tmp_path)
    same = {"retriever__index_dir": "index", "target__model": "./model"}
    deployed = with_full_paths(config(**same, retriever__mode="sparse"))
    others = (
        config(retriever__index_dir=str(tmp_path / "index")),
        config(retriever__device="cpu", engine__max_num_seqs=3),
    )
    for given in (config(**same), config(), *others):
        check_agreement("ragspec", deployed, given, SECTIONS)


def test_a_replica_that_holds_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica in float32 among replicas in int8: a request's text depended on where it ran."""
    path = tmp_path / "model.gguf"
    published = with_full_paths(config(target__model=str(path))).target
    assert published.weight_dtype == "int8"
    path.write_bytes(b"listed")
    check_weights(published)
    listed = KnownModel(
        "listed",
        "",
        "",
        Shape(1, 1, 1, 1),
        sha256=hashlib.sha256(b"listed").hexdigest(),
        quantization="none",
        reason="measured",
    )
    monkeypatch.setattr(catalogue, "MODELS", (*catalogue.MODELS, listed))
    with pytest.raises(ModelError, match=r"would hold .* in float32, and the deployment has published int8"):
        check_weights(published)
    settled = with_full_paths(config(target__model=str(path))).target
    assert (settled.quantization, settled.weight_dtype) == ("none", "float32")
    check_weights(settled)
    check_weights(with_full_paths(config(target__model=str(path), target__quantization="int8")).target)
