"""Near ties of many rows at once, on the device that has their logits: `ragspec.verification.near_ties` in torch operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.core import SamplingParams
from ragspec.numerics.backend import KeyedDraw
from ragspec.numerics.torch.transfer import column

_NEUTRAL = SamplingParams(temperature=0.0)


def near_ties(warped: Tensor, noisy: Tensor, tokens: Tensor, draws: Sequence[KeyedDraw | None]) -> Tensor:
    """Whether logits that are off by a row's slack might give another token; False for rows without a slack.

    Shapes: warped float32 [W, V]; noisy float64 [W, V], warped logits and noise; tokens int64 [W] -> bool [W].
    """
    given = [(0.0, 0.0) if draw is None or draw.slack is None else draw.slack for draw in draws]
    wide, at = warped.double(), tokens[:, None]
    largest = torch.where(torch.isfinite(wide), wide.abs(), 0.0).amax(1, keepdim=True)
    slack = (
        column([base for base, _ in given], wide.device) + column([share for _, share in given], wide.device) * largest
    )
    rivals = noisy >= noisy.gather(1, at) - 2.0 * slack
    rivals = rivals.scatter(1, at, False)
    row = _Ranked.of(wide, slack, [_NEUTRAL if draw is None or draw.params.greedy else draw.params for draw in draws])
    is_near = ~row.surely_survive(wide.gather(1, at))[:, 0] | (rivals & row.may_survive(wide)).any(1)
    return (is_near | ~torch.isfinite(slack[:, 0])) & (slack[:, 0] > 0.0)


class _Ranked(NamedTuple):
    """Rows with their logits in falling order. Shapes: falling [W, V], mass [W, V + 1] of the first so many,
    all others [W, 1]."""

    falling: Tensor
    mass: Tensor
    slack: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, wide: Tensor, slack: Tensor, params: Sequence[SamplingParams]) -> _Ranked:
        falling = torch.sort(wide, dim=1, descending=True).values
        mass = torch.nn.functional.pad(torch.exp(falling - falling[:, :1]).cumsum(1), (1, 0))
        size, device = wide.shape[1], wide.device
        top_k = column([float(min(p.top_k or size, size)) for p in params], device)
        top_p = column([p.top_p if p.top_p < 1.0 else math.inf for p in params], device)
        min_p = column([math.log(p.min_p) if p.min_p else -math.inf for p in params], device)
        return cls(falling, mass, slack, top_k.long(), top_p, min_p)

    def may_survive(self, logits: Tensor) -> Tensor:
        """Shapes: float64 [W, M] -> bool [W, M]."""
        num_above = self._count(logits + 2.0 * self.slack, with_equals=False)
        edge = self.falling.gather(1, self.top_k - 1) - 2.0 * self.slack
        edge = torch.where(self.top_k < self.falling.shape[1], edge, -torch.inf)
        own = torch.where(logits >= edge, 0.0, self._mass_of(logits))
        return self._survive(logits, num_above, self._count(edge, with_equals=True), own, 1.0)

    def surely_survive(self, logits: Tensor) -> Tensor:
        """Of logits of the row itself. Shapes: float64 [W, M] -> bool [W, M]."""
        size = self.falling.shape[1]
        num_above = self._count(logits - 2.0 * self.slack, with_equals=True)
        below = self.falling.gather(1, self.top_k.clamp(max=size - 1)) + 2.0 * self.slack
        below = torch.where(self.top_k < size, below, -torch.inf)
        return self._survive(logits, num_above, self._count(below, with_equals=False), self._mass_of(logits), -1.0)

    def _survive(self, logits: Tensor, num_above: Tensor, num_candidates: Tensor, own: Tensor, sign: float) -> Tensor:
        slack, counted = sign * self.slack, self.mass.gather(1, num_above)
        rest = (self.mass.gather(1, num_candidates.expand_as(num_above)) - counted).clamp(min=0.0) + own
        if sign < 0.0:  # the logit itself is among those counted
            num_above, counted = num_above - 1, (counted - self._mass_of(logits)).clamp(min=0.0)
        above, rest = counted * torch.exp(-slack), rest * torch.exp(slack)
        in_top_p = torch.isinf(self.top_p) | (above < self.top_p * (above + rest))
        has_min_p = logits + 2.0 * slack >= self.falling[:, :1] + self.min_p
        return in_top_p & has_min_p & (num_above < self.top_k)

    def _count(self, limit: Tensor, *, with_equals: bool) -> Tensor:
        """How many logits of the row exceed the limit. Shapes: [W, M] -> int64 [W, M]."""
        return torch.searchsorted(-self.falling, -limit.contiguous(), right=with_equals)

    def _mass_of(self, logits: Tensor) -> Tensor:
        return torch.exp(logits - self.falling[:, :1])
