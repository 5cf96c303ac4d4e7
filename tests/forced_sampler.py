"""A sampler that decides given tokens: tests say what a target answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragspec.verification.sampling import Sampler


@dataclass(slots=True)
class ForcedSampler:
    """Decides the given tokens in order, whatever the logits; `repeats` the last given token for ever.

    With a `sampler`, every token is sampled as well, and then overruled. Without `repeats`, samples follow the given tokens.
    """

    token_ids: Sequence[int]
    sampler: Sampler | None = None
    repeats: bool = True
    index: int = 0

    def __call__(self, logits: NDArray[np.float32]) -> int:
        sampled = self.sampler(logits) if self.sampler else 0
        at = min(self.index, len(self.token_ids) - 1) if self.repeats else self.index
        self.index += 1
        return self.token_ids[at] if at < len(self.token_ids) else sampled
