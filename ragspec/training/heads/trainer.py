"""What a drafter's head learns from: the target's hidden states, several draft steps deep. The loop is `Trainer`'s."""

import copy
import random
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ragspec.drafting.eagle.checkpoint import HeadCheckpoint
from ragspec.training.heads.eagle_model import Head
from ragspec.training.heads.examples import Draw, draw_batches
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.losses import Objective, StepScores, batch_scores
from ragspec.training.reference.batches import MicroBatch
from ragspec.training.trainer import Plan, Trainer
from ragspec.training.workers import ALONE, Workers


@dataclass(frozen=True, kw_only=True)
class DrafterPlan(Plan):
    """How long, how fast and on whose answers. Tokens are the target's rows."""

    objective: Objective
    max_tokens: int = 320
    step_tokens: int = 3_072
    micro_tokens: int = 1_536
    peak_lr: float = 1e-3
    final_lr_share: float = 0.02
    weight_decay: float = 0.02
    answers: str = "dataset"
    num_answers: int = 0


class DrafterTrainer(Trainer[DrafterPlan]):
    """Trains one head in place."""

    gradient_clip = 0.5

    def __init__(
        self, head: Head, target: FrozenTarget, draw: Draw, plan: DrafterPlan, workers: Workers = ALONE
    ) -> None:
        parameters = list(head.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": plan.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        super().__init__(head, groups, plan, target.device, workers)
        self.head, self.target, self.draw = head, target, draw

    def _learn(self, seed: int, share: float) -> tuple[int, dict[str, float]]:
        plan = self.plan
        batches = draw_batches(self.draw, random.Random(seed), plan.max_tokens, plan.step_tokens, plan.micro_tokens)
        num_rows = self.workers.total(sum(len(batch.positions) for batch in batches))[0]
        noise = torch.Generator().manual_seed(seed)
        sums = [self._backward(batch, num_rows, noise) for batch in batches]
        num_tokens = sum(batch.ids.numel() for batch in batches)
        return num_tokens, self._rates([sum(column) for column in zip(*sums, strict=True)])

    def _backward(self, batch: MicroBatch, num_rows: float, noise: torch.Generator) -> list[float]:
        """Add a micro-batch's gradients; returns its sums for `_rates`."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            scores = batch_scores(self.head, self.target, batch, self.plan.objective, noise)
            decay = self.plan.objective.position_decay
            loss = torch.stack([decay**i * step.loss for i, step in enumerate(scores)]).sum() / num_rows
        torch.autograd.backward(loss)
        return _flat(scores)

    def _rates(self, sums: list[float]) -> dict[str, float]:
        """Mean loss and hits per draft step from the sums over all rows and workers."""
        return step_rates(self.workers.total(*sums))

    @torch.no_grad()
    def probe(self, batches: list[MicroBatch], num_steps: int) -> dict[str, float]:
        """Hits of the averaged weights on given texts, each draft step conditioned on the true tokens before it."""
        head = self.averaged_head()
        steps = Objective(num_steps, inputs=self.plan.objective.inputs)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            sums = [_flat(batch_scores(head, self.target, batch, steps)) for batch in batches]
        return step_rates([sum(column) for column in zip(*sums, strict=True)])

    def averaged_head(self) -> Head:
        """A copy of the head with the averaged weights."""
        averaged = copy.deepcopy(self.head)
        self._put_average(averaged)
        return averaged

    def exported(self) -> HeadCheckpoint:
        """The averaged weights in bf16 by their published names."""
        tensors = self.averaged_head().state_dict()
        kept = {n: (t.bfloat16() if t.is_floating_point() else t).cpu() for n, t in tensors.items()}
        return HeadCheckpoint(self.head.config, kept)

    def _shape(self) -> dict[str, Any]:
        return {**asdict(self.head.config), "aux_layers": list(self.head.config.aux_layers)}


def _flat(scores: list[StepScores]) -> list[float]:
    return [float(value) for step in scores for value in (step.loss.detach(), *step[1:])]


def step_rates(sums: list[float]) -> dict[str, float]:
    """`loss_i`, `top1_i` and `top4_i` of draft step i, from 1, out of four sums a step."""
    rates: dict[str, float] = {}
    for index in range(len(sums) // 4):
        loss, num_rows, top1, top4 = sums[4 * index : 4 * index + 4]
        named = {"loss": loss, "top1": top1, "top4": top4}
        rates |= {f"{name}_{index + 1}": value / max(1.0, num_rows) for name, value in named.items()}
    return rates
