"""What a caller says of a deployment and what it is: the same, or an error."""

from pathlib import Path
from typing import Any

import pytest

from ragspec.cluster.deployment import check_agreement
from ragspec.cluster.launch import with_full_paths
from ragspec.config import PipelineConfig, load_settings
from ragspec.errors import ConfigError

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
