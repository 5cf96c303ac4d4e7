"""Configurations of earlier versions are read: what is gone is named, and nothing that changes a text is left out silently."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.batch.output import OutputFolder
from ragspec import old_keys
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import EagleConfig, load_config, load_settings
from ragspec.errors import ConfigError
from ragspec.old_keys import OLD_KEYS, OldKey, with_new_keys
from services.settings import ServiceConfig

WRITTEN = """
topology: {replicas: 2, spares_per_node: 1, fail_closed: false}
drafting:
  drafters: [copy, recycling, draft_model, small]
  max_recycling_bytes: 1000000
  draft_model: {path: /models/other, vocabulary: any}
  draft_models: {small: {path: /models/small, vocabulary: target}}
"""
RENAMED = """
target: {max_context_tokens: 512}
engine: {max_running: 8, max_step_tokens: 64, prefix_cache: false}
drafting:
  max_tree_nodes: 59
  eagle: {num_children: 10, width: 10, max_depth: 8, score: confidence, num_nodes: 59}
  medusa: {num_children: 4, max_depth: 7}
speculation: {stride: {stride: 3, max_stride: 16}, timeout_s: 10.0}
service:
  model: mine
  cors_origins: [https://app.example]
  timeouts: {header_s: 5.0, upload_s: 20.0, slow_client_s: 30.0, canary_s: 3.0}
"""


def test_a_file_of_an_earlier_version_is_read_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: an upgrade refuses every configuration that names a key which is gone."""
    path = tmp_path / "ragspec.yaml"
    path.write_text(WRITTEN)
    with caplog.at_level(logging.WARNING):
        config = load_settings(ClusterConfig, path)
    assert config.topology.num_replicas == 2
    assert not config.retriever.fail_closed
    assert config.drafting.drafters == ("copy",)
    assert config.drafting.draft_model.path == ""  # its drafts were of another vocabulary
    (record,) = caplog.records
    for name in (
        "topology.spares_per_node",
        "topology.fail_closed is now retriever.fail_closed",
        "draft_model",
        "max_recycling_bytes",
        "recycling",
        "drafter small is left out",
        "drafting.draft_models is no more",
    ):
        assert name in record.getMessage()


def test_renamed_keys_keep_their_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: a service that starts after an upgrade with a default in the place of a setting."""
    path = tmp_path / "ragspec.yaml"
    path.write_text(RENAMED)
    config = load_settings(ServiceConfig, path)
    engine, tree = config.engine, config.drafting.tree
    assert config.target.max_model_len == 512
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.enable_prefix_caching) == (8, 64, False)
    found = tree.kind, tree.top_k, tree.max_depth, tree.max_nodes
    assert found == ("confidence", 10, 8, 59)  # the first that differs
    assert config.speculation.stride == 3
    assert (config.service.served_model_name, config.service.allowed_origins) == ("mine", ("https://app.example",))
    assert config.service.timeouts.client_s == 20.0
    (record,) = caplog.records
    assert "drafting.medusa.max_depth is left out, because drafting.tree.max_depth is 8 already" in record.getMessage()


@pytest.mark.parametrize("stride", [{}, {"max_stride": 16}, {"stride": None}, None, 4])
def test_a_section_that_became_a_key_is_read(stride: Any) -> None:
    """Bug guarded: an empty section is refused as a value of the key."""
    assert load_config(None, speculation={"stride": stride}).speculation.stride == (stride if stride == 4 else None)


@pytest.mark.parametrize(("key", "value"), [
    ("retriever.fusion_depth", 30), ("retriever.rerank_depth", 8), ("chat.least_rewriter_parameters", 1),
    ("chat.rewriter_tokens", 32), ("chat.carried_turns", 1), ("service.grammar.max_edit_ratio", 1.0),
])  # fmt: skip
def test_a_removed_key_that_changes_texts_is_refused_with_its_reason(key: str, value: Any) -> None:
    """Bug guarded: other texts after an upgrade, and nobody is told."""
    with pytest.raises(ConfigError, match=rf"{key} is no more: it "):
        load_settings(ServiceConfig, None, **{key: value})
    load_settings(ServiceConfig, None, **{key: OLD_KEYS[key].default})


def test_dotted_overrides_are_read_alike(tmp_path: Path) -> None:
    """Bug guarded: an option of the command line contradicts the file's key of an earlier name."""
    assert load_config(None, **{"drafting.drafters": ("recycling", "copy")}).drafting.drafters == ("copy",)
    path = tmp_path / "ragspec.yaml"
    path.write_text("topology: {replicas: 2}")
    assert load_settings(ClusterConfig, path, **{"topology.num_replicas": 4}).topology.num_replicas == 4


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
    with pytest.raises(ConfigError, match=r"b\.new is given twice"):
        with_new_keys({"a": {"old": 1}, "b": {"new": 2}})


def test_every_old_key_is_unknown_today() -> None:
    """Bug guarded: a key that came back stays unreadable."""
    for name in OLD_KEYS:
        keys = ["some" if part == "*" else part for part in name.split(".")]
        sections: Any = ClusterConfig if keys[0] == "topology" else ServiceConfig
        for key in keys[:-1]:
            field = sections.model_fields.get(key)
            sections = getattr(field, "annotation", None) if field else None
            if keys[:2] == ["drafting", "eagle_heads"] and key == "eagle_heads":
                sections = SimpleNamespace(model_fields={"some": SimpleNamespace(annotation=EagleConfig)})
            if not hasattr(sections, "model_fields"):
                break
        else:
            assert keys[-1] not in sections.model_fields, name


def test_settings_of_a_begun_job_are_read_alike(tmp_path: Path) -> None:
    """Bug guarded: an upgrade ends a job of days, because `job.json` names a key that changed no text."""
    (tmp_path / "job.json").write_text('{"seed": 5, "topology": {"replicas": 2, "spares_per_node": 1}}')
    with OutputFolder(tmp_path) as output:
        assert output.begun() == {"seed": 5, "topology": {"num_replicas": 2}}
