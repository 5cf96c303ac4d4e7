"""Training of a target's adapter on packed rows. The loop is `Trainer`'s.

>>> trainer = AdapterTrainer(model, draw_row, AdapterPlan(total_tokens=8_000_000))
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ragspec.training.reference.lora import adapter_parameters, add_adapters, load_adapter
from ragspec.training.reference.rows import Row, RowBatch, collate
from ragspec.training.trainer import SINGLE_WORKER, Trainer, TrainingPlan, WorkerGroup

GPU_ROWS = 16
"""Rows computed together on a GPU; a processor computes them one by one."""
BLOCK_QUERIES = 128
"""Queries that attend together on a processor."""


@dataclass(frozen=True, kw_only=True)
class AdapterPlan(TrainingPlan):
    """`rows_per_step`: rows of a step and worker, each of `micro_tokens` tokens at most. `decay_share`: the last part of the run,
    over which the rate falls."""

    rows_per_step: int = 2
    micro_tokens: int = 896
    peak_lr: float = 6e-4
    final_lr_share: float = 0.02
    decay_share: float = 0.15
    warmup_steps: int = 8
    weight_decay: float = 0.0
    ema_decay: float = 0.99
    checkpoint_every_s: float = 600.0


class AdapterTrainer(Trainer[AdapterPlan]):
    """Adds adapters to a model and trains them. `draw_row`: a row as a function of a seed."""

    gradient_clip = 1.0

    def __init__(
        self,
        model: PreTrainedModel,
        draw_row: Callable[[str], Row],
        plan: AdapterPlan,
        device: str = "cpu",
        workers: WorkerGroup = SINGLE_WORKER,
    ) -> None:
        self.model, self._draw_row = model.to(device), draw_row  # type: ignore[arg-type]
        add_adapters(model, plan.seed)
        module = nn.ParameterDict({name.replace(".", "/"): p for name, p in adapter_parameters(model).items()})
        groups = [{"params": list(module.parameters()), "weight_decay": plan.weight_decay}]
        super().__init__(module, groups, plan, device, workers)

    def learning_rate(self, share: float) -> float:
        """Warm-up over steps, a constant rate, and a line down at the end: a run that is lengthened early loses nothing."""
        warmup = min(1.0, (self.progress.step + 1) / self.plan.warmup_steps)
        return self.plan.peak_lr * min(warmup, max((1 - share) / self.plan.decay_share, self.plan.final_lr_share))

    def _accumulate_gradients(self, seed: int, share: float) -> tuple[int, dict[str, float]]:
        rows = [self._draw_row(f"{seed}/{number}") for number in range(self.plan.rows_per_step)]
        num_learnt = self.workers.sums(sum(row.num_learnt for row in rows))[0]
        count = 1 if self.device == "cpu" else GPU_ROWS
        batches = [collate(rows[at : at + count]) for at in range(0, len(rows), count)]
        loss = self.workers.sums(sum(self._backward(batch, num_learnt) for batch in batches))[0]
        return sum(len(row.ids) for row in rows), {"loss": loss}

    def _backward(self, batch: RowBatch, num_learnt: float) -> float:
        """Adds the gradients of the summed loss over `num_learnt`; the output layer reads the learnt places only."""
        batch = RowBatch(*(tensor.to(self.device) for tensor in batch))
        with blocks_of_queries(self.model) if self.device == "cpu" else contextlib.nullcontext():
            states = self.model.model(
                input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
            ).last_hidden_state  # [R, T, H]
        learnt = batch.targets >= 0
        logits = self.model.lm_head(states[learnt]).float()  # [learnt, V]
        losses = nn.functional.cross_entropy(logits, batch.targets[learnt], reduction="none")
        loss = (losses * batch.weights[learnt]).sum() / num_learnt
        torch.autograd.backward(loss)
        return float(loss.detach())

    def start_from(self, folder: Path) -> None:
        """Begin with the weights of a written adapter, which are the average too. Raises: ConfigError if it does not fit."""
        load_adapter(self.model, folder)
        self.average = [p.detach().clone() for p in self._module.parameters()]

    def averaged_adapter(self) -> dict[str, Tensor]:
        """The moving average of the adapters, by PEFT's names."""
        names = [name.replace("/", ".") for name, _ in self._module.named_parameters()]
        return dict(zip(names, self.average, strict=True))

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[PreTrainedModel]:
        """The model with the averaged adapters, inside a `with` block."""
        kept = [parameter.detach().clone() for parameter in self._module.parameters()]
        self._copy_average_to(self._module)
        try:
            yield self.model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(self._module.parameters()), kept)

    def _model_config(self) -> dict[str, Any]:
        """The shapes of the first adapters tell rank and width."""
        first = itertools.islice(adapter_parameters(self.model).items(), 7)
        return {"adapter": {name: list(parameter.shape) for name, parameter in first}}


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, without the keys behind a block of queries: half the time of `sdpa` on a processor.

    Shapes: query [R, heads, T, D]; key, value [R, KV heads, T, D]; attention_mask bool [R, 1, T, T], False behind the diagonal;
    result [R, T, heads, D].
    """
    num_rows, num_heads, length = query.shape[:3]
    groups = num_rows, key.shape[1], num_heads // key.shape[1]
    query = (query * scaling).unflatten(1, groups[1:])  # [R, KV heads, heads of one, T, D]
    hidden = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, -torch.inf)[:, :, None]
    parts = []
    for start in range(0, length, BLOCK_QUERIES):
        end = min(start + BLOCK_QUERIES, length)
        scores = query[..., start:end, :].flatten(2, 3) @ key[:, :, :end].mT
        scores = scores.view(*groups, end - start, end) + hidden[..., start:end, :end]
        parts.append(scores.softmax(-1).flatten(2, 3) @ value[:, :, :end])
    out = torch.cat([part.unflatten(2, (groups[2], -1)) for part in parts], 3)
    return out.flatten(1, 2).transpose(1, 2), None


AttentionInterface.register("ragspec_causal", causal_attention)


@contextlib.contextmanager
def blocks_of_queries(model: PreTrainedModel) -> Iterator[None]:
    """`causal_attention` inside a `with` block; generating needs keys of earlier calls."""
    config, kept = model.config, model.config._attn_implementation
    config._attn_implementation = "ragspec_causal"
    try:
        yield
    finally:
        config._attn_implementation = kept
