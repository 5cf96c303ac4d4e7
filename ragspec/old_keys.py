"""Renamed and removed configuration keys, so that configurations of earlier versions stay readable.

A renamed key is read under its new name. A removed key without effect on texts is left out. Both are named in one warning. A
removed key that would change texts is refused, unless it has the value that was its default.

    >>> with_new_keys({"topology": {"replicas": 2, "spares_per_node": 1}})
    {'topology': {'num_replicas': 2}}
"""

import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from ragspec.errors import ConfigError

log = logging.getLogger(__name__)
log.setLevel(logging.WARNING)  # the command line keeps other warnings off the terminal, not these


class OldKey(NamedTuple):
    """`new`: the name of the key today; empty: the key is gone. `reason`: why a configuration with the key is refused; empty: the
    key changed no text. `default`: the key's default in earlier versions; this value is left out in any case."""

    new: str = ""
    reason: str = ""
    default: Any = None


_HEADS = ("eagle", "eagle_heads.*", "medusa", "hydra")
_TREES = dict.fromkeys(_HEADS, (4, 6)) | {"draft_model": (3, 6), "self_draft": (3, 4)}
"""The sections of `drafting` that had a tree of their own, with the defaults of `num_children` and `max_depth`."""
_ONE_TREE = {
    f"drafting.{section}.{name}": key
    for section, (num_children, max_depth) in _TREES.items()
    for name, key in {
        "tree": OldKey("drafting.tree.kind", default="dynamic"),
        "score": OldKey("drafting.tree.kind", default="learned"),
        "num_children": OldKey("drafting.tree.top_k", default=num_children),
        "width": OldKey(),
        "max_depth": OldKey("drafting.tree.max_depth", default=max_depth),
        "coupled": OldKey(),
    }.items()
}
_REMOVED = """
    encoder.batch_size drafting.max_earlier_tokens drafting.max_recycling_bytes drafting.medusa.dtype
    drafting.hydra.dtype drafting.hydra.window drafting.eagle.online.learning_rate
    drafting.eagle.online.max_bytes drafting.eagle_heads.*.online.learning_rate
    drafting.eagle_heads.*.online.max_bytes drafting.draft_model.vocabulary drafting.draft_model.quantization
    drafting.draft_model.max_kv_bytes drafting.draft_models engine.adaptive_threads speculation.asynchronous
    speculation.timeout_s speculation.max_batch_queries speculation.stride.max_stride speculation.stride.window
    speculation.stride.gamma_max speculation.stride.least_gain speculation.stride.least_survival
    service.conversations.max_bytes service.limits.header_bytes service.limits.json_depth
    service.limits.json_items service.timeouts.header_s service.timeouts.canary_s topology.cpus_per_shard
    topology.cpus_per_encoder topology.heartbeat_s topology.rank_timeout_s topology.spares_per_node
""".split()
"""Keys that are gone and changed no text."""
_RENAMED = {
    "target.max_context_tokens": "target.max_model_len",
    "drafting.max_tree_nodes": "drafting.tree.max_nodes",
    "engine.max_step_tokens": "engine.max_num_batched_tokens",
    "engine.max_running": "engine.max_num_seqs",
    "engine.prefix_cache": "engine.enable_prefix_caching",
    "speculation.stride.stride": "speculation.stride",
    "service.model": "service.served_model_name",
    "service.cors_origins": "service.allowed_origins",
    "topology.replicas": "topology.num_replicas",
    "topology.tensor_parallel": "topology.tensor_parallel_size",
    "topology.fail_closed": "retriever.fail_closed",
}
OLD_KEYS: dict[str, OldKey] = {
    **_ONE_TREE,
    **{f"drafting.{section}.{name}": OldKey() for section in _HEADS for name in ("num_nodes", "max_read_tokens")},
    **dict.fromkeys(_REMOVED, OldKey()),
    **{old: OldKey(new) for old, new in _RENAMED.items()},
    "retriever.fusion_depth": OldKey(reason="it changed which passages are found; 100 are fused now", default=100),
    "retriever.rerank_depth": OldKey(reason="it changed which passages are found; 32 are reranked now", default=32),
    "chat.least_rewriter_parameters": OldKey(
        reason="it chose who rewrites questions; set chat.rewriter to rules or model", default=1_000_000_000
    ),
    "chat.rewriter_tokens": OldKey(reason="it changed rewritten questions; they have 64 tokens now", default=64),
    "chat.carried_turns": OldKey(reason="it changed which passages are shown; two answers count now", default=2),
    "service.grammar.max_edit_ratio": OldKey(
        reason="it changed corrections; /v1/grammar takes max_edit_ratio with each request", default=0.5
    ),
    "service.timeouts.upload_s": OldKey("service.timeouts.client_s", default=30.0),
    "service.timeouts.slow_client_s": OldKey("service.timeouts.client_s", default=30.0),
}
"""`*` stands for any name."""
OLD_DRAFTERS = frozenset({"recycling"})
"""Drafters of earlier versions. Drafts change no text, so their names are left out."""
OLD_SECTIONS = ("speculation.stride",)
"""Sections without a key of today; `speculation.stride` is a key now."""


def with_new_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the keys of today; the argument stays as it is. Raises: ConfigError."""
    tree, said, moved = deepcopy(tree), list[str](), dict[str, Any]()
    drafting = tree.get("drafting")
    if isinstance(drafting, dict):
        said += _without_old_drafters(drafting)
    for old, key in OLD_KEYS.items():
        for found, section, name in list(_places(tree, old.split("."))):
            value = section.pop(name)
            if key.new:
                said.append(f"{found} is now {key.new}")
                if key.default is None or value != key.default:
                    said += _moved(moved, key.new, value, found)
            elif key.reason and value != key.default:
                raise ConfigError(f"{found} is no more: {key.reason}")
            else:
                said.append(f"{found} is no more, and has no effect")
    for old in OLD_SECTIONS:
        for _, section, name in list(_places(tree, old.split("."))):
            if section[name] == {}:
                del section[name]
    for new, value in moved.items():
        keys = new.split(".")
        if section_of(tree, keys).setdefault(keys[-1], value) != value:
            raise ConfigError(f"{new} is given twice, and once under the name of an earlier version")
    if said:
        log.warning("the configuration is of an earlier version: %s", "; ".join(dict.fromkeys(said)))
    return tree


def _moved(moved: dict[str, Any], new: str, value: Any, old: str) -> Iterator[str]:
    """Notes the value of a renamed key. Where several old keys are one key now, the first counts."""
    if moved.setdefault(new, value) != value:
        yield f"{old} is left out, because {new} is {moved[new]!r} already"


def _without_old_drafters(drafting: dict[str, Any]) -> Iterator[str]:
    """Takes drafters that are gone out of the section; a line for each."""
    gone = dict.fromkeys(OLD_DRAFTERS, "is no more, and left out")
    further = drafting.get("draft_models")
    if isinstance(further, dict):
        gone |= dict.fromkeys(map(str, further), "is left out: one draft model drafts, drafting.draft_model")
    model = drafting.get("draft_model")
    if isinstance(model, dict) and model.get("vocabulary") == "any":
        del drafting["draft_model"]
        gone["draft_model"] = "is left out: it drafted in the tokens of another vocabulary, which is no more"
        yield f"the drafter draft_model {gone['draft_model']}"
    drafters = drafting.get("drafters")
    if isinstance(drafters, list | tuple):
        drafting["drafters"] = [name for name in drafters if not isinstance(name, str) or name not in gone]
        yield from (f"the drafter {name} {gone[name]}" for name in drafters if name in gone)


def _places(tree: Any, keys: list[str], above: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where a key stands: its whole name, the section that holds it, its last part."""
    first, *rest = keys
    if not isinstance(tree, dict):
        return
    for name in list(tree) if first == "*" else [first] if first in tree else []:
        whole = f"{above}{name}"
        if rest:
            yield from _places(tree[name], rest, f"{whole}.")
        else:
            yield whole, tree, name


def section_of(tree: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """The mapping that holds the last of `keys`, made where it is missing. Raises: ConfigError."""
    for name in keys[:-1]:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"cannot set {'.'.join(keys)}: {name} is not a mapping")
    return tree
