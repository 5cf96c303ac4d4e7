"""What training a target and training a drafter's head have in common: the loop, its schedule, and where it goes on.

Owns the optimizer, the moving average of the weights and the checkpoints; what a step learns from belongs to those who train.
Every step's data and noise are a function of (seed, step, worker), so a run that was killed continues exactly where its last
checkpoint stood.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from ragspec.errors import ConfigError
from ragspec.training.checkpoint import read_checkpoint, write_checkpoint
from ragspec.training.workers import Workers

FREE_AT_RESUME = ("total_tokens", "minutes", "checkpoint_every_s")
"""Of a plan, what may change on its way. Another length changes the rate, and the stage of texts, from there on."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how fast. Progress is the larger of the token share and the time share."""

    total_tokens: int
    minutes: float | None = None
    seed: int = 0
    micro_tokens: int
    peak_lr: float
    final_lr_share: float
    warmup_steps: int = 100
    weight_decay: float
    ema_decay: float = 0.997
    checkpoint_every_s: float = 120.0


@dataclass
class Progress:
    """What a checkpoint continues from."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


_PlanT = TypeVar("_PlanT", bound=Plan)


class Trainer(ABC, Generic[_PlanT]):
    """Trains one module in place; `run` yields a record of every step.

    A group of parameters may have an `lr_share`: its part of the rate.
    """

    gradient_clip: ClassVar[float]
    """The largest norm of a step's gradients."""

    def __init__(
        self, module: torch.nn.Module, groups: list[dict[str, Any]], plan: _PlanT, device: str, workers: Workers
    ) -> None:
        self._module, self.plan, self.device, self.workers = module, plan, device, workers
        self.progress = Progress()
        self.history: list[dict[str, float]] = []
        self.probes: list[dict[str, float]] = []
        self.optimizer = torch.optim.AdamW(groups, lr=plan.peak_lr, betas=(0.9, 0.95), fused=True)
        self.average = [p.detach().clone() for p in module.parameters()]

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
        share = self.share_done()
        lr = self.learning_rate(share)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_share", 1.0)
        seed = self.plan.seed * 1_000_003 + self.progress.step * self.workers.size + self.workers.rank
        num_tokens, found = self._learn(seed, share)
        self.workers.add_gradients(self._module.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.progress.step += 1
        self.progress.tokens += int(self.workers.total(num_tokens)[0])
        spent = {"step": self.progress.step, "tokens": self.progress.tokens, "share": share}
        return {**spent, "lr": lr, "grad_norm": float(norm), **found}

    @abstractmethod
    def _learn(self, seed: int, share: float) -> tuple[int, dict[str, float]]:
        """Add this worker's gradients to the module; the tokens they are of, and what the record says of all workers' losses."""

    @abstractmethod
    def _shape(self) -> dict[str, Any]:
        """What is trained, as JSON gives it back: a checkpoint of anything else is refused."""

    def learning_rate(self, share: float) -> float:
        """Linear warm-up over steps, then half a cosine over the run."""
        warmup = min(1.0, (self.progress.step + 1) / self.plan.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        return self.plan.peak_lr * warmup * (cosine * (1 - self.plan.final_lr_share) + self.plan.final_lr_share)

    @torch.no_grad()
    def _update_average(self) -> None:
        decay = min(self.plan.ema_decay, (1 + self.progress.step) / (10 + self.progress.step))
        torch._foreach_lerp_(self.average, [p.detach() for p in self._module.parameters()], 1 - decay)

    @torch.no_grad()
    def _put_average(self, module: torch.nn.Module) -> None:
        """Give a module of the same shape the averaged weights."""
        for parameter, average in zip(module.parameters(), self.average, strict=True):
            parameter.copy_(average)

    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash at any moment leaves the old or the new one."""
        tensors: dict[str, Tensor] = {f"buffer.{name}": buffer for name, buffer in self._buffers()}
        for (name, parameter), average in zip(self._module.named_parameters(), self.average, strict=True):
            tensors |= {f"model.{name}": parameter.detach(), f"average.{name}": average}
            tensors |= {f"optimizer.{key}.{name}": value for key, value in self.optimizer.state[parameter].items()}
        names, tensors["history"], tensors["history_known"] = _table(self.history)
        state = {"progress": asdict(self.progress), "columns": names, "probes": self.probes}
        write_checkpoint(path, tensors, {**state, "identity": self._identity()})

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continue from a checkpoint; the length of the run may be another one.

        Raises: ConfigError naming the first difference if it is of another module, another plan or other workers.
        """
        try:
            tensors, state = read_checkpoint(path, self.device)
            history = _records(state["columns"], tensors["history"], tensors["history_known"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as cause:
            raise ConfigError(f"{path} cannot be resumed: it is no checkpoint of this version") from cause
        identity = state.get("identity", {})
        for name, ours in self._identity().items():
            theirs = identity.get(name, "not known")
            if theirs != ours:
                raise ConfigError(f"{path} cannot be resumed: its {name} is {theirs}, and this run's is {ours}")
        for (name, parameter), average in zip(self._module.named_parameters(), self.average, strict=True):
            parameter.copy_(tensors[f"model.{name}"])
            average.copy_(tensors[f"average.{name}"])
            if f"optimizer.step.{name}" in tensors:
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[parameter] = {key: tensors[f"optimizer.{key}.{name}"] for key in keys}
        for name, buffer in self._buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
        self.progress = Progress(**state["progress"])
        self.history, self.probes = history, state["probes"]

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Those that are not made anew with the module."""
        kept = self._module.state_dict()
        return [(name, buffer) for name, buffer in self._module.named_buffers() if name in kept]

    def _identity(self) -> dict[str, Any]:
        """What is trained, how and by how many; the data, and what a head is trained for, are the caller's to keep the same."""
        found = self._shape()
        for name, value in asdict(self.plan).items():
            if name not in FREE_AT_RESUME:
                found |= value if isinstance(value, dict) else {name: value}
        return {**found, "num_workers": self.workers.size}


def _table(records: list[dict[str, float]]) -> tuple[list[str], Tensor, Tensor]:
    """Names, values and which of them there are. Shapes: [num records, num names], float64 and bool.

    Why: what is no tensor goes into a file's header, which holds 100 MB; long runs have more.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [[float(record.get(name, 0.0)) for name in names] for record in records]
    known = [[name in record for name in names] for record in records]
    shape = len(records), len(names)
    return names, torch.tensor(rows, dtype=torch.float64).view(shape), torch.tensor(known, dtype=torch.bool).view(shape)


def _records(names: list[str], table: Tensor, known: Tensor) -> list[dict[str, float]]:
    """The records again; the inverse of `_table`."""
    rows = zip(table.tolist(), known.tolist(), strict=True)
    return [{n: value for n, value, is_there in zip(names, row, there, strict=True) if is_there} for row, there in rows]
