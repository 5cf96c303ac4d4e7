"""Losses and hits of every draft step over one micro-batch.

Owns the losses and the noise on features. Step i of pair t predicts token x_{t+2+i}, which the target predicts at position t+1+i;
only predictions of tokens that carry loss count.

    >>> scores = batch_scores(head, target, batch, Objective(num_steps=4))      # one StepScores per draft step
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.head import Head, LossWeights, Objective
from ragspec.training.heads.training_texts import MicroBatch

NOISE_TOKENS = 512
TOP = 4
TOP_OF_TARGET = 10


class StepScores(NamedTuple):
    """Sums over the rows of one draft step: losses, rows that count, and rows whose top 1 or top 4 hold the target's argmax."""

    loss: Tensor
    num_rows: int
    top1: int
    top4: int


class TargetPredictions:
    """The target's predictions at the positions of a micro-batch that carry loss.

    `index` is the prediction's number in [0, P) at each position, -1 without loss. `pairs` is padded where `is_real` is false.
    Shapes: index int64 [B, T + 1], pairs int64 [B, A], is_real bool [B, A], last [P, H], argmax and tokens int64 [P], vocabulary
    int64 [Vd] or None. `draft_tokens`: indices of the text's own tokens in the draft vocabulary, or -1.
    """

    def __init__(self, batch: MicroBatch, last: Tensor, target: FrozenTarget, vocabulary: Tensor | None) -> None:
        size, length = batch.ids.shape
        positions = batch.positions.to(last.device)
        self.index = torch.full((size, length + 1), -1, device=last.device)  # the last column is behind the text's end
        self.index[positions // length, positions % length] = torch.arange(len(positions), device=last.device)
        self.pairs, self.is_real = _pair_rows(self.index)
        self.last = last.flatten(0, 1)[positions]
        with torch.no_grad():
            logits = target.logits(self.last).float()  # [P, V]
        self.argmax = logits.argmax(-1)
        kept = logits if vocabulary is None else logits[:, vocabulary]
        self.probs = torch.softmax(kept, -1)  # [P, Vd]
        self.draft_argmax = _draft_indices(self.argmax, vocabulary)
        self.draft_tokens = _draft_indices(batch.ids.flatten()[batch.positions + 1].to(last.device), vocabulary)

    def at_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows that count at a draft step, and the numbers of the predictions they learn. Shapes: bool [B, A], int64 [rows]."""
        columns = (self.pairs + 1 + step).clamp(max=self.index.shape[1] - 1)
        numbers = self.index.gather(1, columns)
        counts = self.is_real & (numbers >= 0)
        return counts, numbers[counts]


def _draft_indices(token_ids: Tensor, vocabulary: Tensor | None) -> Tensor:
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


def batch_scores(
    head: Head, target: FrozenTarget, batch: MicroBatch, objective: Objective, generator: torch.Generator | None = None
) -> list[StepScores]:
    """One entry per draft step. `generator` draws the noise on features; None: no noise."""
    features, last = target.states(batch.ids, head.config.aux_layers)
    expected = TargetPredictions(batch, last, target, head.draft_token_ids())
    features = features.float()
    if generator is not None and objective.noise:
        scale = objective.noise * NOISE_TOKENS / features.shape[1]
        features += (torch.rand(features.shape, generator=generator).to(features.device) - 0.5) * scale
    states = head.unroll(target.embed(batch.ids), features, expected.pairs, objective)
    weights = objective.loss_weights or head.loss_weights
    return [_step_scores(head, target, expected, step, state, weights) for step, state in enumerate(states)]


def _step_scores(
    head: Head, target: FrozenTarget, expected: TargetPredictions, step: int, states: Tensor, weights: LossWeights
) -> StepScores:
    """Rows whose wanted token the head cannot draft have no loss."""
    counts, numbers = expected.at_step(step)
    chosen = states[counts]  # [rows, H]
    logits = head.logits(chosen, target.logits, step).float()  # [rows, Vd]
    log_probs, argmax = torch.log_softmax(logits, -1), expected.draft_argmax[numbers]
    losses = torch.zeros(len(numbers), device=logits.device)
    if weights.teacher:
        losses = losses - weights.teacher * (expected.probs[numbers] * log_probs).sum(-1)
    if weights.top:
        top = expected.probs[numbers].topk(min(TOP_OF_TARGET, logits.shape[1]), -1)
        losses = losses - weights.top * (top.values * log_probs.gather(1, top.indices)).sum(-1)
    if weights.state:
        hidden = expected.last[numbers].float()
        distance = torch.nn.functional.smooth_l1_loss(chosen.float(), hidden, reduction="none").mean(-1)
        losses = losses + weights.state * distance
    total = (losses * (argmax >= 0)).sum()
    if weights.token:
        tokens = expected.draft_tokens[numbers]
        total = total + weights.token * torch.nn.functional.nll_loss(
            log_probs, tokens, ignore_index=-1, reduction="sum"
        )
    hits = logits.detach().topk(min(TOP, logits.shape[1]), -1).indices == argmax[:, None]
    return StepScores(total, len(numbers), int(hits[:, 0].sum()), int(hits.sum()))
