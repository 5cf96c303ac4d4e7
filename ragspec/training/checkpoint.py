"""Checkpoints: one safetensors file, with the run's state as JSON in its header.

Owns the form on disk, never what is in it. A crash at any moment leaves the old file or the new one.
"""

import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor


def write_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Replace the file as a whole. `state` must survive JSON."""
    data = safetensors.torch.save(tensors, metadata={"state": json.dumps(state)})
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_checkpoint(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was written."""
    with safetensors.safe_open(path, framework="pt", device=device) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, json.loads(file.metadata()["state"])
