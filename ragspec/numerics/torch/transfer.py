"""The ways between host and device. Token ids, row numbers and a few edits of logits go there; token ids come back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Nobody waits: the copy is queued behind the device's work. A GPU copies from pinned memory; from other memory, torch would
    first wait for the GPU."""
    source = torch.from_numpy(array)
    return (source.pin_memory() if device.type == "cuda" else source).to(device, non_blocking=True)


def column(values: Sequence[float], device: torch.device) -> Tensor:
    """A number for each row. Shape: float64 [W, 1]."""
    return to_device(np.array(values, np.float64), device)[:, None]


def queued_to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that is complete once the host has next waited for the device."""
    return tensor.to("cpu", non_blocking=True)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Waits for the device."""
    return tensor.cpu().numpy()


def free_bytes(device: torch.device) -> int | None:
    """Memory of a GPU that tensors may take now, beside all that it holds already, FAISS's indexes and scratch among it.
    None: main memory, which is taken when it is touched."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept
