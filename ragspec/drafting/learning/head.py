"""What the trainer asks of a head of any family.

Row t of a text drafts from the target's state at token t and knows token t + 1: draft step i of row t guesses token t + 2 + i.

    >>> states = head.unroll(embedded, features, rows, Objective(num_steps=4))          # [4, B, A, H]
    >>> logits = head.logits(states[2], target.logits, step=2)               # [B, A, V]
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Projection = Callable[[Tensor], Tensor]
"""The target's output layer."""


class Inputs(enum.StrEnum):
    """The parts of an EAGLE head's pair; all but the first are ablations of the EAGLE paper."""

    SHIFTED = "feature+token"
    UNSHIFTED = "feature+unshifted-token"
    TOKEN = "token"
    FEATURE = "feature"

    def kept(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and state, with zeros for the part that the head must not see."""
        if self is Inputs.TOKEN:
            return embedded, torch.zeros_like(state)
        return (torch.zeros_like(embedded), state) if self is Inputs.FEATURE else (embedded, state)


@dataclass(frozen=True)
class LossWeights:
    """Weights of the distance to the target's state, of the cross-entropy with the target's distribution, of the cross-entropy
    with the text's own token, and of the part of the second on the target's ten most probable tokens (HASS's top-k distillation).
    """

    state: float = 0.0
    teacher: float = 0.0
    token: float = 0.0
    top: float = 0.0


@dataclass(frozen=True)
class Objective:
    """`num_steps`: draft steps learnt. `position_decay`: weight of a step relative to the step before. `noise`: width of the
    uniform noise on features, for a text of 512 tokens. `loss_weights` None: those of the head's paper. `is_detached`: no
    gradient flows from a draft step into the step before (HASS, PosS).
    """

    num_steps: int
    position_decay: float = 0.8
    inputs: Inputs = Inputs.SHIFTED
    noise: float = 0.0
    loss_weights: LossWeights | None = None
    is_detached: bool = False


class Head(nn.Module, ABC):
    """A trainable head, whose weights have the published names."""

    config: Any
    """A frozen dataclass. With `aux_layers`, the taps that the head reads; none: the state behind the target's final norm."""

    loss_weights: ClassVar[LossWeights]
    """The published ones."""

    @abstractmethod
    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        """The states of chosen rows after each draft step; a family of fewer positions gives fewer.

        Shapes: embedded float32 [B, T, H], features [B, T, F], rows int64 [B, A] -> [num_steps, B, A, H].
        """

    @abstractmethod
    def logits(self, state: Tensor, project: Projection, step: int = 0) -> Tensor:
        """Shapes: [..., H] -> [..., Vd]."""

    @abstractmethod
    def write(self, directory: Path, tensors: dict[str, Tensor], target: str) -> None:
        """Write tensors of the head's names in the published layout. Raises: ModelError, SaveError."""

    def draft_token_ids(self) -> Tensor | None:
        """Ascending target ids of a smaller draft vocabulary, or None. Shape: int64 [Vd]."""
        return None


def rows_of(values: Tensor, rows: Tensor) -> Tensor:
    """Shapes: values [B, T, ...], rows int64 [B, A] -> [B, A, ...]."""
    return values[torch.arange(len(values), device=values.device)[:, None], rows]
