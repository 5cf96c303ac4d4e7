"""Causal attention for training on CPU, registered with transformers as `ragspec_training`.

Why: at a few hundred tokens the CPU flash kernel takes 45 % of a training step; two batched matrix products over
grouped heads nearly double the speed (4.4k to 8.2k tokens/s, 4 rows of 384). Right padding needs no mask, because a
causal row never sees what follows it. Never used for serving.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "ragspec_training"
QUERY_BLOCK = 256


@cache
def _causal_bias(first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Large negative above the diagonal. Shape: [last - first, last]."""
    return torch.full((last - first, last), -30_000.0, dtype=dtype).triu(first + 1)


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Shapes: query [B, heads, T, D], key and value [B, kv_heads, T, D]; returns [B, T, heads, D]."""
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    shape = (batch, groups, heads // groups, length, dim)
    scaled = (query * scaling).to(value.dtype).view(shape)
    key = key.to(value.dtype)
    blocks = []
    for first in range(0, length, QUERY_BLOCK):
        last = min(length, first + QUERY_BLOCK)
        rows = scaled[:, :, :, first:last].reshape(batch, groups, -1, dim)
        scores = rows @ key[:, :, :last].transpose(2, 3)
        scores = scores.view(batch, groups, -1, last - first, last) + _causal_bias(first, last, scores.dtype)
        with torch.autocast(query.device.type, enabled=False):
            weights = torch.softmax(scores, dim=-1).view(batch, groups, -1, last)
        blocks.append((weights @ value[:, :, :last]).view(batch, groups, -1, last - first, dim))
    return torch.cat(blocks, dim=3).reshape(batch, heads, length, dim).transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the kernel known to transformers; returns its name."""
    AttentionInterface.register(NAME, grouped_attention)
    return NAME
