"""The two ways between host and device. Token ids, row numbers and a few edits of logits go there; token ids come back."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The device waits for nothing: the copy is queued behind its work."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Waits for the device."""
    return tensor.cpu().numpy()
