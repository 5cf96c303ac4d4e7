"""The training loop of the reference target.

Owns the schedule, the optimizer, the moving average of the weights and the checkpoints. Every step's data is a
function of (seed, step, worker), so a run that was killed continues exactly where its last checkpoint stood.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ragspec.training.checkpoint import read_checkpoint, write_checkpoint
from ragspec.training.guidance import Guidance, Guide
from ragspec.training.spelling_head import left_alone
from ragspec.training.structured_init import centre_signatures
from ragspec.training.target_batches import ANSWER_WEIGHT, ExampleEncoder
from ragspec.training.target_examples import Lengths
from ragspec.training.target_packs import PackStream
from ragspec.training.target_rows import RowEncoder
from ragspec.training.target_steps import RowBatch, draw_rows
from ragspec.training.workers import ALONE, Workers


@dataclass(frozen=True)
class Stage:
    """Examples of one length class, up to `until` (a share of the whole run)."""

    until: float
    max_tokens: int
    lengths: Lengths
    step_tokens: int


STAGES = (
    Stage(0.1, 320, Lengths(2, (12, 45), 100), 3_840),
    Stage(0.45, 512, Lengths(3, (25, 80), 200), 4_096),
    Stage(0.88, 768, Lengths(4, (35, 125), 350), 4_608),
    Stage(1.01, 1152, Lengths(4, (60, 190), 500), 6_144),
)


@dataclass(frozen=True)
class TrainingPlan:
    """How long and how fast. Progress is the larger of the token share and the time share."""

    total_tokens: int
    minutes: float | None = None
    seed: int = 0
    micro_tokens: int = 4_608
    peak_lr: float = 1.2e-3
    final_lr_share: float = 0.03
    positional_lr_share: float = 0.2
    embedding_lr_share: float = 0.3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    ema_decay: float = 0.997
    checkpoint_every_s: float = 120.0
    first_stage: int = 0


def continued(plan: TrainingPlan) -> TrainingPlan:
    """The same run over trained weights: half the rate, and not the stage of the shortest examples."""
    return replace(plan, peak_lr=plan.peak_lr / 2, first_stage=1)


@dataclass
class Progress:
    """What a checkpoint continues from."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


class TargetTrainer:
    """Trains one model in place; `run` yields a record of every step."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        encoder: ExampleEncoder,
        stream_for: Callable[[Lengths, int], PackStream],
        plan: TrainingPlan,
        device: str = "cpu",
        workers: Workers = ALONE,
    ) -> None:
        self.model, self.encoder, self.plan, self.device, self.workers = model, encoder, plan, device, workers
        torch.nn.Module.to(model, device)
        for name, mask in left_alone(model).items():
            model.get_parameter(name).register_hook(mask.__mul__)
        self.stream_for = stream_for
        self.rows = RowEncoder(encoder)
        self.progress = Progress()
        self.history: list[dict[str, float]] = []
        self.probes: list[dict[str, float]] = []
        self.optimizer = torch.optim.AdamW(parameter_groups(model, plan), betas=(0.9, 0.95), fused=True)
        self.average = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def centre(self) -> None:
        """Finish the initialisation with what sentences have in common; once, before the first step."""
        stage = STAGES[1]
        stream = self.stream_for(stage.lengths, self.plan.seed)
        seen: list[Tensor] = []
        for batch in draw_rows(stream, self.rows, stage.max_tokens, 4 * stage.step_tokens, self.plan.micro_tokens):
            starts = [
                (g.text, int(keys.nonzero()[0])) for g in batch.guided if g.guide is Guide.START for keys in g.keys
            ]
            layer = self.model.model.layers[Guide.START.layer]
            handle = layer.input_layernorm.register_forward_hook(
                lambda _module, _args, normed, starts=starts: seen.extend(
                    normed[text, at].float() for text, at in set(starts)
                )
            )
            self.token_losses(batch)
            handle.remove()
        centre_signatures(self.model, torch.stack(seen))

    def share_done(self) -> float:
        """How much of the run is behind, 0-1."""
        by_tokens = self.progress.tokens / self.plan.total_tokens
        by_time = self.progress.elapsed_s / (60 * self.plan.minutes) if self.plan.minutes else 0.0
        return max(by_tokens, by_time)

    def run(self) -> Iterator[dict[str, float]]:
        """Train to the end of the plan, one yielded record per step."""
        self.model.train()
        while self.share_done() < 1.0:
            started = time.monotonic()
            record = self.train_step()
            self.progress.elapsed_s += self.workers.from_first(time.monotonic() - started)
            record["elapsed_s"] = self.progress.elapsed_s
            self.history.append(record)
            yield record

    def train_step(self) -> dict[str, float]:
        """One optimizer step over the data of (seed, step, worker)."""
        share = self.share_done()
        stage = next(s for s in STAGES[self.plan.first_stage :] if share < s.until)
        stream = self.stream_for(stage.lengths, self._data_seed())
        batches = draw_rows(stream, self.rows, stage.max_tokens, stage.step_tokens, self.plan.micro_tokens)
        lr = self.learning_rate(share)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_share"]
        total_weight = self.workers.total(sum(float(batch.weights.sum()) for batch in batches))[0]
        own = sum((batch.num_guided for batch in batches), Counter[Guide]())
        num_guided = dict(zip(Guide, self.workers.total(*(own[guide] for guide in Guide)), strict=True))
        guided_losses = dict.fromkeys(num_guided, 0.0)
        answer_loss, answer_tokens = 0.0, 0
        for batch in batches:
            losses, guided = self.token_losses(batch)
            weights = batch.weights.to(self.device)
            loss = (losses * weights).sum() / total_weight
            for guide, total in guided.items():
                loss = loss + guide.weight * total / num_guided[guide]
                guided_losses[guide] += float(total.detach()) / num_guided[guide]
            torch.autograd.backward(loss)
            is_answer = weights >= ANSWER_WEIGHT
            answer_loss += float(losses.detach()[is_answer].sum())
            answer_tokens += int(is_answer.sum())
        self.workers.add_gradients(self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.progress.step += 1
        num_tokens = sum(batch.ids.numel() for batch in batches)
        loss_sum, loss_tokens, step_tokens = self.workers.total(answer_loss, answer_tokens, num_tokens)
        guided_losses = dict(zip(guided_losses, self.workers.total(*guided_losses.values()), strict=True))
        self.progress.tokens += int(step_tokens)
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "share": share,
            "lr": lr,
            "answer_loss": loss_sum / max(1, loss_tokens),
            "grad_norm": float(norm),
            **{f"guide_{guide.name.lower()}": value for guide, value in guided_losses.items()},
        }

    def _data_seed(self) -> int:
        return self.plan.seed * 1_000_003 + self.progress.step * self.workers.size + self.workers.rank

    def token_losses(self, batch: RowBatch) -> tuple[Tensor, dict[Guide, Tensor]]:
        """Cross entropy at the positions that carry loss, shape [M], float32; the sum of each guided head's losses."""
        guidance = Guidance(batch.bias, batch.guided).to(self.device)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            hidden = self.model.model(
                input_ids=batch.ids.to(self.device),
                position_ids=batch.places.to(self.device),
                use_cache=False,
                guidance=guidance,
            ).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[batch.positions.to(self.device)])  # [M, V]
        losses = torch.nn.functional.cross_entropy(logits.float(), batch.targets.to(self.device), reduction="none")
        return losses, guidance.losses

    def learning_rate(self, share: float) -> float:
        """Linear warm-up over steps, then half a cosine over the run."""
        warmup = min(1.0, (self.progress.step + 1) / self.plan.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return self.plan.peak_lr * warmup * (cosine * (1 - self.plan.final_lr_share) + self.plan.final_lr_share)

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.plan.ema_decay, (1 + self.progress.step) / (10 + self.progress.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.model.parameters()], 1 - decay)

    @torch.no_grad()
    def averaged_model(self) -> LlamaForCausalLM:
        """A copy of the model with the averaged weights."""
        config = copy.deepcopy(self.model.config)
        config._attn_implementation = "sdpa"  # the training kernel knows neither caches nor left padding
        averaged = LlamaForCausalLM(config)
        for parameter, average in zip(averaged.parameters(), self.average, strict=True):
            parameter.copy_(average)
        averaged.eval()
        return averaged

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash at any moment leaves the old or the new one."""
        tensors: dict[str, Tensor] = {}
        for (name, parameter), average in zip(self.model.named_parameters(), self.average, strict=True):
            tensors |= {f"model.{name}": parameter.detach(), f"average.{name}": average}
            tensors |= {f"optimizer.{key}.{name}": value for key, value in self.optimizer.state[parameter].items()}
        state = {"progress": asdict(self.progress), "history": self.history, "probes": self.probes}
        write_checkpoint(path, tensors, state)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        tensors, state = read_checkpoint(path, self.device)
        for (name, parameter), average in zip(self.model.named_parameters(), self.average, strict=True):
            parameter.copy_(tensors[f"model.{name}"])
            average.copy_(tensors[f"average.{name}"])
            if f"optimizer.step.{name}" in tensors:
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[parameter] = {key: tensors[f"optimizer.{key}.{name}"] for key in keys}
        self.progress = Progress(**state["progress"])
        self.history, self.probes = state["history"], state["probes"]


def parameter_groups(model: LlamaForCausalLM, plan: TrainingPlan) -> list[dict[str, Any]]:
    """Weight decay on matrices only; slower steps for the layer of the positional heads and for the embedding all circuits read.

    The other circuits are held by their guides.

    Why: a structured head's score is one large product, so a step that suits fresh weights soon destroys it. Seen with
    an earlier form of the circuits: the first quoted token cost 5.0 nats after 0.65 M tokens at the full rate, and 3.5
    after 0.52 M at a slower one.
    """
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        share = 1.0
        if "embed_tokens" in name:
            share = plan.embedding_lr_share
        elif name.startswith("model.layers.") and int(name.split(".")[2]) == 0:
            share = plan.positional_lr_share
        groups.setdefault((share, plan.weight_decay if parameter.dim() > 1 else 0.0), []).append(parameter)
    return [{"params": p, "lr": plan.peak_lr, "lr_share": s, "weight_decay": d} for (s, d), p in groups.items()]
