"""Tensor parallelism by output columns: which slice of every weight a rank holds, and modules that gather activations.

Queries, keys and values are split by heads, the feed-forward by its width, output products, embedding and LM head by their
outputs. A column of a packed product is the same chain of additions beside any other columns (measured over shapes, types and
threads; a single column takes another path, so slices are multiples of 16), and gathering only concatenates. So a group of any
size gives the bits of one rank; the usual split by rows would add in another order.

With `Ranks.adds`, the usual split of output products by inputs is used instead.

    >>> part = weight_slice("model.layers.0.mlp.gate_proj.weight", shape, ranks)
    >>> local = whole[part.start : part.stop]                 # then zeros, up to part.width rows
"""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.errors import ModelError
from ragspec.numerics.ranks import Ranks

FFN_MULTIPLE = 64
"""SwiGLU widths are padded to this: at odd widths the result of a row's last columns depends on the row's place in the batch."""

_OUTPUT_MULTIPLE = 16

_MULTIPLES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), 1),  # whole heads: `check_head_counts`
    **dict.fromkeys(("gate_proj", "up_proj"), FFN_MULTIPLE),
    **dict.fromkeys(("o_proj", "down_proj", "lm_head", "embed_tokens"), _OUTPUT_MULTIPLE),
}


_INTO_THE_STREAM = ("o_proj", "down_proj")


class WeightSlice(NamedTuple):
    """[start, stop) of dimension `dim`, followed by zeros up to `width`, which is the same on every rank."""

    dim: int
    start: int
    stop: int
    width: int


def weight_slice(name: str, shape: tuple[int, ...], ranks: Ranks) -> WeightSlice | None:
    """This rank's slice of a parameter; None: all of it."""
    parts = name.split(".")
    multiple = _MULTIPLES.get(parts[-2]) if len(parts) > 1 else None
    if ranks.adds and parts[-2:-1] and parts[-2] in _INTO_THE_STREAM:
        if len(shape) == 1:
            return None
        return _slice(shape, 1, FFN_MULTIPLE if parts[-2] == "down_proj" else 1, ranks)
    if multiple is None:
        return None
    return _slice(shape, 1 if parts[-2] == "embed_tokens" else 0, multiple, ranks)


def _slice(shape: tuple[int, ...], dim: int, multiple: int, ranks: Ranks) -> WeightSlice:
    width = -(-shape[dim] // (ranks.size * multiple)) * multiple
    start = min(ranks.rank * width, shape[dim])
    return WeightSlice(dim, start, min(start + width, shape[dim]), width)


def check_head_counts(config: Any, num_ranks: int) -> None:
    """Raises: ModelError if the ranks cannot share the heads evenly."""
    for what, name in (("heads", "num_attention_heads"), ("key and value heads", "num_key_value_heads")):
        count = int(getattr(config, name, None) or config.num_attention_heads)
        if count % num_ranks:
            raise ModelError(
                f"{num_ranks} ranks cannot share {count} {what} ({name}): {count} = {num_ranks} x {count // num_ranks} "
                f"+ {count % num_ranks}, and a head lies on one rank"
            )


class GatheredLinear(nn.Module):
    """A product; every rank computes some columns. Shapes: x [N, in_features] -> [N, out_features]."""

    def __init__(self, own: nn.Module, out_features: int, ranks: Ranks) -> None:
        super().__init__()
        self.own, self.out_features, self._ranks = own, out_features, ranks

    def forward(self, x: Tensor) -> Tensor:
        return without_padding(self._ranks.all_gather(self.own(x)), self.out_features)


class AddedLinear(nn.Module):
    """A product; every rank computes it over some inputs. Shapes: x [N, own inputs] -> [N, out_features]."""

    def __init__(self, own: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.own, self._ranks = own, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.add_up(self.own(x))


class GatheredEmbedding(nn.Module):
    """An embedding; every rank holds some columns. Shapes: token_ids int64 [N] -> [N, H]."""

    def __init__(self, embedding: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.hidden_size = embedding.embedding_dim
        self._ranks = ranks

    def forward(self, token_ids: Tensor) -> Tensor:
        return without_padding(self._ranks.all_gather(F.embedding(token_ids, self.weight)), self.hidden_size)


def without_padding(x: Tensor, width: int) -> Tensor:
    """Drop the padding of the last ranks. Shapes: [N, at least width] -> [N, width], contiguous."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()
