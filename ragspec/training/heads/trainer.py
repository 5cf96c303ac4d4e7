"""Training of a drafter's head on the target's hidden states, over several draft steps. The loop is `Trainer`'s.

>>> trainer = DrafterTrainer(head, target, sample_text, DrafterPlan(total_tokens=20_000_000, objective=Objective(4)))
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.heads.learning import (
    Head,
    MicroBatch,
    Objective,
    StepScores,
    TokenPredictions,
    draft_indices,
    right_guesses,
    step_scores,
    total_loss,
)
from ragspec.training.conversations import Encoded
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.initialisation import write_trained
from ragspec.training.heads.training_texts import TextSampler, micro_batches, num_tokens, whole_text
from ragspec.training.trainer import SINGLE_WORKER, StepData, Trainer, TrainingPlan, WorkerGroup, mixed_precision

NOISE_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class DrafterPlan(TrainingPlan):
    """Length and speed of a run, and the source of its answers. Tokens are the target's rows."""

    objective: Objective
    max_tokens: int = 576  # a question behind three passages fits
    step_tokens: int = 512
    micro_tokens: int = 1_536
    peak_lr: float = 1e-3
    final_lr_share: float = 0.02
    weight_decay: float = 0.02
    answers: str = "dataset"
    num_answers: int = 0


class DrafterTrainer(Trainer[DrafterPlan, Encoded, MicroBatch]):
    """Trains one head in place. `earlier`: heads whose right guesses this head does not learn (Col-BT)."""

    gradient_clip = 0.5

    def __init__(
        self,
        head: Head,
        target: FrozenTarget,
        sample_text: TextSampler,
        plan: DrafterPlan,
        workers: WorkerGroup = SINGLE_WORKER,
        num_processes: int = 0,
        earlier: Sequence[Head] = (),
    ) -> None:
        parameters = list(head.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        draw, seed = partial(whole_text, sample_text, plan.max_tokens), f"{plan.seed}/{workers.rank}"
        data = StepData(draw, num_tokens, num_tokens, plan.step_tokens, seed, num_processes)
        super().__init__(head, groups, plan, target.device, workers, data)
        self.head, self.target, self._earlier = head, target, earlier

    def _batches(self, texts: list[Encoded]) -> list[MicroBatch]:
        return micro_batches(texts, self.plan.micro_tokens)

    def _backward(self, batch: MicroBatch, num_learnt: float, noise: torch.Generator) -> list[float]:
        with mixed_precision(self.device):
            scores = batch_scores(self.head, self.target, batch, self.plan.objective, noise, self._earlier)
            loss = total_loss(scores, self.plan.objective, num_learnt)
        torch.autograd.backward(loss)
        return _flat(scores)

    def _losses(self, sums: list[float]) -> dict[str, float]:
        """`loss_i`, `top1_i` and `top4_i` of draft step i, from 1. `sums`: the four fields of `StepScores` for each step."""
        rates: dict[str, float] = {}
        for index in range(len(sums) // 4):
            loss, num_rows, top1, top4 = sums[4 * index : 4 * index + 4]
            named = {"loss": loss, "top1": top1, "top4": top4}
            rates |= {f"{name}_{index + 1}": value / max(1.0, num_rows) for name, value in named.items()}
        return rates

    @torch.no_grad()
    def probe(self, batches: list[MicroBatch], num_steps: int) -> dict[str, float]:
        """Hits of the averaged weights on given texts; each draft step reads the true tokens before it.

        Heads for fewer positions have fewer steps.
        """
        head = self.averaged_head()
        steps = Objective(num_steps, inputs=self.plan.objective.inputs)
        with mixed_precision(self.device):
            sums = [_flat(batch_scores(head, self.target, batch, steps)) for batch in batches]
        return self._losses(list(map(sum, zip(*sums, strict=True))))

    def averaged_head(self) -> Head:
        """A copy of the head with the averaged weights."""
        averaged = copy.deepcopy(self.head)
        self._copy_to(averaged, self.average)
        return averaged

    def exported(self) -> dict[str, torch.Tensor]:
        """The averaged weights in bf16, by their published names."""
        tensors = self.averaged_head().state_dict()
        return {n: (t.bfloat16() if t.is_floating_point() else t).cpu() for n, t in tensors.items()}

    def write_head(self, directory: Path) -> None:
        """Write the averaged head in the published layout. Raises: ModelError, SaveError."""
        write_trained(directory, self.head, self.exported(), self.target.name)

    def _model_config(self) -> dict[str, Any]:
        identity: dict[str, Any] = json.loads(json.dumps(asdict(self.head.config)))
        identity.pop("shares_lm_head", None)  # Why: False in training, and checkpoints of earlier versions lack it
        return identity


class TargetPredictions(TokenPredictions):
    """The target's predictions at the positions of a micro-batch that carry loss.

    A hit is the target's most probable token. Shape: argmax int64 [P].
    """

    def __init__(self, batch: MicroBatch, last: Tensor, target: FrozenTarget, vocabulary: Tensor | None) -> None:
        super().__init__(batch, vocabulary, last.device)
        self.last = last.flatten(0, 1)[batch.positions.to(last.device)]
        with torch.no_grad():
            logits = target.logits(self.last).float()  # [P, V]
        self.argmax = logits.argmax(-1)
        kept = logits if vocabulary is None else logits[:, vocabulary]
        self.probs = torch.softmax(kept, -1)
        self.draft_argmax = draft_indices(self.argmax, vocabulary)


def batch_scores(
    head: Head,
    target: FrozenTarget,
    batch: MicroBatch,
    objective: Objective,
    generator: torch.Generator | None = None,
    earlier: Sequence[Head] = (),
) -> list[StepScores]:
    """One entry per draft step. `generator` draws the noise on features; None: no noise. Guesses that one of the `earlier` heads
    makes right do not count."""
    expected, states = unrolled(head, target, batch, objective, generator)
    for other in earlier:
        with torch.no_grad():
            known, drafted = unrolled(other, target, batch, replace(objective, noise=0.0))
            for step, state in enumerate(drafted):
                expected.leave_out(step, right_guesses(other, target.logits, known, step, state))
    weights = objective.loss_weights or head.loss_weights
    return [step_scores(head, target.logits, expected, step, state, weights) for step, state in enumerate(states)]


def unrolled(
    head: Head, target: FrozenTarget, batch: MicroBatch, objective: Objective, generator: torch.Generator | None = None
) -> tuple[TargetPredictions, Tensor]:
    """The target's predictions, and the head's states behind every draft step. Shape: [num_steps, B, A, H]."""
    features, last = target.states(batch.ids, head.config.aux_layers)
    expected = TargetPredictions(batch, last, target, head.draft_token_ids())
    features = features.float()
    if generator is not None and objective.noise:
        scale = objective.noise * NOISE_TOKENS / features.shape[1]
        features += (torch.rand(features.shape, generator=generator).to(features.device) - 0.5) * scale
    return expected, head.unroll(target.embed(batch.ids), features, expected.pairs, objective)


def _flat(scores: list[StepScores]) -> list[float]:
    return [float(value) for step in scores for value in (step.loss.detach(), *step[1:])]
