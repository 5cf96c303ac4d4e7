"""Training of a target's low-rank adapters on packed rows, and their PEFT folder. The loop is `Trainer`'s.

A row holds groups of conversations that share a beginning. Each conversation sees the beginning and itself only, and its
positions go on from the beginning: it reads as if it were alone.

A linear layer becomes y = W x + (alpha / rank) B A x, with A and B in float32 beside frozen weights.
Source: Hu et al., LoRA (arXiv 2106.09685).

>>> trainer = AdapterTrainer(model, draw_row, AdapterPlan(total_tokens=8_000_000), SINGLE_WORKER)
>>> for record in trainer.run(): ...
>>> trainer.write_adapter(Path("adapter"))
"""

import contextlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ragspec.disk import atomic_writer, saving
from ragspec.errors import ConfigError
from ragspec.training.conversations import Encoded
from ragspec.training.trainer import StepData, Trainer, TrainingPlan, WorkerGroup, check_same

FIRST_WEIGHT = 3.0
"""The weight of an answer's first token, which says whether the passages answer; that of all others is 1."""
RANK, ALPHA = 32, 64
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none",
    "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None,
    "rank_pattern": {}, "alpha_pattern": {}, "target_modules": list(MODULES)}  # fmt: skip
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
GPU_ROWS, NUM_QUERIES = 16, 128
"""Rows computed together on a GPU; queries that attend together on a processor, which computes rows one by one."""
BLOCKS = "ragspec_causal"


class RowBatch(NamedTuple):
    """`inputs`: token ids and positions int64 [R, T], and who sees whom, bool [R, 1, T, T], by the model's names.

    Shapes: targets int64 [R, T], the next token or -100; weights float32 [R, T], of the targets' losses. Padding on the right
    sees itself.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    weights: Tensor

    @property
    def num_learnt(self) -> int:
        return int((self.targets >= 0).sum())


class Token(NamedTuple):
    """`group` and `member` say who sees whom; member 0 is the beginning of its group."""

    id: int
    is_learnt: bool
    group: int
    member: int
    position: int


PADDING = Token(0, False, -1, 0, 0)


class Row:
    """Up to `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens: list[Token] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, group: Iterable[Encoded]) -> None:
        """Append a group up to its first conversation that does not fit; the rest is not even encoded."""
        kept, shared = list[Encoded](), self.length
        for each in (text for text in group if any(text.weights) and text.weights[0] == 0):
            first = kept[0].ids if kept else each.ids
            same = takewhile(lambda pair: pair[0] == pair[1], zip(first, each.ids, strict=False))
            most = each.weights.index(1.0) - 1  # a learnt token stands behind a token of its own conversation
            fewer = min(shared, most, sum(1 for _ in same))
            if len(self.tokens) + fewer + sum(len(text.ids) - fewer for text in (*kept, each)) > self.length:
                break
            kept, shared = [*kept, each], fewer
        number = self.tokens[-1].group + 1 if self.tokens else 0
        parts = [(kept[0], 0, shared)] if kept else []
        for member, (text, start, end) in enumerate([*parts, *((text, shared, len(text.ids)) for text in kept)]):
            for at in range(start, end):
                self.tokens.append(Token(text.ids[at], text.weights[at] > 0, number, member, at))


def one_row(row: Row) -> int:
    """Steps are counted in rows."""
    return 1


def collate(rows: Sequence[Row], device: str = "cpu") -> RowBatch:
    """Pads rows to the longest of them. The target of a place is the row's next token where that is learnt."""
    length = max(len(row.tokens) for row in rows)
    padded = [row.tokens + [PADDING] * (length - len(row.tokens)) for row in rows]
    ids, learnt, group, member, positions = torch.tensor(padded, device=device).unbind(-1)  # each [R, T]
    sees = (member[:, None] == 0) | (member[:, :, None] == member[:, None])  # [R, T, T]
    sees = (sees & (group[:, :, None] == group[:, None])).tril()
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = torch.where(learnt[:, 1:] > 0, ids[:, 1:], -100)
    weights = torch.where(learnt > 0, 1.0, FIRST_WEIGHT)  # a learnt token behind one that is not
    return RowBatch({"input_ids": ids, "position_ids": positions, "attention_mask": sees[:, None]}, targets, weights)


DrawRow = Callable[[random.Random], Row]
"""A row as a function of a generator."""


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
    ema_decay: float = 0.99
    checkpoint_every_s: float = 600.0


class AdapterTrainer(Trainer[AdapterPlan, Row, RowBatch]):
    """Adds adapters to a model and trains them."""

    gradient_clip = 1.0

    def __init__(
        self,
        model: PreTrainedModel,
        draw_row: DrawRow,
        plan: AdapterPlan,
        workers: WorkerGroup,
        num_processes: int = 0,
        base: str = "",
    ) -> None:
        """`base`: the model's name, for the adapter's files. Raises: ConfigError for a model without layers of known names."""
        self._base = base
        self.model, self._attention = model, model.config._attn_implementation
        add_adapters(model, plan.seed)
        module = nn.ParameterDict({name.replace(".", "/"): p for name, p in adapter_parameters(model).items()})
        seed = f"{plan.seed}/{workers.rank}"
        data = StepData(draw_row, len, one_row, plan.rows_per_step, seed, num_processes)
        super().__init__(module, [{"params": list(module.parameters())}], plan, str(model.device), workers, data)

    def learning_rate(self, share: float) -> float:
        """Warm-up over steps, a constant rate, and a line down at the end: a run that is lengthened early loses nothing."""
        warmup = min(1.0, (self.progress.step + 1) / self.plan.warmup_steps)
        return self.plan.peak_lr * min(warmup, max((1 - share) / self.plan.decay_share, self.plan.final_lr_share))

    def _batches(self, texts: list[Row]) -> list[RowBatch]:
        count = 1 if self.device == "cpu" else GPU_ROWS
        return [collate(texts[at : at + count], self.device) for at in range(0, len(texts), count)]

    def _backward(self, batch: RowBatch, num_learnt: float, noise: torch.Generator) -> list[float]:
        """The output layer reads the learnt places only."""
        self.model.config._attn_implementation = BLOCKS if self.device == "cpu" else self._attention
        states = self.model.model(**batch.inputs, use_cache=False).last_hidden_state  # [R, T, H]
        learnt = batch.targets >= 0
        logits = self.model.lm_head(states[learnt]).float()  # [learnt, V]
        losses = nn.functional.cross_entropy(logits, batch.targets[learnt], reduction="none")
        loss = (losses * batch.weights[learnt]).sum() / num_learnt
        torch.autograd.backward(loss)
        return [float(loss.detach())]

    def _losses(self, sums: list[float]) -> dict[str, float]:
        return {"loss": sums[0]}

    @torch.no_grad()
    def start_from(self, folder: Path) -> None:
        """Begin with an adapter that `write_adapter` wrote, which is the average, too; or with another run's checkpoint, a file.

        Raises: ConfigError naming the first difference.
        """
        if not folder.is_dir():
            self.load(folder, any_plan=True)
            return
        try:
            config = json.loads((folder / CONFIG_FILE).read_text())
            tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
        except (OSError, SafetensorError, ValueError) as cause:
            raise ConfigError(f"{folder} cannot be read as an adapter: {cause}") from cause
        check_same(folder, config, CONFIG)
        theirs, ours = (_shapes(named) for named in (tensors, self.averaged_adapter()))
        check_same(folder, theirs, dict.fromkeys(theirs, "missing") | ours)
        for name, parameter, average in zip(ours, self._module.parameters(), self.average, strict=True):
            parameter.copy_(tensors[name])
            average.copy_(tensors[name])

    def averaged_adapter(self) -> dict[str, Tensor]:
        """The moving average of the adapters, by PEFT's names."""
        names = [name.replace("/", ".") for name, _ in self._module.named_parameters()]
        return dict(zip(names, self.average, strict=True))

    def write_adapter(self, folder: Path) -> None:
        """The averaged adapter as a PEFT folder in bf16. Raises: SaveError."""
        write_peft(folder, self.averaged_adapter(), {"base_model_name_or_path": self._base})

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[PreTrainedModel]:
        """The model with the averaged adapters, which may generate, inside a `with` block."""
        kept = [parameter.detach().clone() for parameter in self._module.parameters()]
        self._copy_to(self._module, self.average)
        self.model.config._attn_implementation = self._attention
        yield self.model
        self._copy_to(self._module, kept)

    def _model_config(self) -> dict[str, Any]:
        """The shapes of the first adapters tell rank and width."""
        first = list(adapter_parameters(self.model).items())[:7]
        return {"adapter": _shapes(dict(first))}


def write_peft(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """A PEFT folder in bf16. `config` replaces values of `CONFIG`. Raises: SaveError."""
    halved = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in tensors.items()}
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps({**CONFIG, **config}, indent=1) + "\n")
        with atomic_writer(folder / WEIGHTS_FILE) as file:
            file.write(safetensors.torch.save(halved, metadata={"format": "pt"}))


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with its change. Why a layer and no hook: Python's part of a hook costs a GPU's step as much again.

    Shapes: [..., in] -> [..., out], in the dtype of the layer.
    """

    def __init__(self, layer: nn.Linear, noise: Tensor) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = nn.Parameter(noise.to(layer.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, RANK, device=layer.weight.device))

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        low = nn.functional.linear(inputs, self.lora_A.to(output.dtype))
        return torch.add(output, nn.functional.linear(low, self.lora_B.to(output.dtype)), alpha=ALPHA / RANK)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The same layer with the change in its weight."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        change = (ALPHA / RANK * (self.lora_B @ self.lora_A)).to(self.weight.dtype)
        layer.weight, layer.bias = nn.Parameter(self.weight + change, requires_grad=False), self.bias
        return layer


def add_adapters(model: nn.Module, seed: int, modules: Sequence[str] = MODULES) -> None:
    """Freeze the model and give its linear layers of these names fresh adapters, which change nothing yet.

    Raises: ConfigError for a model without such layers.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in modules]
    if not layers:
        raise ConfigError(
            f"no adapter can be trained for this model: none of its layers is called {', '.join(modules)}"
        )
    for name, layer in layers:
        noise = torch.randn(RANK, layer.in_features, generator=generator) * layer.in_features**-0.5
        model.set_submodule(name, AdaptedLinear(layer, noise))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by PEFT's names."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {f"base_model.model.{name}.weight": parameter for name, parameter in trained}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, without the keys behind a block of queries: two thirds of the time of `sdpa` on a
    processor.

    Shapes: query [R, heads, T, D]; key, value [R, KV heads, T, D]; attention_mask bool [R, 1, T, T], False behind the diagonal;
    result [R, T, heads, D].
    """
    assert query.shape[2] == key.shape[2], "a model that generates attends to keys of earlier calls"
    attend = partial(nn.functional.scaled_dot_product_attention, scale=scaling, enable_gqa=True)
    blocks = [(slice(at, at + NUM_QUERIES), slice(at + NUM_QUERIES)) for at in range(0, query.shape[2], NUM_QUERIES)]
    parts = [attend(query[:, :, q], key[:, :, k], value[:, :, k], attention_mask[:, :, q, k]) for q, k in blocks]
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register(BLOCKS, causal_attention)
