"""Which nodes of a head's tree are drafted further: three shapes.

chain     the best child, and its best child: a draft without branches
static    a fixed tree, by rank: EAGLE-1's of 25 nodes, Medusa's of 63
dynamic   EAGLE-2's: of a level's children the most probable paths go on

Probabilities are the learned acceptance of nodes, ours, or the head's own, as the EAGLE-2 paper has them.
"""

from collections.abc import Sequence

import numpy as np

from ragspec.errors import ConfigError

STATIC_TREE: tuple[tuple[int, ...], ...] = (
    *((a,) for a in range(4)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The ranks of each node's path. Source: EAGLE (arXiv 2401.15077), the published choices."""

_MEDUSA_CHILDREN: dict[tuple[int, ...], int] = {
    (): 10,
    **{(rank,): count for rank, count in enumerate((10, 7, 3, 2, 1, 1, 1, 1, 1, 1))},
    **{(0, rank): count for rank, count in enumerate((10, 3, 2, 1, 1, 1, 1, 1))},
    (1, 0): 2,
    (2, 0): 1,
    (0, 0, 0): 2,
}
"""How many children each inner node of Medusa's tree has, by the ranks of its path."""
MEDUSA_TREE = tuple((*path, rank) for path, num_children in _MEDUSA_CHILDREN.items() for rank in range(num_children))
"""63 nodes. Source: Medusa (arXiv 2401.10774), the published `mc_sim_7b_63`, which Hydra uses too."""


class TreeShape:
    """The dynamic shape: the `width` most probable nodes of each level go on, each with `num_children` children.

    `max_width`: the most nodes of one level that are drafted further. `num_children`: the most children of one node.
    `num_nodes`: the tree of the EAGLE-2 paper, the so many most probable nodes by the head's own probabilities; None: ours, by
    learned acceptance.
    """

    def __init__(self, num_children: int, width: int, max_depth: int, num_nodes: int | None = None) -> None:
        self.num_children, self.max_width, self.max_depth = num_children, width, max_depth
        self.num_nodes = num_nodes


class StaticShape(TreeShape):
    """A fixed tree, given by the ranks of every node's path.

    The root is node 0, a node outside the tree has the last number. Shapes: below int64 [nodes + 2, num_children], each node's
    children; is_inner bool [nodes + 2], whether children of a node belong to the tree.
    """

    def __init__(self, tree: Sequence[tuple[int, ...]] = STATIC_TREE) -> None:
        inner = frozenset(path[:-1] for path in tree)
        paths = [(), *sorted(tree)]
        numbers = {path: number for number, path in enumerate(paths)}
        max_depth = max(map(len, tree))
        width = max(sum(len(path) == depth for path in inner) for depth in range(1, max_depth + 1))
        super().__init__(1 + max(path[-1] for path in tree), width, max_depth)
        self.below = np.full((len(paths) + 1, self.num_children), len(paths))
        for path, number in numbers.items():
            for rank in range(self.num_children):
                if (*path, rank) not in numbers:
                    break
                self.below[number, rank] = numbers[*path, rank]
        self.is_inner = np.array([path in inner for path in paths] + [False])


def make_shape(
    name: str,
    num_children: int,
    width: int,
    max_depth: int,
    static: Sequence[tuple[int, ...]] = STATIC_TREE,
    num_nodes: int | None = None,
) -> TreeShape:
    """`static`: the tree of that name. `num_nodes`: of a dynamic tree. Raises: ConfigError for an unknown name."""
    if name == "static":
        return StaticShape(static)
    if name in ("chain", "dynamic"):
        return TreeShape(1, 1, max_depth) if name == "chain" else TreeShape(num_children, width, max_depth, num_nodes)
    raise ConfigError(f"unknown tree shape {name!r}; there are: chain, static, dynamic")
