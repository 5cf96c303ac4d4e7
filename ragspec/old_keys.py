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
    "topology.fail_closed": OldKey("retriever.fail_closed"),
    "topology.spares_per_node": OldKey(),
}
"""`*` stands for any name."""
OLD_DRAFTERS = frozenset({"recycling"})
"""Drafters of earlier versions. Drafts change no text, so their names are left out."""


def with_new_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the keys of today; the argument stays as it is. Raises: ConfigError."""
    tree, said = _copied(tree), list[str]()
    drafting = tree.get("drafting")
    if isinstance(drafting, dict):
        said += _without_old_drafters(drafting)
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
    if said:
        log.warning("the configuration is of an earlier version: %s", "; ".join(dict.fromkeys(said)))
    return tree


def _copied(value: Any) -> Any:
    return {name: _copied(part) for name, part in value.items()} if isinstance(value, dict) else value


def _without_old_drafters(drafting: dict[str, Any]) -> Iterator[str]:
    """Takes drafters that are gone out of the section; a line for each."""
    gone = dict.fromkeys(OLD_DRAFTERS, "is no more, and left out")
    for _, section, name in list(_places(drafting, ["draft_model"])) + list(_places(drafting, ["draft_models", "*"])):
        model = section[name]
        if isinstance(model, dict) and model.get("vocabulary") == "any":
            del section[name]
            gone[name] = "drafted in the tokens of another vocabulary, which is no more, and is left out"
            yield f"the draft model {name} {gone[name]}"
    drafters = drafting.get("drafters")
    if isinstance(drafters, list | tuple):
        drafting["drafters"] = [name for name in drafters if not isinstance(name, str) or name not in gone]
        yield from (f"the drafter {name} {gone[name]}" for name in drafters if name in OLD_DRAFTERS)


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
