"""Micro-batches of encoded texts, padded on the right."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.training.conversations import Encoded


class MicroBatch(NamedTuple):
    """`positions`: flat indices whose next token is learnt. Shapes: ids int64 [B, T], positions int64 [M]."""

    ids: Tensor
    positions: Tensor


def collate(texts: Sequence[Encoded]) -> MicroBatch:
    """Pads with id 0."""
    length = max(len(text.ids) for text in texts)
    ids, learnt = torch.zeros(len(texts), length, dtype=torch.long), torch.zeros(len(texts), length)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        learnt[row, : len(text.ids) - 1] = torch.tensor(text.weights[1:])  # position t predicts token t + 1
    return MicroBatch(ids, learnt.flatten().nonzero().squeeze(1))
