"""Low-rank adapters on the linear layers of a model, and their PEFT folder.

Owns layers and files. y = W x + (alpha / rank) B A x, with A and B in float32 beside frozen weights.
Source: Hu et al., LoRA (arXiv 2106.09685).

    >>> add_adapters(model, seed=0); write_adapter(adapter_parameters(model), Path("adapter"))
"""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ragspec.disk import atomic_writer, saving
from ragspec.errors import ConfigError
from ragspec.training.trainer import check_same

RANK, ALPHA = 32, 64
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "use_rslora": False, "use_dora": False,
    "fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "target_modules": list(MODULES),
}  # fmt: skip
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


class LowRank(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        noise = torch.randn(RANK, layer.in_features, generator=generator)
        self.lora_A = nn.Parameter((noise * layer.in_features**-0.5).to(layer.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, RANK, device=layer.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [..., in] -> [..., out], in the dtype of `x`."""
        low = nn.functional.linear(x, self.lora_A.to(x.dtype))
        change = nn.functional.linear(low, self.lora_B.to(x.dtype))
        out: Tensor = torch.add(self.layer(x), change, alpha=ALPHA / RANK)
        return out


def add_adapters(model: nn.Module, seed: int) -> None:
    """Freeze the model and give its linear layers fresh adapters, which change nothing yet."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in MODULES and isinstance(layer, nn.Linear):
                setattr(parent, name, LowRank(layer, generator))


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by PEFT's names."""
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {f"base_model.model.{name}.weight": parameter for name, parameter in trained}


def write_adapter(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """A PEFT folder in bf16. Raises: SaveError."""
    halved = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(json.dumps(CONFIG, indent=1) + "\n")
        with atomic_writer(folder / WEIGHTS_FILE) as file:
            file.write(safetensors.torch.save(halved, metadata={"format": "pt"}))


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Copy a folder that `write_adapter` wrote into the model's adapters. Raises: ConfigError naming the first difference."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError, ValueError) as cause:
        raise ConfigError(f"{folder} cannot be read as an adapter: {cause}") from cause
    parameters = adapter_parameters(model)
    check_same(folder, config, CONFIG)
    check_same(folder, _shapes(tensors), dict.fromkeys(tensors, "missing") | _shapes(parameters))
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
