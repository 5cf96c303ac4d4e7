"""How a head of any family learns: what the training loop asks of a head, and the losses of its draft steps.

Row t of a text drafts from the target's state at token t and knows token t + 1: draft step i of row t guesses token t + 2 + i.

    >>> states = head.unroll(embedded, features, rows, Objective(num_steps=4))          # [4, B, A, H]
    >>> logits = head.logits(states[2], target.logits, step=2)               # [B, A, V]
    >>> expected = TokenPredictions(batch, head.draft_token_ids())
    >>> scores = step_scores(head, project, expected, 0, states[0], LossWeights(token=1.0))

Step i of pair t predicts token x_{t+2+i}, which the target predicts at position t+1+i; only predictions of tokens that carry loss
count.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

TOP = 4
TOP_OF_TARGET = 10
"""Of HASS's loss on the target's most probable tokens."""
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
    with the text's own token, of the part of the second on the target's ten most probable tokens (HASS's top-k distillation), and
    of the absolute difference of both distributions (DSpark's).
    """

    state: float = 0.0
    teacher: float = 0.0
    token: float = 0.0
    top: float = 0.0
    difference: float = 0.0


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

    loss_weights: LossWeights
    """The published ones."""

    @abstractmethod
    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        """The states of chosen rows after each draft step; a family of fewer positions gives fewer.

        Shapes: embedded float32 [B, T, H], features [B, T, F], rows int64 [B, A] -> [num_steps, B, A, H].
        """

    @abstractmethod
    def logits(self, state: Tensor, project: Projection, step: int = 0, previous: Tensor | None = None) -> Tensor:
        """`previous`: the tokens before the guessed ones. Shapes: [..., H], int64 [...] -> [..., Vd]."""

    def draft_token_ids(self) -> Tensor | None:
        """Ascending target ids of a smaller draft vocabulary, or None. Shape: int64 [Vd]."""
        offsets = dict(self.named_buffers()).get("d2t")
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)


def rows_of(values: Tensor, rows: Tensor) -> Tensor:
    """Shapes: values [B, T, ...], rows int64 [B, A] -> [B, A, ...]."""
    return values[torch.arange(len(values), device=values.device)[:, None], rows]


class LearntText(Protocol):
    """Token ids, and the weight of predicting each: not 0 for tokens that are learnt. Same lengths."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def weights(self) -> list[float]: ...


class MicroBatch(NamedTuple):
    """`positions`: flat indices whose next token is learnt. Shapes: ids int64 [B, T], positions int64 [M]."""

    ids: Tensor
    positions: Tensor

    @property
    def num_learnt(self) -> int:
        return len(self.positions)


def collate(texts: Sequence[LearntText]) -> MicroBatch:
    """Pads with id 0."""
    length = max(len(text.ids) for text in texts)
    ids, learnt = torch.zeros(len(texts), length, dtype=torch.long), torch.zeros(len(texts), length)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        learnt[row, : len(text.ids) - 1] = torch.tensor(text.weights[1:])  # position t predicts token t + 1
    return MicroBatch(ids, learnt.flatten().nonzero().squeeze(1))


class StepScores(NamedTuple):
    """Sums over the rows of one draft step: losses, rows that count, and rows whose top 1 or top 4 hold the target's argmax."""

    loss: Tensor
    num_rows: int
    top1: int
    top4: int


class TokenPredictions:
    """The tokens of a micro-batch that carry loss, and the pairs that draft them.

    `index` is the prediction's number in [0, P) at each position, -1 without loss. `pairs` is padded where `is_real` is false.
    `draft_tokens`: indices of the text's own tokens in the draft vocabulary, or -1; `draft_argmax`: of those that count as hits;
    `previous`: the tokens before them. Where a target teaches, `probs` are its probabilities within the draft vocabulary.
    Shapes: index int64 [B, T + 1], pairs int64 [B, A], is_real bool [B, A], vocabulary int64 [Vd] or None, last [P, H], probs
    [P, Vd].
    """

    last: Tensor
    probs: Tensor

    def __init__(self, batch: MicroBatch, vocabulary: Tensor | None, device: torch.device | str = "cpu") -> None:
        size, length = batch.ids.shape
        positions = batch.positions.to(device)
        self.index = torch.full((size, length + 1), -1, device=device)  # the last column is behind the text's end
        self.index[positions // length, positions % length] = torch.arange(len(positions), device=device)
        self.pairs, self.is_real = _pair_rows(self.index)
        self.previous = batch.ids.flatten()[batch.positions].to(device)
        self.draft_tokens = draft_indices(batch.ids.flatten()[batch.positions + 1].to(device), vocabulary)
        self.draft_argmax = self.draft_tokens
        self._left_out: dict[int, Tensor] = {}

    def at_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows that count at a draft step, and the numbers of the predictions they learn. Shapes: bool [B, A], int64 [rows]."""
        columns = (self.pairs + 1 + step).clamp(max=self.index.shape[1] - 1)
        numbers = self.index.gather(1, columns)
        counts = self.is_real & (numbers >= 0)
        if step in self._left_out:
            counts &= ~self._left_out[step][numbers]
        return counts, numbers[counts]

    def leave_out(self, step: int, numbers: Tensor) -> None:
        """These predictions do not count at this draft step. Shape: int64 [rows]."""
        self._left_out.setdefault(step, torch.zeros_like(self.previous, dtype=torch.bool))[numbers] = True


def draft_indices(token_ids: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Indices in the draft vocabulary; -1 for tokens that it lacks."""
    if vocabulary is None:
        return token_ids
    return torch.where(torch.isin(token_ids, vocabulary), torch.searchsorted(vocabulary, token_ids), -1)


def _pair_rows(index: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs whose first draft counts, padded with pair 0. Shapes: int64 [B, A], bool [B, A]."""
    counts = index[:, 1:-1] >= 0  # pair t learns the target's prediction at t + 1
    width = max(1, int(counts.sum(1).max()))
    order = torch.argsort(counts.to(torch.int8), dim=1, descending=True, stable=True)[:, :width]
    is_real = counts.gather(1, order)
    return torch.where(is_real, order, 0), is_real


def step_scores(
    head: Head, project: Projection, expected: TokenPredictions, step: int, states: Tensor, weights: LossWeights
) -> StepScores:
    """Rows whose wanted token the head cannot draft have no loss."""
    counts, numbers = expected.at_step(step)
    chosen, previous = states[counts], expected.previous[numbers]  # [rows, H], [rows]
    logits = head.logits(chosen, project, step, previous).float()  # [rows, Vd]
    log_probs, argmax = torch.log_softmax(logits, -1), expected.draft_argmax[numbers]
    losses = torch.zeros(len(numbers), device=logits.device)
    if weights.teacher:
        losses = losses - weights.teacher * (expected.probs[numbers] * log_probs).sum(-1)
    if weights.top:
        top = expected.probs[numbers].topk(min(TOP_OF_TARGET, logits.shape[1]), -1)
        losses = losses - weights.top * (top.values * log_probs.gather(1, top.indices)).sum(-1)
    if weights.state:
        hidden = expected.last[numbers].float()
        distance = nn.functional.smooth_l1_loss(chosen.float(), hidden, reduction="none").mean(-1)
        losses = losses + weights.state * distance
    if weights.difference:
        losses = losses + weights.difference * (expected.probs[numbers] - log_probs.exp()).abs().sum(-1)
    total = (losses * (argmax >= 0)).sum()
    if weights.token:
        tokens = expected.draft_tokens[numbers]
        total = total + weights.token * nn.functional.nll_loss(log_probs, tokens, ignore_index=-1, reduction="sum")
    hits = logits.detach().topk(min(TOP, logits.shape[1]), -1).indices == argmax[:, None]
    return StepScores(total, len(numbers), int(hits[:, 0].sum()), int(hits.sum()))


def right_guesses(head: Head, project: Projection, expected: TokenPredictions, step: int, states: Tensor) -> Tensor:
    """The numbers of the predictions whose most probable token a head drafts first. Shape: int64 [rows]."""
    counts, numbers = expected.at_step(step)
    guesses = head.logits(states[counts], project, step, expected.previous[numbers]).argmax(-1)
    return numbers[guesses == expected.draft_argmax[numbers]]


def total_loss(scores: Sequence[StepScores], objective: Objective, num_rows: float) -> Tensor:
    """The loss of all draft steps over `num_rows`; each step counts `position_decay` times the step before."""
    return torch.stack([objective.position_decay**i * step.loss for i, step in enumerate(scores)]).sum() / num_rows
