"""Engines of the suite `drafters`: which drafters, heads, tree shapes and numbers of nodes.

>>> find_heads(folder)[0].setup(fixed_nodes=TREE_NODES).drafting.max_tree_nodes
16
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragspec.config import DraftingConfig, EagleConfig, HydraConfig, TreeHeadConfig
from ragspec.drafting.planner import Planner
from ragspec.errors import ModelError
from ragspec.evaluation.overrides import FixedTreePlanner
from ragspec.speculation import ON, Speculation

NONE, COPY, MERGED = "none", "copy", "copy + head"
TREE_NODES = 16
"""Nodes of the fixed trees."""
TREE, CHAIN = "tree", "chain"
_SECTIONS = {"eagle": EagleConfig, "medusa": TreeHeadConfig, "hydra": HydraConfig}


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine and the drafters of its variants, which take turns in the engine.

    `family`: the section of the configuration that names the head. `fixed_nodes`: the best so many whatever they cost; None: as
    many as pay. `coupled`: children are chosen with the noise that will decide. `sizes`: of the head's trees.
    """

    variants: Mapping[str, Speculation]
    drafters: tuple[str, ...]
    head: Path | None = None
    family: str = "eagle"
    head_tree: Literal["dynamic", "static", "chain"] = "dynamic"
    fixed_nodes: int | None = None
    coupled: bool = True
    sizes: Mapping[str, int] | None = None

    @property
    def shape(self) -> str:
        return CHAIN if self.head_tree == CHAIN else TREE

    @property
    def drafting(self) -> DraftingConfig:
        most = self.fixed_nodes or DraftingConfig().max_tree_nodes
        config = DraftingConfig(drafters=self.drafters, max_tree_nodes=most)
        if self.head is None:
            return config
        values: dict[str, Any] = {"path": str(self.head), "tree": self.head_tree, "coupled": self.coupled}
        return config.model_copy(update={self.family: _SECTIONS[self.family](**values | dict(self.sizes or {}))})

    @property
    def planner_class(self) -> type[Planner]:
        return Planner if self.fixed_nodes is None else FixedTreePlanner


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head's folder; its name is the family's, or begins with it. `eagle` drafts EAGLE-1's static tree, all others a dynamic
    one."""

    name: str
    path: Path

    @property
    def family(self) -> str:
        """The drafter that reads the files. PosS and HASS are EAGLE heads."""
        found = (family for family in ("medusa", "hydra") if list(self.path.glob(f"{family}_lm_head.*")))
        return next(found, "eagle")

    def setup(self, **fields: Any) -> Setup:
        values: dict[str, Any] = {"variants": {self.name: ON}, "drafters": (self.family,)}
        values["head_tree"] = "static" if self.name == "eagle" else "dynamic"
        return Setup(head=self.path, family=self.family, **(values | fields))


def find_heads(folder: Path | None) -> list[TrainedHead]:
    """Heads below the folder; none without a folder. Raises: ModelError for a folder without any."""
    if folder is None:
        return []
    paths = sorted(folder.glob("*/config.json"))
    if not paths:
        raise ModelError(f"--heads names a folder with heads, each in a folder of its name; {folder} has none")
    return [TrainedHead(path.parent.name, path.parent) for path in paths]


def eagle_head(folder: Path | None) -> Path | None:
    """The folder's EAGLE-3 head, or else its first EAGLE head. Raises: ModelError for a folder without one."""
    heads = sorted(find_heads(folder), key=lambda head: head.name != "eagle3")
    found = [head.path for head in heads if head.family == "eagle"]
    if heads and not found:
        raise ModelError(f"{folder} holds no EAGLE head")
    return found[0] if found else None
