"""Forwards over tiers of rows: padded to a tier, a forward has one of a few shapes, and a GPU replays a captured graph of it.

On a CPU the same padded forward runs without capture. Padded rows change no other row's bits, since nothing does.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragspec.numerics.attention import Ints
from ragspec.numerics.torch.attention import ForwardInputs

ROW_TIERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TIERS = (384, 512, 768, 1024, 1536, 2048)
"""Parts of prompts, padded on devices that replay graphs alone: elsewhere padding costs more than launches."""
MAX_GRAPHS, MAX_GRAPH_BYTES = 256, 2**30
"""Graphs that are kept, the least recently used leave first, and the bytes of what they write."""

Outputs = tuple[Tensor, dict[int, Tensor]]
Compute = Callable[[Tensor, ForwardInputs, Tensor], Outputs]
"""A forward of tokens [R] with these inputs, which are on the device as the last argument."""


def row_tier(num_rows: int, captures: bool) -> int:
    """The least tier of so many rows; the number itself beyond the last tier. `captures`: whether the device replays graphs."""
    tiers = ROW_TIERS + PROMPT_TIERS if captures else ROW_TIERS
    return next((tier for tier in tiers if tier >= num_rows), num_rows)


class _Captured(NamedTuple):
    """A graph, the array that it reads and the arrays that it writes."""

    graph: Any
    packed: Tensor
    outputs: Outputs

    @property
    def num_bytes(self) -> int:
        hidden, tapped = self.outputs
        return int(sum(array.nbytes for array in (self.packed, hidden, *tapped.values())))


class TieredForwards:
    """All forwards of one backend; `captures`: whether the device replays graphs.

    The gathers of several ranks are captured too. All ranks run the same forwards, so they capture and replay the same graphs.
    """

    def __init__(self, device: torch.device, captures: bool) -> None:
        self._device, self.captures = device, captures
        self._graphs: dict[Any, _Captured] = {}  # the most recently used last
        self._memory: Any = None

    def forget(self) -> None:
        """Drop all graphs: they hold the pool that they were captured with. Their memory's handle ends with the last of them."""
        self._graphs.clear()
        self._memory = None

    def run(self, token_ids: Ints | Tensor, inputs: ForwardInputs, key: Sequence[Any], compute: Compute) -> Outputs:
        """Hidden states of the tokens, and taps; valid until the next forward. `key`: what else decides the graph."""
        num_rows, num_padded, sent = len(token_ids), inputs.num_rows, inputs.sent(self._device, token_ids)
        if self.captures and num_padded <= PROMPT_TIERS[-1]:
            key = (*key, *inputs.shape_key)
            hidden, tapped = self._replay(sent, inputs, key, compute)
        else:
            hidden, tapped = _split(sent, inputs, compute)
        return hidden[:num_rows], {tap: stream[:num_rows] for tap, stream in tapped.items()}

    def _replay(self, sent: Tensor, inputs: ForwardInputs, key: Any, compute: Compute) -> Outputs:
        captured = self._graphs.pop(key, None) or self._capture(sent.clone(), inputs, compute)
        self._graphs[key] = captured
        while (
            len(self._graphs) > MAX_GRAPHS or sum(graph.num_bytes for graph in self._graphs.values()) > MAX_GRAPH_BYTES
        ):
            if len(self._graphs) == 1:
                break
            del self._graphs[next(iter(self._graphs))]
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
