"""The suite `backends`: whether each backend keeps the promises, and on a GPU how fast its steps are.

Without a GPU the torch backend runs on the CPU over a small random model. With one, both of the GPU's backends run over that
model, and a forward is timed over models of 0.1 to 32 billion parameters with random weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.engine import Engine
from ragspec.engine.loading import forward_s
from ragspec.engine.target import Target
from ragspec.evaluation.report import Metric, Result, at_least, at_most, equal_to, nested
from ragspec.evaluation.suite import Outcome, Settings, Suite, engine_over
from ragspec.evaluation.timing import Tick
from ragspec.numerics.self_test import self_test
from ragspec.numerics.threads import num_processors
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.speculation import Speculation
from ragspec.tree import DraftTree
from ragspec.verification.sampling import KeyedSampler

_SAMPLINGS = {
    "T=0": SamplingParams(max_tokens=24),
    "T=1": SamplingParams(max_tokens=24, temperature=1.0, seed=1),
    "top-p": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=40, seed=2),
    "penalties": SamplingParams(max_tokens=24, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, seed=3),
}
_KV_SLOTS, _NUM_SAMPLED, _SAMPLED_VOCAB = 4096, 10_000, 4096
_TEXT = "The quick brown fox jumps over the lazy dog, and the river rises in the northern hills past the old mill. "
_CONTEXT, _TREE_ROWS, _ROUNDS = 512, 64, 20


class Shape(NamedTuple):
    """A Llama of random weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, intermediate_size=self.inner, vocab_size=self.vocab,
            max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=None,
        )  # fmt: skip


SMALL = Shape("small", 128, 2, 4, 2, 256, 49_152)
SHAPES = (
    Shape("0.1 B", 576, 30, 9, 3, 1536, 49_152),
    Shape("1 B", 2048, 16, 32, 8, 8192, 128_256),
    Shape("8 B", 4096, 32, 32, 8, 14_336, 128_256),
    Shape("32 B", 5120, 64, 40, 8, 27_648, 152_064),
)


def run_backends(settings: Settings, tick: Tick) -> Outcome:
    """Promises of every backend that this machine runs, then speeds where there is a GPU. Raises: ModelError."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names: tuple[Literal["torch", "cuda"], ...] = ("torch", "cuda") if device == "cuda" else ("torch",)
    tokenizer = target_folder(settings.target)
    promises: dict[str, Result] = {}
    for number, name in enumerate(names, 1):
        target = random_target(SMALL, tokenizer, TargetConfig(model=tokenizer, device=device, backend=name))
        tested = self_test(target, target.max_context_tokens, target.config.numerics_dtype, num_processors())
        promises[name] = {
            "oracle_identical": identical_share(target) == 1.0,
            "rows_invariant": tested.passed,
            "sampling_equal": equal_tokens_share(device) == 1.0,
        }
        tick("promises", number, len(names))
    result: Result = {key: all(kept[key] for kept in promises.values()) for key in promises["torch"]}
    result |= {"label": f"on {device}", "target": f"{SMALL.layers} layers of random weights", "dtype": "float32"}
    result |= {"promises": promises}
    if device == "cuda":
        shapes = SHAPES[:3] if settings.quick else SHAPES
        result |= speeds(names, shapes, tokenizer, tick)
    return Outcome(result)


def random_target(shape: Shape, tokenizer: str, config: TargetConfig) -> Target:
    """The same weights every time on one device."""
    with torch.random.fork_rng(), torch.device(config.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            shape.config(), dtype=getattr(torch, config.dtype), attn_implementation="ragspec"
        ).eval()
    return Target(model, AutoTokenizer.from_pretrained(tokenizer), config, _KV_SLOTS)


def identical_share(target: Target) -> float:
    """Share of outputs that are the same with drafts and in a batch as alone without drafts."""
    ids = tuple(target.tokenizer(_TEXT).input_ids)
    source = (CopySource(SourceKind.PASSAGE, _TEXT, "0"),)
    requests = [
        Request(f"{name} {cut}", ids[cut:] + ids[:12], params, source)
        for name, params in _SAMPLINGS.items()
        for cut in (0, 5)
    ]
    outputs = []
    with engine_over(
        Engine, target, EngineConfig(max_kv_tokens=_KV_SLOTS), CostTable({1: [1.0, 1.001]}, (1, 64))
    ) as engine:
        outputs.append([completion.token_ids for completion in engine.generate(requests)])
        plain = [Request(r.id, r.prompt_ids, r.params, speculation=Speculation(drafters=())) for r in requests]
        outputs.append([engine.generate([request])[0].token_ids for request in plain])
    return float(np.mean([ours == theirs for ours, theirs in zip(*outputs, strict=True)]))


def equal_tokens_share(device: str) -> float:
    """Share of rows whose token, sampled on the device, is the token that the CPU samples."""
    rng, equal = np.random.default_rng(0), 0
    per_way = _NUM_SAMPLED // len(_SAMPLINGS)
    for params in _SAMPLINGS.values():
        rows = (rng.normal(size=(per_way, _SAMPLED_VOCAB)) * 3).astype(np.float32)
        request = Request("r", tuple(range(40)), params)
        samplers = [KeyedSampler(request, seed, 0, (0,), [3, 3, 5]) for seed in range(per_way)]
        draws = [sampler.draws(DraftTree(root_token=0))[0] for sampler in samplers]
        tokens = TorchLogits(torch.from_numpy(rows).to(device)).sample(draws)
        equal += sum(sampler(row) == token.token_id for sampler, row, token in zip(samplers, rows, tokens, strict=True))
    return equal / (per_way * len(_SAMPLINGS))


def speeds(names: Sequence[Literal["torch", "cuda"]], shapes: Sequence[Shape], tokenizer: str, tick: Tick) -> Result:
    """Milliseconds of a forward by backend and shape, in bfloat16. Raises: ModelError."""
    bandwidth, steps = measured_bandwidth(), dict[str, Result]()
    for number, shape in enumerate(shapes, 1):
        for name in names:
            config = TargetConfig(model=tokenizer, device="cuda", backend=name, dtype="bfloat16")
            target = random_target(shape, tokenizer, config)
            one_s, tree_s = (_forward_s(target, rows) for rows in (1, _TREE_ROWS))
            steps[f"{shape.name}, {name}"] = {
                "1 row, ms": 1e3 * one_s,
                f"{_TREE_ROWS} rows, ms": 1e3 * tree_s,
                "share of bandwidth": 2 * target.num_parameters / one_s / bandwidth,
                "tree over 1 row": tree_s / one_s,
            }
            del target
            torch.cuda.empty_cache()
        tick("speeds", number, len(shapes))
    largest = [step for key, step in steps.items() if key.startswith("8 B")]
    return {
        "device": torch.cuda.get_device_name(),
        "bandwidth_gb_s": bandwidth / 1e9,
        "steps": steps,
        "bandwidth_share": max(step["share of bandwidth"] for step in largest),
        "tree64_over_1": min(step["tree over 1 row"] for step in largest),
    }


def measured_bandwidth() -> float:
    """Bytes a second that the device reads and writes in a copy of one gigabyte."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    seconds = [_timed(partial(target.copy_, source)) for _ in range(_ROUNDS)]
    return 2 * source.nbytes / median(seconds[2:])


def _forward_s(target: Target, num_rows: int) -> float:
    """A tree of one chain after a context."""
    chain = range(-1, num_rows - 1)
    return median([forward_s(target, num_rows, _CONTEXT, chain) for _ in range(_ROUNDS)][2:])


def _timed(call: partial[torch.Tensor]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


METRICS = (
    Metric("oracle_identical", "tokens with drafts and in a batch equal those without, alone", equal_to(True)),
    Metric("rows_invariant", "the numerics self-test passed", equal_to(True)),
    Metric("sampling_equal", "10,000 tokens sampled on the device equal the CPU's", equal_to(True)),
    Metric("bandwidth_share", "8 B, bfloat16, one row: share of the memory's bandwidth", at_least(0.85)),
    Metric("tree64_over_1", "8 B, bfloat16: a forward of 64 nodes over one of a row", at_most(1.15)),
)
SUITE = Suite("backends", run_backends, METRICS, tables=lambda result: nested(result, "promises", "steps"))
