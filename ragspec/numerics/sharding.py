"""Which part of every weight a rank holds, and the modules that make whole activations of its parts.

Everything is cut by output columns: queries, keys and values by heads, the feed-forward by its width, the output products, the
embedding and the head by what they give. A column of a packed product is the same chain of additions in any company of columns
(measured over shapes, types and threads; a single column alone takes another path, so shares are multiples of 16), and what ranks
computed is only put side by side. So a group of any size gives the bits of one rank, where the usual split by rows would add in
another order.

    >>> cut = cut_of("model.layers.0.mlp.gate_proj.weight", shape, ranks)
    >>> local = whole[cut.start : cut.stop]                 # then zeros, up to cut.width rows
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.errors import ModelError
from ragspec.numerics.linear import PackedLinear
from ragspec.numerics.ranks import Ranks

FFN_MULTIPLE = 64
"""SwiGLU widths are padded to this: at odd widths the vectorised activation treats a row's end by its place in the batch."""

_OUTPUT_MULTIPLE = 16

_MULTIPLES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), 1),  # heads, which are divisible
    **dict.fromkeys(("gate_proj", "up_proj"), FFN_MULTIPLE),
    **dict.fromkeys(("o_proj", "down_proj", "lm_head", "embed_tokens"), _OUTPUT_MULTIPLE),
}


class Cut(NamedTuple):
    """[start, stop) of dimension `dim`, followed by zeros up to `width`, which is the same on every rank."""

    dim: int
    start: int
    stop: int
    width: int


def cut_of(name: str, shape: tuple[int, ...], ranks: Ranks) -> Cut | None:
    """What of a parameter is this rank's; None: all of it."""
    parts = name.split(".")
    multiple = _MULTIPLES.get(parts[-2]) if len(parts) > 1 else None
    if multiple is None:
        return None
    dim = 1 if parts[-2] == "embed_tokens" else 0
    width = -(-shape[dim] // (ranks.size * multiple)) * multiple
    start = min(ranks.rank * width, shape[dim])
    return Cut(dim, start, min(start + width, shape[dim]), width)


def check_divisible(config: Any, num_ranks: int) -> None:
    """Raises: ModelError, with the sum that shows why, when a head would lie on two ranks."""
    for what, name in (("heads", "num_attention_heads"), ("key and value heads", "num_key_value_heads")):
        count = int(getattr(config, name, None) or config.num_attention_heads)
        if count % num_ranks:
            raise ModelError(
                f"{num_ranks} ranks cannot share {count} {what} ({name}): {count} = {num_ranks} x {count // num_ranks} "
                f"+ {count % num_ranks}, and a head lies on one rank"
            )


class GatheredLinear(nn.Module):
    """A packed product of which every rank computes its columns. Shapes: x [N, in_features] -> [N, out_features]."""

    def __init__(self, own: PackedLinear, out_features: int, ranks: Ranks) -> None:
        super().__init__()
        self.own, self.out_features, self._ranks = own, out_features, ranks

    def forward(self, x: Tensor) -> Tensor:
        return cut_to(self._ranks.all_gather(self.own(x)), self.out_features)


class GatheredEmbedding(nn.Module):
    """An embedding of which every rank holds its columns. Shapes: token_ids int64 [N] -> [N, H]."""

    def __init__(self, embedding: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.hidden_size = embedding.embedding_dim
        self._ranks = ranks

    def forward(self, token_ids: Tensor) -> Tensor:
        return cut_to(self._ranks.all_gather(F.embedding(token_ids, self.weight)), self.hidden_size)


def cut_to(x: Tensor, width: int) -> Tensor:
    """Without the zeros of the last ranks. Shapes: [N, at least width] -> [N, width], contiguous."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()
