"""What a head should have said: losses and hits of every draft step over one micro-batch.

Owns the losses and the input noise. Step i of pair t predicts token x_{t+2+i}, which the target predicts at position
t+1+i; only predictions of tokens that carry loss count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.drafting.eagle.checkpoint import EagleFamily
from ragspec.training.heads.eagle_model import Eagle3Head, Head, Inputs, unroll
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.reference.batches import MicroBatch

REGRESSION_WEIGHT, CLASSIFICATION_WEIGHT = 1.0, 0.1
NOISE_TOKENS = 512
TOP = 4


@dataclass(frozen=True)
class Objective:
    """How many draft steps a head learns, the weight of each against the one before, what it sees, and how noisily."""

    num_steps: int
    position_decay: float = 0.8
    inputs: Inputs = Inputs.SHIFTED
    noise: float = 0.0


class StepScores(NamedTuple):
    """Sums over the rows of one draft step: losses, rows that count, target argmaxes found first and among the first four."""

    loss: Tensor
    num_rows: int
    top1: int
    top4: int


class Goals:
    """The target's predictions at the positions of a micro-batch that carry loss.

    Shapes: pairs int64 [B, A] and `num_pairs` of them real, last [P, H], argmax int64 [P], vocabulary int64 [Vd] or None.
    """

    def __init__(self, batch: MicroBatch, last: Tensor, target: FrozenTarget, vocabulary: Tensor | None) -> None:
        size, length = batch.ids.shape
        positions = batch.positions.to(last.device)
        self.place = torch.full((size, length + 1), -1, device=last.device)  # a last column behind the text's end
        self.place[positions // length, positions % length] = torch.arange(len(positions), device=last.device)
        self.pairs, self.is_real = _pair_rows(self.place)
        self.last = last.flatten(0, 1)[positions]
        with torch.no_grad():
            logits = target.logits(self.last).float()  # [P, V]
        self.argmax = logits.argmax(-1)
        kept = logits if vocabulary is None else logits[:, vocabulary]
        self.probs = torch.softmax(kept, -1)  # [P, Vd]
        self.in_vocabulary = torch.ones_like(self.argmax, dtype=torch.bool)
        self.draft_argmax = self.argmax
        if vocabulary is not None:
            self.in_vocabulary = torch.isin(self.argmax, vocabulary)
            self.draft_argmax = torch.where(self.in_vocabulary, torch.searchsorted(vocabulary, self.argmax), -1)

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Rows that count at a draft step, and the prediction each should make. Shapes: bool [B, A], int64 [rows]."""
        columns = (self.pairs + 1 + step).clamp(max=self.place.shape[1] - 1)
        places = self.place.gather(1, columns)
        counts = self.is_real & (places >= 0)
        return counts, places[counts]


def _pair_rows(place: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs whose first draft counts, one row a text, padded with pair 0. Shapes: int64 [B, A], bool [B, A]."""
    counts = place[:, 1:-1] >= 0  # pair t predicts what the target predicts at t + 1
    width = max(1, int(counts.sum(1).max()))
    order = torch.argsort(counts.to(torch.int8), dim=1, descending=True, stable=True)[:, :width]
    is_real = counts.gather(1, order)
    return torch.where(is_real, order, 0), is_real


def batch_scores(
    head: Head, target: FrozenTarget, batch: MicroBatch, objective: Objective, generator: torch.Generator | None = None
) -> list[StepScores]:
    """One entry per draft step. `generator` draws the noise on the features; None adds none."""
    features, last = target.states(batch.ids, head.config.aux_layers)
    is_eagle3 = isinstance(head, Eagle3Head)
    goals = Goals(batch, last, target, token_ids(head))
    features = features.float()
    if generator is not None and objective.noise:
        scale = objective.noise * NOISE_TOKENS / features.shape[1]
        features += (torch.rand(features.shape, generator=generator).to(features.device) - 0.5) * scale
    embedded = target.embed(batch.ids)
    states = unroll(head, embedded, features, goals.pairs, objective.num_steps, objective.inputs)
    score = _soft_cross_entropy if is_eagle3 else _regression
    return [_step_scores(head, target, goals, step, states[step], score) for step in range(objective.num_steps)]


Score = Callable[[Tensor, Tensor, Goals, Tensor], Tensor]


def _step_scores(head: Head, target: FrozenTarget, goals: Goals, step: int, states: Tensor, score: Score) -> StepScores:
    counts, places = goals.of_step(step)
    chosen = states[counts]  # [rows, H]
    logits = head.logits(chosen, target.logits).float()  # [rows, Vd]
    loss = (score(logits, chosen, goals, places) * goals.in_vocabulary[places]).sum()
    found = logits.detach().topk(min(TOP, logits.shape[1]), -1).indices == goals.draft_argmax[places, None]
    return StepScores(loss, len(places), int(found[:, 0].sum()), int(found.sum()))


def _soft_cross_entropy(logits: Tensor, _: Tensor, goals: Goals, places: Tensor) -> Tensor:
    return -(goals.probs[places] * torch.log_softmax(logits, -1)).sum(-1)


def _regression(logits: Tensor, states: Tensor, goals: Goals, places: Tensor) -> Tensor:
    """EAGLE-1's: distance to the target's own hidden state, and a little of what the output layer makes of it."""
    wanted = goals.last[places].float()
    distance = torch.nn.functional.smooth_l1_loss(states.float(), wanted, reduction="none").mean(-1)
    return REGRESSION_WEIGHT * distance + CLASSIFICATION_WEIGHT * _soft_cross_entropy(logits, states, goals, places)


def token_ids(head: Head) -> Tensor | None:
    """Target ids of a smaller draft vocabulary, rising. Shape: int64 [Vd]."""
    if head.config.family is EagleFamily.EAGLE3 and head.config.draft_vocab_size < head.config.vocab_size:
        offsets = head.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)
    return None
