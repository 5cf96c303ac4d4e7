"""Rows of probabilities that stay on a device, for the published acceptance rules: single numbers cross, rows do not."""

from __future__ import annotations

import torch
from torch import Tensor

from ragspec.numerics.torch.attention import tree_sum
from ragspec.numerics.torch.transfer import to_host

_MASS_BITS = 40


class TorchProbs:
    """See `ragspec.tree.DeviceProbs`. Every sum has a fixed order."""

    def __init__(self, values: Tensor) -> None:
        self._values = values  # float64 [V]
        self.shape: tuple[int, ...] = (len(values),)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, token_id: int) -> float:
        return _number(self._values[token_id])

    def __setitem__(self, token_id: int, prob: float) -> None:
        self._values[token_id] = prob

    def __rmul__(self, factor: float) -> TorchProbs:
        return TorchProbs(self._values * factor)

    def __truediv__(self, divisor: float) -> TorchProbs:
        return TorchProbs(self._values / divisor)

    def __sub__(self, other: TorchProbs) -> TorchProbs:
        return TorchProbs(self._values - other._values)

    def clip(self, least: float) -> TorchProbs:
        return TorchProbs(self._values.clip(least))

    def copy(self) -> TorchProbs:
        return TorchProbs(self._values.clone())

    def sum(self) -> float:
        return _number(tree_sum(self._values)[0])

    def min(self) -> float:
        return _number(self._values.amin())

    def max(self) -> float:
        return _number(self._values.amax())

    def entropy_nats(self) -> float:
        logs = torch.log(torch.where(self._values > 0.0, self._values, 1.0))
        return -_number(tree_sum(self._values * logs)[0])

    def rank(self, token_id: int) -> int:
        own, ids = self._values[token_id], torch.arange(len(self._values), device=self._values.device)
        above = (self._values > own) | ((self._values == own) & (ids < token_id))
        return int(_number(above.sum().double()))

    def index_at(self, share: float) -> int:
        """Whole numbers are added, so that the sum has no order."""
        mass = (self._values / self._values.amax() * 2.0**_MASS_BITS).long().cumsum(0)
        return int(_number((mass <= (mass[-1].double() * share).long()).sum().double()))


def _number(x: Tensor) -> float:
    return float(to_host(x.reshape(1))[0])
