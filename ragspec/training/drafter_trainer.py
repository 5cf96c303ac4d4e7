"""The training loop of a drafter head.

Owns the schedule, the optimizer, the moving average of the weights and the checkpoints. Every step's data and noise are a
function of (seed, step, worker), so a run that was killed continues exactly where its last checkpoint stood.
"""

import copy
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ragspec.drafting.eagle_checkpoint import HeadCheckpoint
from ragspec.errors import ConfigError
from ragspec.training.checkpoint import read_checkpoint, write_checkpoint
from ragspec.training.drafter_examples import Draw, draw_batches
from ragspec.training.drafter_losses import Objective, StepScores, batch_scores
from ragspec.training.drafter_target import FrozenTarget
from ragspec.training.eagle_model import Head
from ragspec.training.target_batches import MicroBatch
from ragspec.training.target_trainer import Progress
from ragspec.training.workers import ALONE, Workers

GRADIENT_CLIP = 0.5
FREE_AT_RESUME = ("total_tokens", "minutes", "checkpoint_every_s")
"""Of a plan, what no text and no loss depends on: a run may be made longer or shorter on its way."""


@dataclass(frozen=True)
class DrafterPlan:
    """How long, how fast and on whose answers.

    Progress is the larger of the token share and the time share; tokens are the target's rows.
    """

    total_tokens: int
    objective: Objective
    minutes: float | None = None
    seed: int = 0
    max_tokens: int = 320
    step_tokens: int = 3_072
    micro_tokens: int = 1_536
    peak_lr: float = 1e-3
    final_lr_share: float = 0.02
    warmup_steps: int = 100
    weight_decay: float = 0.02
    ema_decay: float = 0.997
    checkpoint_every_s: float = 120.0
    answers: str = "dataset"
    num_answers: int = 0


class DrafterTrainer:
    """Trains one head in place; `run` yields a record of every step."""

    def __init__(
        self, head: Head, target: FrozenTarget, draw: Draw, plan: DrafterPlan, workers: Workers = ALONE
    ) -> None:
        self.head, self.target, self.draw, self.plan, self.workers = head, target, draw, plan, workers
        self.device = target.device
        self.progress = Progress()
        self.history: list[dict[str, float]] = []
        self.probes: list[dict[str, float]] = []
        parameters = list(head.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": plan.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.95), fused=True)
        self.average = [p.detach().clone() for p in parameters]

    def share_done(self) -> float:
        """How much of the run is behind, 0-1."""
        by_tokens = self.progress.tokens / self.plan.total_tokens
        by_time = self.progress.elapsed_s / (60 * self.plan.minutes) if self.plan.minutes else 0.0
        return max(by_tokens, by_time)

    def run(self) -> Iterator[dict[str, float]]:
        """Train to the end of the plan, one yielded record per step."""
        while self.share_done() < 1.0:
            started = time.monotonic()
            record = self.train_step()
            self.progress.elapsed_s += self.workers.from_first(time.monotonic() - started)
            record["elapsed_s"] = self.progress.elapsed_s
            self.history.append(record)
            yield record

    def train_step(self) -> dict[str, float]:
        """One optimizer step over the data of (seed, step, worker)."""
        plan, share = self.plan, self.share_done()
        seed = (plan.seed * 1_000_003 + self.progress.step) * self.workers.size + self.workers.rank
        batches = draw_batches(self.draw, random.Random(seed), plan.max_tokens, plan.step_tokens, plan.micro_tokens)
        lr = self.learning_rate(share)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        num_rows = self.workers.total(sum(len(batch.positions) for batch in batches))[0]
        noise = torch.Generator().manual_seed(seed)
        sums = [self._backward(batch, num_rows, noise) for batch in batches]
        self.workers.add_gradients(self.head.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), GRADIENT_CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.progress.step += 1
        self.progress.tokens += int(self.workers.total(sum(batch.ids.numel() for batch in batches))[0])
        rates = self._rates([sum(column) for column in zip(*sums, strict=True)])
        spent = {"step": self.progress.step, "tokens": self.progress.tokens, "share": share}
        return {**spent, "lr": lr, "grad_norm": float(norm), **rates}

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

    def learning_rate(self, share: float) -> float:
        """Linear warm-up over steps, then half a cosine over the run."""
        warmup = min(1.0, (self.progress.step + 1) / self.plan.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return self.plan.peak_lr * warmup * (cosine * (1 - self.plan.final_lr_share) + self.plan.final_lr_share)

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.plan.ema_decay, (1 + self.progress.step) / (10 + self.progress.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.head.parameters()], 1 - decay)

    @torch.no_grad()
    def averaged_head(self) -> Head:
        """A copy of the head with the averaged weights."""
        averaged = copy.deepcopy(self.head)
        for parameter, average in zip(averaged.parameters(), self.average, strict=True):
            parameter.copy_(average)
        return averaged

    def exported(self) -> HeadCheckpoint:
        """The averaged weights in bf16 by their published names."""
        tensors = self.averaged_head().state_dict()
        kept = {n: (t.bfloat16() if t.is_floating_point() else t).cpu() for n, t in tensors.items()}
        return HeadCheckpoint(self.head.config, kept)

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash at any moment leaves the old or the new one."""
        tensors: dict[str, Tensor] = {f"buffer.{name}": buffer for name, buffer in self.head.named_buffers()}
        for (name, parameter), average in zip(self.head.named_parameters(), self.average, strict=True):
            tensors |= {f"model.{name}": parameter.detach(), f"average.{name}": average}
            tensors |= {f"optimizer.{key}.{name}": value for key, value in self.optimizer.state[parameter].items()}
        state = {"progress": asdict(self.progress), "history": self.history, "probes": self.probes}
        write_checkpoint(path, tensors, {**state, "identity": self._identity()})

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continue from a checkpoint; the length of the run may be another one.

        Raises: ConfigError naming the first difference if it is of another head, another plan or other workers.
        """
        try:
            tensors, state = read_checkpoint(path, self.device)
            identity = state["identity"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as cause:
            raise ConfigError(f"{path} cannot be resumed: it is no checkpoint of a head") from cause
        for name, ours in self._identity().items():
            if identity.get(name) != ours:
                theirs = identity.get(name)
                raise ConfigError(f"{path} cannot be resumed: its {name} is {theirs}, and this run's is {ours}")
        for (name, parameter), average in zip(self.head.named_parameters(), self.average, strict=True):
            parameter.copy_(tensors[f"model.{name}"])
            average.copy_(tensors[f"average.{name}"])
            if f"optimizer.step.{name}" in tensors:
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[parameter] = {key: tensors[f"optimizer.{key}.{name}"] for key in keys}
        for name, buffer in self.head.named_buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
        self.progress = Progress(**state["progress"])
        self.history, self.probes = state["history"], state["probes"]

    def _identity(self) -> dict[str, Any]:
        """What every step depends on beside its number, as JSON gives it back."""
        shape = {**asdict(self.head.config), "aux_layers": list(self.head.config.aux_layers)}
        plan = asdict(self.plan)
        plan |= plan.pop("objective")
        kept = {name: value for name, value in plan.items() if name not in FREE_AT_RESUME}
        return {**shape, **kept, "num_workers": self.workers.size}


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
