"""The suite `verify_cost`: the cost of verifying a tree on a GPU, in one-token forwards, and the memory bandwidth
reached. Weights are random: time does not depend on them.

Speculation rests on this ratio: a decode step reads all weights once, for one row or for sixty-four.

    >>> verify_cost(tick)["rows"][0]["over_one_token"]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from ragspec.errors import ConfigError
from ragspec.evaluation.report import Metric, Result, Table, select
from ragspec.evaluation.suite import Outcome, Suite
from ragspec.evaluation.timing import Tick
from ragspec.tree import DraftTree, Origin

PEAK_BYTES_PER_S = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.039e12, "L40S": 0.864e12, "RTX 3090": 0.936e12}
"""Memory bandwidth by data sheet, for device names that contain the key."""

NUM_NODES = (1, 8, 16, 32, 64)
CONTEXT = 1024
"""Tokens in the cache before the tree."""
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    dtype="bfloat16",
)
_NUM_WARM_UP, _NUM_TIMES = 5, 30
_CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""transformers renamed the argument in 5.24."""


def verify_cost(
    tick: Tick, config: LlamaConfig = LLAMA_8B, context: int = CONTEXT, num_nodes: Sequence[int] = NUM_NODES
) -> Result:
    """Times every size of tree, kernel by kernel and as one CUDA graph. Raises: ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("the suite verify_cost needs a GPU that torch can use, and finds none")
    name = torch.cuda.get_device_name()
    peak = next((rate for key, rate in PEAK_BYTES_PER_S.items() if key in name), None)
    verifier = TreeVerifier(config, context, max(num_nodes), torch.device("cuda"))
    rows: list[Result] = []
    for captured, stage in ((False, "launched kernel by kernel"), (True, "captured")):
        times_s: list[float] = []
        for number, count in enumerate(num_nodes, 1):
            forward = verifier.forward_of(branching_tree(count))
            times_s.append(_median_s(_captured(forward) if captured else forward))
            rows.append(cost_row(count, times_s[-1], times_s[0], captured, verifier.num_weight_bytes, peak))
            tick(stage, number, len(num_nodes))
    return {
        "label": f"a random Llama of {verifier.num_weight_bytes / 1e9:.1f} GB, {context:,} tokens of context",
        "device": name,
        "peak_bytes_per_s": peak,
        "weights_gb": verifier.num_weight_bytes / 1e9,
        "context": context,
        "rows": rows,
    }


def branching_tree(num_nodes: int) -> DraftTree:
    """A tree whose nodes have two children each, filled by levels."""
    tree = DraftTree(0)
    for node in range(1, num_nodes):
        tree.add((node - 1) // 2, node, 1.0, Origin("verify_cost"))
    return tree


def tree_mask(tree: DraftTree, context: int, room: int, dtype: torch.dtype) -> Tensor:
    """Additive mask: every node sees the context, its ancestors and itself. Shapes: N nodes -> [1, 1, N, room]."""
    mask = torch.full((len(tree), room), -torch.inf, dtype=dtype)
    mask[:, :context] = 0.0
    for node in range(len(tree)):
        mask[node, [context + seen for seen in tree.ancestors(node)]] = 0.0
    return mask[None, None]


class TreeVerifier:
    """A random model and a cache with a context of random states; one forward verifies one tree."""

    def __init__(self, config: LlamaConfig, context: int, max_nodes: int, device: torch.device) -> None:
        self._config, self._context, self._device = config, context, device
        self._room = -(-(context + max_nodes) // 8) * 8  # the same for all trees; fast kernels need a multiple of eight
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = LlamaForCausalLM._from_config(config, dtype=config.dtype, attn_implementation="sdpa")
        self._model = model.eval().requires_grad_(False)
        embedding = self._model.model.embed_tokens.weight
        num_weights = sum(p.numel() for p in self._model.parameters()) - embedding.numel()
        self.num_weight_bytes = num_weights * embedding.element_size()

    @torch.no_grad()
    def forward_of(self, tree: DraftTree) -> Callable[[], Tensor]:
        """A reusable forward over one tree; every call writes the same cache slots.

        Shapes: -> logits [N, V], row n for node n.
        """
        cache: Any = StaticCache(config=self._config, max_cache_len=self._room)
        prompt = torch.arange(self._context, device=self._device)[None] % self._config.vocab_size
        self._model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{_CACHE: cache})
        ids = torch.tensor([tree.token_ids], device=self._device)
        positions = torch.tensor([tree.depths], device=self._device) + self._context
        mask = tree_mask(tree, self._context, self._room, self._model.dtype).to(self._device)
        counters: list[Tensor] = [layer.cumulative_length for layer in cache.layers]

        @torch.no_grad()
        def forward() -> Tensor:
            for counter in counters:
                counter.fill_(self._context)
            out = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{_CACHE: cache}
            )
            return cast(Tensor, out.logits[0])

        return forward


def cost_row(
    num_nodes: int, seconds: float, one_s: float, captured: bool, num_weight_bytes: int, peak: float | None
) -> Result:
    """A step beside the step of one row, `one_s`; weights read a second, and their share of `peak` if it is known."""
    rate = num_weight_bytes / seconds
    return {
        "nodes": num_nodes,
        "step_ms": 1e3 * seconds,
        "over_one_token": seconds / one_s,
        "captured": captured,
        "gb_per_s": rate / 1e9,
        "share_of_peak": rate / peak if peak else None,
    }


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
    lambda settings, tick: Outcome({"target": None, "dtype": "bfloat16"} | verify_cost(tick)),
    METRICS,
    tables=verify_cost_tables,
)
