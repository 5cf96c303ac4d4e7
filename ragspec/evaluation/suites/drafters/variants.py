"""The variants of the suite `drafters`: drafters, tree shapes, numbers of nodes, and the engines that variants share.

>>> tree_setups(Heads.find(folder))[0].variants[EAGLE3]
Speculation(drafters=('eagle',), max_nodes=None)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragspec.config import ASSETS, DraftingConfig, EagleConfig
from ragspec.drafting.planner import Planner
from ragspec.errors import ModelError
from ragspec.evaluation.overrides import FixedTreePlanner
from ragspec.speculation import ON, Speculation

NONE, COPY, EAGLE1, EAGLE2, EAGLE3, MERGED = "none", "copy", "EAGLE-1", "EAGLE-2", "EAGLE-3", "copy + EAGLE-3"
DRAFTING = (COPY, EAGLE1, EAGLE2, EAGLE3, MERGED)
"""All drafting variants, in the order of tables and plots."""

SHIPPED_HEADS = ASSETS / "heads"
TREE_NODES = 16
"""Nodes of the fixed trees."""

_COPY, _HEAD = "copy", "eagle"
TREE, CHAIN = "tree", "chain"


@dataclass(frozen=True, slots=True)
class Heads:
    """Folders of trained heads by family; None where there is none."""

    eagle: Path | None = None
    eagle3: Path | None = None

    @classmethod
    def find(cls, folder: Path | None = None) -> Heads:
        """Heads below `folder/eagle` and `folder/eagle3`; by default the shipped heads.

        Raises: ModelError if a folder is named and holds neither.
        """
        paths = [(folder or SHIPPED_HEADS) / name for name in ("eagle", "eagle3")]
        heads = cls(*(path if (path / "config.json").is_file() else None for path in paths))
        if folder is not None and heads == cls():
            raise ModelError(f"{folder} holds neither a head eagle/ nor a head eagle3/")
        return heads

    @property
    def missing(self) -> list[str]:
        """Variants that cannot be measured."""
        of_eagle, of_eagle3 = (EAGLE1, EAGLE2), (EAGLE3, MERGED)
        return [*(of_eagle if self.eagle is None else ()), *(of_eagle3 if self.eagle3 is None else ())]


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine and the drafters of its variants, which take turns in the engine.

    `fixed_nodes`: the best so many whatever they cost; None: as many as pay. `coupled`: children are chosen with the noise that
    will decide.
    """

    variants: Mapping[str, Speculation]
    head: Path | None = None
    drafters: tuple[str, ...] = (_HEAD,)
    head_tree: Literal["dynamic", "static", "chain"] = "dynamic"
    fixed_nodes: int | None = None
    coupled: bool = True

    @property
    def shape(self) -> str:
        return CHAIN if self.head_tree == CHAIN else TREE

    @property
    def drafting(self) -> DraftingConfig:
        eagle = EagleConfig(path="" if self.head is None else str(self.head), tree=self.head_tree, coupled=self.coupled)
        most = self.fixed_nodes or DraftingConfig().max_tree_nodes
        return DraftingConfig(drafters=self.drafters, eagle=eagle, max_tree_nodes=most)

    @property
    def planner_class(self) -> type[Planner]:
        return Planner if self.fixed_nodes is None else FixedTreePlanner


def tree_setups(heads: Heads) -> list[Setup]:
    """Trees as large as the cost model allows, for all variants with a head. Copying and EAGLE-3, alone and
    merged, share an engine."""
    setups = [Setup({COPY: ON}, drafters=(_COPY,))]
    if heads.eagle3 is not None:
        variants = {COPY: Speculation((_COPY,)), EAGLE3: Speculation((_HEAD,)), MERGED: ON}
        setups = [Setup(variants, heads.eagle3, (_COPY, _HEAD))]
    if heads.eagle is not None:
        setups += [
            Setup({EAGLE1: ON}, heads.eagle, head_tree="static"),
            Setup({EAGLE2: ON}, heads.eagle, head_tree="dynamic"),
        ]
    return setups


def chain_setups(heads: Heads) -> list[Setup]:
    """Chains in every step; for chains EAGLE-1 and EAGLE-2 are the same."""
    named = ((EAGLE1, heads.eagle), (EAGLE3, heads.eagle3))
    return [
        Setup({name: ON}, head, head_tree="chain", fixed_nodes=TREE_NODES) for name, head in named if head is not None
    ]


def fixed_setups(heads: Heads, coupled: bool) -> list[Setup]:
    """Trees of the 16 best nodes: the quality of a head's guesses, whatever a row costs here."""
    dynamic = [(name, head) for name, head in ((EAGLE2, heads.eagle), (EAGLE3, heads.eagle3)) if head is not None]
    setups = [Setup({name: ON}, head, fixed_nodes=TREE_NODES, coupled=coupled) for name, head in dynamic]
    if heads.eagle is not None and coupled:
        setups.append(Setup({EAGLE1: ON}, heads.eagle, head_tree="static", fixed_nodes=TREE_NODES))
    return setups
