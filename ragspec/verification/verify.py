"""Verification: follow the target's own samples down the tree.

At each node the target's next output token is decided by its own logits there. If a child holds that token the walk goes on;
otherwise the token is the step's last, the bonus. Every token returned is the target's, so the text is the same for any
draft, and with no draft at all: a root-only tree is plain decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.tree import DraftTree
from ragspec.verification.sampling import Sampler


class Verdict(NamedTuple):
    """`path`: accepted nodes from the root's child on. `tokens`: their tokens and the bonus, so one more."""

    path: list[int]
    tokens: list[int]


def verify(tree: DraftTree, logits: NDArray[np.float32], sampler: Sampler, most_tokens: int) -> Verdict:
    """Walk the tree. Shapes: logits float32 [N, V], row n for node n. At most `most_tokens` tokens are decided."""
    node = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        tokens.append(sampler(logits[node]))
        child = tree.child(node, tokens[-1])
        if child is None or len(tokens) >= most_tokens:
            return Verdict(path, tokens)
        path.append(child)
        node = child
