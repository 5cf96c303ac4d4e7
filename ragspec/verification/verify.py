"""Verification: follow the target's own samples down the tree.

At each node the target's logits there decide the next output token. If a child holds that token, the walk goes on from the child;
otherwise the token is the step's last, the bonus token. Every token is the target's own sample, so the text is the same for any
draft, and with no draft at all: a tree of the root alone is plain decoding.
"""

from collections.abc import Callable
from typing import NamedTuple

from ragspec.tree import DraftTree


class VerifyResult(NamedTuple):
    """`path`: the accepted nodes below the root, top down. `tokens`: their tokens and the bonus token, one more than nodes."""

    path: list[int]
    tokens: list[int]


def verify(tree: DraftTree, token_after: Callable[[int], int], most_tokens: int) -> VerifyResult:
    """Decide at most `most_tokens` tokens. `token_after`: the target's sample after a node, asked for along the path only."""
    node = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        tokens.append(token_after(node))
        child = tree.child(node, tokens[-1])
        if child is None or len(tokens) >= most_tokens:
            return VerifyResult(path, tokens)
        path.append(child)
        node = child
