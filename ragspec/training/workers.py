"""Data parallelism: every worker draws its own examples, and gradients are summed.

Owns the exchange between workers; who starts them, and the process group, belongs to the pipeline.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Workers:
    """This process among `size` that train one model. Alone, nothing is exchanged."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this worker reports and writes."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """The sum of each value over all workers, the same everywhere."""
        return self._summed(torch.tensor(values, dtype=torch.float64)).tolist() if self.size > 1 else list(values)

    def from_first(self, value: float) -> float:
        """The first worker's value."""
        return self.total(value if self.is_first else 0.0)[0]

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over all workers."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self._summed(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _summed(self, values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values)
        return values


ALONE = Workers()
