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
    parents, token_ids, node = tree.parents, tree.token_ids, 0
    path, tokens = list[int](), [token_after(0)]
    for child in range(1, len(parents)):  # a node precedes its children
        if parents[child] == node and token_ids[child] == tokens[-1] and len(tokens) < most_tokens:
            node = child
            path.append(node)
            tokens.append(token_after(node))
    return VerifyResult(path, tokens)
