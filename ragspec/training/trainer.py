"""The training loop of targets and drafter heads: the texts of each step, schedule, optimizer, averaged weights, data parallelism
and checkpoints.

Every step's data and noise are a function of (seed, step, rank), so a killed run continues exactly from its last checkpoint. The
batches and losses of a step belong to the subclasses; starting workers belongs to the pipelines.

    >>> for record in trainer.run(): ...
    >>> trainer.save(Path("checkpoint.safetensors"))
"""

import itertools
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ragspec.disk import atomic_writer
from ragspec.errors import ConfigError

POOL_STEPS = 16
Item = TypeVar("Item")
FREE_AT_RESUME = ("total_tokens", "minutes", "checkpoint_every_s", "decay_share")
"""Fields of a plan that may differ at resume. Another length changes the learning rate and the mixture of texts from there on."""


@dataclass(frozen=True)
class StepData(Dataset[list[list[Item]]], Generic[Item]):
    """`draw`: one text, a function of the generator. Texts are grouped by `length_of`; the sizes of a step's texts by `size_of`
    add up to about `step_size`.

    `num_processes`: processes that draw ahead; 0: the caller's own.
    """

    draw: Callable[[random.Random], Item]
    length_of: Callable[[Item], int]
    size_of: Callable[[Item], int]
    step_size: int
    seed: str
    num_processes: int = 0

    def steps(self, first: int) -> Iterator[list[Item]]:
        """The texts of each step from the step `first` on, without end."""
        numbers = itertools.count(first // POOL_STEPS)
        loader = DataLoader(self, None, sampler=numbers, num_workers=self.num_processes, collate_fn=list)  # no tensors
        pools: Iterator[list[list[Item]]] = iter(loader)
        return itertools.islice(itertools.chain.from_iterable(pools), first % POOL_STEPS, None)

    def __getitem__(self, pool: int) -> list[list[Item]]:
        """The steps of a pool."""
        rng = random.Random(f"{self.seed}/{pool}")
        texts: list[Item] = []
        for _ in range(POOL_STEPS):
            size = 0
            while size < self.step_size:
                texts.append(self.draw(rng))
                size += self.size_of(texts[-1])
        steps = split_evenly(sorted(texts, key=self.length_of), POOL_STEPS, self.size_of)
        rng.shuffle(steps)
        return steps


def split_evenly(items: Sequence[Item], count: int, size_of: Callable[[Item], int]) -> list[list[Item]]:
    """Neighbours in `count` parts of about equal size, none of them empty. Needs at least `count` items."""
    left, rest = list(items), sum(map(size_of, items))
    parts: list[list[Item]] = []
    for num_parts in range(count, 0, -1):
        part = [left.pop()]
        size = size_of(part[0])
        while len(left) >= num_parts and (num_parts == 1 or size + size_of(left[-1]) / 2 < rest / num_parts):
            size += size_of(left[-1])
            part.append(left.pop())
        rest -= size
        parts.append(part[::-1])
    return parts


def fast_dtype(device: str) -> torch.dtype:
    """bfloat16, or float32 on a processor without bfloat16 products, which would compute them several times slower."""
    has_bfloat16 = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def mixed_precision(device: str) -> torch.autocast:
    """Products in `fast_dtype`, weights and sums in float32."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Length and speed of a run. The run ends when its tokens or its minutes are used up."""

    total_tokens: int
    minutes: float | None = None
    seed: int = 0
    micro_tokens: int
    peak_lr: float
    final_lr_share: float
    warmup_steps: int = 40
    weight_decay: float = 0.0
    ema_decay: float = 0.997
    checkpoint_every_s: float = 120.0


@dataclass
class TrainingProgress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class WorkerGroup:
    """This process (`rank`) among the `size` processes that train one model; each draws its own examples."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this worker reports and writes."""
        return self.rank == 0

    def sums(self, *values: float) -> list[float]:
        """The sum of each value over all workers."""
        return self._all_reduce(torch.tensor(values, dtype=torch.float64)).tolist() if self.size > 1 else list(values)

    def from_first(self, value: float) -> float:
        """The first worker's value."""
        return self.sums(value if self.is_first else 0.0)[0]

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over all workers."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self._all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _all_reduce(self, values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values)
        return values


SINGLE_WORKER = WorkerGroup()
PlanT = TypeVar("PlanT", bound=TrainingPlan)


class TrainingBatch(Protocol):
    """Some texts of a step that are computed together."""

    @property
    def num_learnt(self) -> int:
        """Tokens whose prediction is learnt."""


BatchT = TypeVar("BatchT", bound=TrainingBatch)


class Trainer(ABC, Generic[PlanT, Item, BatchT]):
    """Trains one module in place on the texts of `data`."""

    gradient_clip: ClassVar[float]
    """The largest norm of a step's gradients."""

    def __init__(
        self,
        module: torch.nn.Module,
        groups: list[dict[str, Any]],
        plan: PlanT,
        device: str,
        workers: WorkerGroup,
        data: StepData[Item],
    ) -> None:
        self._module, self.plan, self.device, self.workers = module, plan, device, workers
        self._data = data
        self._steps: Iterator[list[Item]] | None = None
        self.progress = TrainingProgress()
        self.history: list[dict[str, float]] = []
        self.probes: list[dict[str, float]] = []
        decay = plan.weight_decay
        self.optimizer = torch.optim.AdamW(groups, plan.peak_lr, (0.9, 0.95), weight_decay=decay, fused=True)
        self.average = [p.detach().clone() for p in module.parameters()]

    def share_done(self) -> float:
        """The part of the run that is done, 0-1: the larger of the token share and the time share."""
        by_tokens = self.progress.tokens / self.plan.total_tokens
        by_time = self.progress.elapsed_s / (60 * self.plan.minutes) if self.plan.minutes else 0.0
        return max(by_tokens, by_time)

    def run(self) -> Iterator[dict[str, float]]:
        """Train to the end of the plan; yields a record of every step."""
        while self.share_done() < 1.0:
            started = time.monotonic()
            record = self.train_step()
            self.progress.elapsed_s += self.workers.from_first(time.monotonic() - started)
            record["elapsed_s"] = self.progress.elapsed_s
            self.history.append(record)
            yield record

    def train_step(self) -> dict[str, float]:
        """One optimizer step over the data of (seed, step, rank)."""
        share = self.share_done()
        lr = self.learning_rate(share)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self._steps is None:
            self._steps = self._data.steps(self.progress.step)
        texts = next(self._steps)
        num_tokens, losses = self._accumulate_gradients(texts)
        self.workers.sum_gradients(self._module.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._update_average()
        self.progress.step += 1
        self.progress.tokens += int(self.workers.sums(num_tokens)[0])
        spent = {"step": self.progress.step, "tokens": self.progress.tokens, "share": share}
        return {**spent, "lr": lr, "grad_norm": float(norm), **losses}

    def _accumulate_gradients(self, texts: list[Item]) -> tuple[int, dict[str, float]]:
        """Add this worker's gradients to the module; returns its number of tokens, and the losses over all workers."""
        seed = self.plan.seed * 1_000_003 + self.progress.step * self.workers.size + self.workers.rank
        noise = torch.Generator().manual_seed(seed)
        batches = self._batches(texts)
        num_learnt = self.workers.sums(sum(batch.num_learnt for batch in batches))[0]
        sums = [self._backward(batch, num_learnt, noise) for batch in batches]
        losses = self._losses(self.workers.sums(*map(sum, zip(*sums, strict=True))))
        return sum(map(self._data.length_of, texts)), losses

    @abstractmethod
    def _batches(self, texts: list[Item]) -> list[BatchT]:
        """The texts of a step in the order of their lengths, in batches that fit into memory."""

    @abstractmethod
    def _backward(self, batch: BatchT, num_learnt: float, noise: torch.Generator) -> list[float]:
        """Add the gradients of a batch's summed loss over `num_learnt`; returns sums for `_losses`."""

    @abstractmethod
    def _losses(self, sums: list[float]) -> dict[str, float]:
        """The record of a step, from the sums over all batches and workers."""

    @abstractmethod
    def _model_config(self) -> dict[str, Any]:
        """The module's shape, as JSON values: a checkpoint of another shape is refused."""

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
    def _copy_to(self, module: torch.nn.Module, tensors: Iterable[Tensor]) -> None:
        for parameter, tensor in zip(module.parameters(), tensors, strict=True):
            parameter.copy_(tensor)

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
    def load(self, path: Path, *, any_plan: bool = False) -> None:
        """Continue from a checkpoint; the length of the run may differ. `any_plan`: only the module must be the same.

        Raises: ConfigError naming the first difference if module, plan or number of workers differ.
        """
        try:
            tensors, state = read_checkpoint(path, self.device)
            history = _records(state["columns"], tensors["history"], tensors["history_known"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as cause:
            raise ConfigError(f"{path} cannot be resumed: it is no checkpoint of this version") from cause
        check_same(path, state.get("identity", {}), self._model_config() if any_plan else self._identity())
        for (name, parameter), average in zip(self._module.named_parameters(), self.average, strict=True):
            parameter.copy_(tensors[f"model.{name}"])
            average.copy_(tensors[f"average.{name}"])
            if f"optimizer.step.{name}" in tensors:
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[parameter] = {key: tensors[f"optimizer.{key}.{name}"] for key in keys}
        for name, buffer in self._buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
        self.progress, self._steps = TrainingProgress(**state["progress"]), None
        self.history, self.probes = history, state["probes"]

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Persistent buffers; the others are made anew with the module."""
        kept = self._module.state_dict()
        return [(name, buffer) for name, buffer in self._module.named_buffers() if name in kept]

    def _identity(self) -> dict[str, Any]:
        """Module, plan and number of workers. Data and target are not part of it: the caller keeps them the same."""
        identity = self._model_config()
        for name, value in asdict(self.plan).items():
            if name not in FREE_AT_RESUME:
                identity |= value if isinstance(value, dict) else {name: value}
        return {**identity, "num_workers": self.workers.size}


def check_same(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises: ConfigError naming the first of this run's values that the file does not have."""
    for name, value in ours.items():
        if (found := theirs.get(name, "not known")) != value:
            raise ConfigError(f"{path} cannot be resumed: its {name} is {found}, and this run's is {value}")


def write_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """One safetensors file with `state` as JSON in its header; a crash leaves the old file or the new one."""
    with atomic_writer(path) as file:
        file.write(safetensors.torch.save(tensors, metadata={"state": json.dumps(state)}))


def read_checkpoint(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state."""
    with safetensors.safe_open(path, framework="pt", device=device) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["state"])


def _table(records: list[dict[str, float]]) -> tuple[list[str], Tensor, Tensor]:
    """Names, values, and which values exist. Shapes: [num records, num names], float64 and bool.

    Why tensors: a safetensors header holds 100 MB at most, and the history of a long run is larger.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    rows = [[float(record.get(name, 0.0)) for name in names] for record in records]
    known = [[name in record for name in names] for record in records]
    shape = len(records), len(names)
    return names, torch.tensor(rows, dtype=torch.float64).view(shape), torch.tensor(known, dtype=torch.bool).view(shape)


def _records(names: list[str], table: Tensor, known: Tensor) -> list[dict[str, float]]:
    """The inverse of `_table`."""
    rows = zip(table.tolist(), known.tolist(), strict=True)
    return [{n: value for n, value, is_there in zip(names, row, there, strict=True) if is_there} for row, there in rows]
