"""Networks that each guess one position ahead, as the engine runs them: products of the target's backend.

    z = target's last hidden state;  z <- z + silu(W z + b) for each block;  logits = U z

Owns no sequence and no tree: `ragspec.drafting.medusa.drafter` does.

    >>> network = MedusaNetwork(read_medusa(path, target), target)
    >>> network.logits(states, 0)                  # [B, V], of the token after the next one

Source: Medusa (Cai et al. 2024, arXiv 2401.10774).
"""

from __future__ import annotations

import time
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.drafting.heads.target import FINAL, HeadTarget
from ragspec.drafting.medusa.checkpoint import PositionHeads
from ragspec.numerics.backend import LogitRows


class MedusaNetwork:
    """The weights of all heads, products in `dtype` (None: the target's), everything between them in float32."""

    taps = (FINAL,)

    def __init__(self, heads: PositionHeads, target: HeadTarget, dtype: torch.dtype | None = None) -> None:
        self.num_heads, self.vocab_size = heads.num_heads, target.vocab_size
        self.backend = target.backend.in_floats
        self._target, self._dtype = target, dtype or target.embedding.dtype
        weights = {name: tensor.to(self.backend.device, self._dtype) for name, tensor in heads.tensors.items()}
        self._blocks = [
            [self._linear(weights, f"{i}.blocks.{j}") for j in range(heads.num_blocks)] for i in range(heads.num_heads)
        ]
        self._outputs = [
            self._linear(weights, f"{i}.output") if f"{i}.output.weight" in weights else None
            for i in range(heads.num_heads)
        ]

    def logits(self, states: Tensor, head: int) -> LogitRows:
        """What one head guesses. Shapes: float32 [N, H] -> float32 [N, V]."""
        with torch.inference_mode():
            for block in self._blocks[head]:
                states = states + F.silu(self._product(block, states))
            if (output := self._outputs[head]) is not None:
                return self.backend.logits(self._product(output, states))
            return self.backend.logits(self._target.logits_of(states.to(self._target.embedding.dtype)))

    def seconds(self, num_rows: int, context: int) -> float:
        """Seconds of one level of so many rows; the context costs nothing."""
        states = torch.zeros(num_rows, self._target.hidden_size, device=self.backend.device)
        begin = time.perf_counter()
        self.logits(states, 0)
        self.backend.wait()
        return time.perf_counter() - begin

    def _linear(self, weights: dict[str, Tensor], name: str) -> nn.Module:
        return self.backend.make_linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def _product(self, layer: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, layer(x.to(self._dtype)).float())
