"""Networks that each guess one position ahead, as the engine runs them: products of the target's backend.

    x = target's last hidden state;  z = x + silu(W x + b), and so on for each block;  logits = U z + c

Grounded heads (Hydra) read more, x = [state, embedding of the next token, of each guessed token behind it], so their first block
is z = R x + r + silu(W x + b).

Owns no sequence and no tree: `ragspec.drafting.medusa.drafter` does.

    >>> network = PositionNetwork(read_medusa(path, target), target)
    >>> inputs = network.inputs(states, next_tokens)
    >>> network.logits(inputs, 0)                  # [B, V], of the token after the next one

Sources: Medusa (Cai et al. 2024, arXiv 2401.10774), Hydra (Ankner et al. 2024, arXiv 2402.05109).
"""

from __future__ import annotations

import time
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.drafting.heads.target import HeadTarget, float_dtype
from ragspec.drafting.medusa.checkpoint import PositionHeads
from ragspec.numerics.attention import Ints
from ragspec.numerics.backend import LogitRows


class PositionNetwork:
    """The weights of all heads, products in `dtype` (None: the target's), everything between them in float32."""

    def __init__(self, heads: PositionHeads, target: HeadTarget, dtype: torch.dtype | None = None) -> None:
        self.num_heads, self.vocab_size = heads.num_heads, target.vocab_size
        self.is_grounded = heads.is_grounded
        self.taps: tuple[int, ...] = (heads.tap,)
        dtype = dtype or target.embedding.dtype
        self.backend, self.width = target.backend.for_head(dtype), target.hidden_size
        self._target, self._dtype = target, float_dtype(dtype)
        own = {name: tensor for name, tensor in heads.tensors.items() if not name.startswith("prefix.")}
        weights = {name: tensor.to(self.backend.device, self._dtype) for name, tensor in own.items()}
        self._blocks = [
            [self._linear(weights, f"{i}.blocks.{j}") for j in range(heads.num_blocks)] for i in range(heads.num_heads)
        ]
        self._outputs = self._of_each_head(weights, "output")
        self._residuals = self._of_each_head(weights, "residual")
        table = weights.get("embedding")
        is_own = table is not None and not torch.equal(table, target.embedding.to(self._dtype))
        self._embedding = table if table is not None and is_own else target.embedding

    def inputs(self, states: Tensor, next_tokens: Ints) -> Tensor:
        """The input of the first head. Shapes: float32 [B, H], int32 [B] -> float32 [B, F]."""
        return self.grounded(states, next_tokens) if self.is_grounded else states

    def grounded(self, inputs: Tensor, token_ids: Ints | Tensor) -> Tensor:
        """Each row with the embedding of one more token. Shapes: float32 [N, F], int32 [N] -> float32 [N, F + H]."""
        with torch.inference_mode():
            embedded = F.embedding(self.backend.tokens(token_ids), self._embedding)
            return torch.cat([inputs, embedded.float()], 1)

    def logits(self, inputs: Tensor, head: int) -> LogitRows:
        """What one head guesses. Shapes: float32 [N, F] -> float32 [N, V]."""
        residual, output = self._residuals[head], self._outputs[head]
        with torch.inference_mode():
            z = inputs
            for j, block in enumerate(self._blocks[head]):
                straight = self._product(residual, z) if residual is not None and j == 0 else z
                z = straight + F.silu(self._product(block, z))
            if output is not None:
                return self.backend.logits(self._product(output, z))
            return self.backend.logits(self._target.logits_of(z.to(self._target.embedding.dtype)))

    def seconds(self, num_rows: int, context: int) -> float:
        """Seconds of one level of so many rows; the context costs nothing."""
        states = torch.zeros(num_rows, self.width, device=self.backend.device)
        begin = time.perf_counter()
        self.logits(self.inputs(states, np.zeros(num_rows, np.int32)), 0)
        self.backend.wait()
        return time.perf_counter() - begin

    def _of_each_head(self, weights: dict[str, Tensor], name: str) -> list[nn.Module | None]:
        names = [f"{i}.{name}" for i in range(self.num_heads)]
        return [self._linear(weights, name) if f"{name}.weight" in weights else None for name in names]

    def _linear(self, weights: dict[str, Tensor], name: str) -> nn.Module:
        return self.backend.make_linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def _product(self, layer: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, layer(x.to(self._dtype)).float())
