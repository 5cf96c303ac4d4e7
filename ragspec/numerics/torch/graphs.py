"""Forwards over tiers of rows: padded to a tier, a forward has one of a few shapes, and a GPU replays a captured graph of it.

On a CPU the same padded forward runs without capture. Padded rows change no other row's bits, since nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragspec.numerics.attention import Ints
from ragspec.numerics.torch.attention import ForwardInputs

ROW_TIERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Larger forwards are parts of prompts: their kernels take longer than their launches."""

Outputs = tuple[Tensor, dict[int, Tensor]]
Compute = Callable[[Tensor, ForwardInputs, Tensor], Outputs]
"""A forward of tokens [R] with these inputs, which are on the device as the last argument."""


def row_tier(num_rows: int) -> int:
    """The least tier of so many rows; the number itself beyond the last tier."""
    return next((tier for tier in ROW_TIERS if tier >= num_rows), num_rows)


class _Captured(NamedTuple):
    """A graph, the array that it reads and the arrays that it writes."""

    graph: Any
    packed: Tensor
    outputs: Outputs


class TieredForwards:
    """All forwards of one backend; `captures`: whether the device replays graphs.

    The gathers of several ranks are captured too. All ranks run the same forwards, so they capture and replay the same graphs.
    """

    def __init__(self, device: torch.device, captures: bool) -> None:
        self._device, self._captures = device, captures
        self._graphs: dict[Any, _Captured] = {}
        self._memory: Any = None

    def forget(self) -> None:
        """Drop all graphs: they hold the pool that they were captured with."""
        self._graphs.clear()

    def run(self, token_ids: Ints | Tensor, inputs: ForwardInputs, key: Sequence[Any], compute: Compute) -> Outputs:
        """Hidden states of the tokens, and taps; valid until the next forward. `key`: what else decides the graph."""
        num_rows, num_padded, sent = len(token_ids), inputs.num_rows, inputs.sent(self._device, token_ids)
        if self._captures and num_padded <= ROW_TIERS[-1]:
            key = (*key, num_padded, inputs.num_seen, inputs.num_positions)
            hidden, tapped = self._replay(sent, inputs, key, compute)
        else:
            hidden, tapped = _split(sent, inputs, compute)
        return hidden[:num_rows], {tap: stream[:num_rows] for tap, stream in tapped.items()}

    def _replay(self, sent: Tensor, inputs: ForwardInputs, key: Any, compute: Compute) -> Outputs:
        if key not in self._graphs:
            self._graphs[key] = self._capture(sent.clone(), inputs, compute)
        captured = self._graphs[key]
        captured.packed.copy_(sent)
        captured.graph.replay()
        return captured.outputs

    def _capture(self, packed: Tensor, inputs: ForwardInputs, compute: Compute) -> _Captured:
        _split(packed, inputs, compute)  # compiles the kernels
        torch.cuda.synchronize(self._device)
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        graph: Any = torch.cuda.CUDAGraph()
        # Why thread_local: other threads may allocate meanwhile, FAISS's and NCCL's among them
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            outputs = _split(packed, inputs, compute)
        return _Captured(graph, packed, outputs)


def _split(packed: Tensor, inputs: ForwardInputs, compute: Compute) -> Outputs:
    return compute(packed[: inputs.num_rows], inputs, packed[inputs.num_rows :])
