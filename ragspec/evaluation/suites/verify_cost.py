"""The suite `verify_cost`: the cost of verifying a tree on a GPU, in one-token forwards, and the memory bandwidth
reached. Weights are random: time does not depend on them.

Speculation rests on this ratio: a decode step reads all weights once, for one row or for sixty-four.

    >>> verify_cost(LlamaShape(), tick)["rows"][0]["over_one_token"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from ragspec.errors import ConfigError
from ragspec.evaluation.report import Metric, Result, Table, select
from ragspec.evaluation.suite import Outcome, Suite
from ragspec.evaluation.timing import Tick

PEAK_BYTES_PER_S = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.039e12, "L40S": 0.864e12, "RTX 3090": 0.936e12}
"""Memory bandwidth by data sheet, for device names that contain the key."""

NUM_NODES = (1, 8, 16, 32, 64)
_NUM_WARM_UP, _NUM_TIMES = 5, 30
_BRANCHES = 2


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The shape of a Llama, by default of 8B parameters; `context`: tokens in the cache before the tree."""

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 128256
    context: int = 1024
    num_nodes: tuple[int, ...] = NUM_NODES
    dtype: torch.dtype = torch.bfloat16

    @property
    def room(self) -> int:
        """Slots of the cache: the same for all trees, and a multiple of eight, as fast attention kernels need."""
        return -(-(self.context + max(self.num_nodes)) // 8) * 8

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=2 * self.room,
        )


def verify_cost(shape: LlamaShape, tick: Tick) -> Result:
    """The suite `verify_cost`. Raises: ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("the suite verify_cost needs a GPU that torch can use, and finds none")
    name = torch.cuda.get_device_name()
    peak = next((rate for key, rate in PEAK_BYTES_PER_S.items() if key in name), None)
    verifier = TreeVerifier(shape, torch.device("cuda"))
    stock, graphs = (list(timed_forwards(verifier, captured, tick)) for captured in (False, True))
    rows = [
        row | {"captured": captured}
        for captured, seconds in ((False, stock), (True, graphs))
        for row in cost_rows(seconds)
    ]
    for row in rows:
        row |= bandwidth(verifier.num_weight_bytes, row["step_ms"], peak)
    return {
        "label": f"a random Llama of {verifier.num_weight_bytes / 1e9:.1f} GB, {shape.context:,} tokens of context",
        "device": name,
        "peak_bytes_per_s": peak,
        "weights_gb": verifier.num_weight_bytes / 1e9,
        "context": shape.context,
        "rows": rows,
    }


def tree_mask(parents: list[int], context: int, room: int, dtype: torch.dtype) -> Tensor:
    """Additive mask: every node sees the context, its ancestors and itself. Shapes: N nodes -> [1, 1, N, room]."""
    visible = torch.zeros(len(parents), room, dtype=torch.bool)
    visible[:, :context] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node, context:] = visible[parent, context:]
        visible[node, context + node] = True
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)[None, None]


def branching_parents(num_nodes: int) -> list[int]:
    """Parents of a tree whose nodes have two children each, filled by levels."""
    return [(node - 1) // _BRANCHES if node else -1 for node in range(num_nodes)]


class TreeVerifier:
    """A random model and a cache with a context of random states; one forward verifies one tree."""

    def __init__(self, shape: LlamaShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = LlamaForCausalLM._from_config(shape.config, dtype=shape.dtype, attn_implementation="sdpa")
        self._model = model.eval().requires_grad_(False)
        embedding = self._model.model.embed_tokens.weight
        num_weights = sum(p.numel() for p in self._model.parameters()) - embedding.numel()
        self.num_weight_bytes = num_weights * embedding.element_size()

    @torch.no_grad()
    def forward_of(self, parents: list[int]) -> Callable[[], Tensor]:
        """A reusable forward over one tree; every call writes the same cache slots.

        Shapes: -> logits [N, V], row n for node n.
        """
        shape, num_nodes = self.shape, len(parents)
        cache: Any = StaticCache(config=shape.config, max_cache_len=shape.room)
        prompt = torch.arange(shape.context, device=self.device)[None] % shape.vocab_size
        self._model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        depths = depths_of(parents)
        ids = torch.arange(num_nodes, device=self.device)[None] % shape.vocab_size
        positions = torch.tensor(depths, device=self.device)[None] + shape.context
        mask = tree_mask(parents, shape.context, shape.room, shape.dtype).to(self.device)
        counters: list[Tensor] = [layer.cumulative_length for layer in cache.layers]

        def forward() -> Tensor:
            with torch.no_grad():
                for counter in counters:
                    counter.fill_(shape.context)
                out: Tensor = self._model(
                    input_ids=ids,
                    past_key_values=cache,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=True,
                ).logits[0]
            return out

        return forward


def depths_of(parents: list[int]) -> list[int]:
    """Depth of each node, 0 for the root; parents come before their children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def timed_forwards(verifier: TreeVerifier, captured: bool, tick: Tick) -> Iterator[tuple[int, float]]:
    """(nodes, median seconds of one forward) for every size of tree, on a GPU."""
    sizes = verifier.shape.num_nodes
    for number, num_nodes in enumerate(sizes, 1):
        forward = verifier.forward_of(branching_parents(num_nodes))
        yield num_nodes, _median_s(_captured(forward) if captured else forward)
        tick("captured" if captured else "launched kernel by kernel", number, len(sizes))


def cost_rows(seconds: list[tuple[int, float]]) -> list[Result]:
    """Step times over the time of one row, which is the first entry."""
    one_s = seconds[0][1]
    return [{"nodes": nodes, "step_ms": 1e3 * s, "over_one_token": s / one_s} for nodes, s in seconds]


def bandwidth(num_weight_bytes: int, step_ms: float, peak_bytes_per_s: float | None) -> Result:
    """Weights read a second, and their share of the peak bandwidth if the peak is known."""
    rate = num_weight_bytes / (1e-3 * step_ms)
    return {"gb_per_s": rate / 1e9, "share_of_peak": rate / peak_bytes_per_s if peak_bytes_per_s else None}


def verify_cost_tables(result: Result) -> dict[str, Table]:
    """One table for each way of launching kernels, a row for each size of tree."""
    titles = {True: "verifying a tree, as one CUDA graph", False: "verifying a tree, kernel by kernel"}
    keys = ("step_ms", "over_one_token", "gb_per_s", "share_of_peak")
    return {
        title: select({f"{row['nodes']} nodes": row for row in result["rows"] if row["captured"] is captured}, keys)
        for captured, title in titles.items()
    }


def _captured(forward: Callable[[], Tensor]) -> Callable[[], object]:
    """Capture the forward as one CUDA graph, without launch time between kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_NUM_WARM_UP):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


def _median_s(forward: Callable[[], object]) -> float:
    for _ in range(_NUM_WARM_UP):
        forward()
    times: list[float] = []
    for _ in range(_NUM_TIMES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        forward()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end))
    return median(times)


METRICS = (
    Metric("device", "the GPU"),
    Metric("weights_gb", "gigabytes of weights, read in every step"),
    Metric("peak_bytes_per_s", "peak memory bandwidth, by the maker's data sheet"),
)
SUITE = Suite(
    "verify_cost",
    lambda settings, tick: Outcome({"target": None, "dtype": "bfloat16"} | verify_cost(LlamaShape(), tick)),
    METRICS,
    tables=verify_cost_tables,
)
