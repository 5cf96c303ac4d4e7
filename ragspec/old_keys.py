"""Configurations of earlier versions stay readable: each key that was renamed or removed, and how it is read today.

A renamed key is read under its new name. A removed key without effect on texts is left out. Both are named in one warning. A
removed key that would change texts is refused, unless it has the value that was its default.

    >>> with_new_keys({"topology": {"replicas": 2, "spares_per_node": 1}})
    {'topology': {'replicas': 2}}
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from ragspec.errors import ConfigError

log = logging.getLogger(__name__)
log.setLevel(logging.WARNING)  # the command line keeps other warnings off the terminal, not these


class OldKey(NamedTuple):
    """`new`: the key today; empty: the key is gone. `reason`: why a configuration with it is refused; empty: it changed no text.
    `default`: the value that was the default, which is left out in any case."""

    new: str = ""
    reason: str = ""
    default: Any = None


OLD_KEYS: dict[str, OldKey] = {
    "drafting.max_recycling_bytes": OldKey(),
    "drafting.draft_model.vocabulary": OldKey(),
    "drafting.draft_models.*.vocabulary": OldKey(),
    "topology.spares_per_node": OldKey(),
}
"""`*` stands for any name."""
OLD_DRAFTERS = frozenset({"recycling"})
"""Drafters of earlier versions. Drafts change no text, so their names are left out."""


def with_new_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the keys of today; the argument stays as it is. Raises: ConfigError."""
    tree, said = _copied(tree), list[str]()
    for model in _draft_models(tree):
        if model.get("vocabulary") == "any":  # a drafter that is gone: drafts in another model's tokens
            model.pop("path", None)
            said.append("drafts by a model of another vocabulary are no more, and left out")
    for old, key in OLD_KEYS.items():
        for found, section, name in list(_places(tree, old.split("."))):
            value = section.pop(name)
            if key.new:
                _put(tree, key.new.split("."), value, found)
                said.append(f"{found} is now {key.new}")
            elif key.reason and value != key.default:
                raise ConfigError(f"{found} is no more: {key.reason}")
            else:
                said.append(f"{found} is no more, and has no effect")
    for _, section, name in list(_places(tree, ["drafting", "drafters"])):
        if not isinstance(drafters := section[name], list | tuple):
            continue
        gone = [each for each in drafters if isinstance(each, str) and each in OLD_DRAFTERS]
        if gone:
            section[name] = [each for each in drafters if each not in gone]
            said.append(f"drafting.drafters: {', '.join(gone)} is no more, and left out")
    if said:
        log.warning("the configuration is of an earlier version: %s", "; ".join(dict.fromkeys(said)))
    return tree


def _copied(value: Any) -> Any:
    return {name: _copied(part) for name, part in value.items()} if isinstance(value, dict) else value


def _draft_models(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for old in ("drafting.draft_model.vocabulary", "drafting.draft_models.*.vocabulary"):
        yield from (section for _, section, _ in _places(tree, old.split(".")))


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


def _put(tree: dict[str, Any], keys: list[str], value: Any, old: str) -> None:
    *parents, leaf = keys
    for name in parents:
        tree = tree.setdefault(name, {})
    if leaf in tree and tree[leaf] != value:
        raise ConfigError(f"{old} is now {'.'.join(keys)}, and both are given")
    tree[leaf] = value
