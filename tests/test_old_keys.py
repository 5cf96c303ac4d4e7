"""Configurations of earlier versions are read: what is gone is named, and nothing that changes a text is left out silently."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pipelines.batch.output import OutputFolder
from ragspec import old_keys
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import load_config, load_settings
from ragspec.errors import ConfigError
from ragspec.old_keys import OLD_KEYS, OldKey, with_new_keys

WRITTEN = """
topology: {replicas: 2, spares_per_node: 1, fail_closed: false}
drafting:
  drafters: [copy, recycling, draft_model, small]
  max_recycling_bytes: 1000000
  draft_model: {path: /models/other, vocabulary: any}
  draft_models: {small: {path: /models/small, vocabulary: target}}
"""


def test_a_file_of_an_earlier_version_is_read_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: an upgrade refuses every configuration that names a key which is gone."""
    path = tmp_path / "ragspec.yaml"
    path.write_text(WRITTEN)
    with caplog.at_level(logging.WARNING):
        config = load_settings(ClusterConfig, path)
    assert config.topology.replicas == 2
    assert not config.retriever.fail_closed
    assert config.drafting.drafters == ("copy", "small")
    assert config.drafting.draft_model.path == ""  # its drafts were of another vocabulary
    assert config.drafting.draft_models["small"].path == "/models/small"
    (record,) = caplog.records
    for name in (
        "topology.spares_per_node",
        "topology.fail_closed is now retriever.fail_closed",
        "draft_model",
        "max_recycling_bytes",
        "recycling",
        "draft_models.small.vocabulary",
    ):
        assert name in record.getMessage()


def test_dotted_overrides_are_read_alike() -> None:
    assert load_config(None, **{"drafting.drafters": ("recycling", "copy")}).drafting.drafters == ("copy",)


def test_a_renamed_key_and_one_that_changes_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        old_keys,
        "OLD_KEYS",
        OLD_KEYS | {"a.old": OldKey("b.new"), "a.gone": OldKey(reason="it chose passages", default=3)},
    )
    tree: dict[str, Any] = {"a": {"old": 1, "kept": 2}}
    assert with_new_keys(tree) == {"a": {"kept": 2}, "b": {"new": 1}}
    assert tree == {"a": {"old": 1, "kept": 2}}
    assert with_new_keys({"a": {"gone": 3}}) == {"a": {}}
    with pytest.raises(ConfigError, match=r"a\.gone is no more: it chose passages"):
        with_new_keys({"a": {"gone": 4}})
    with pytest.raises(ConfigError, match=r"a\.old is now b\.new, and both are given"):
        with_new_keys({"a": {"old": 1}, "b": {"new": 2}})


def test_every_old_key_is_unknown_today() -> None:
    """Bug guarded: a key that came back stays unreadable."""
    for name in OLD_KEYS:
        keys = ["some" if part == "*" else part for part in name.split(".")]
        sections: Any = ClusterConfig
        for key in keys[:-1]:
            field = sections.model_fields.get(key)
            sections = getattr(field, "annotation", None) if field else None
            if not hasattr(sections, "model_fields"):
                break
        else:
            assert keys[-1] not in sections.model_fields, name


def test_settings_of_a_begun_job_are_read_alike(tmp_path: Path) -> None:
    """Bug guarded: an upgrade ends a job of days, because `job.json` names a key that changed no text."""
    (tmp_path / "job.json").write_text('{"seed": 5, "topology": {"replicas": 2, "spares_per_node": 1}}')
    with OutputFolder(tmp_path) as output:
        assert output.begun() == {"seed": 5, "topology": {"replicas": 2}}
