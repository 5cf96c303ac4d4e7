"""The suite `numerics`: the cost of the bitwise promise, and plain decoding against transformers, for two models."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ragspec.config import EngineConfig, TargetConfig
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.engine import Engine
from ragspec.engine.loading import forward_s
from ragspec.engine.target import Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.peers import TransformersDecoder
from ragspec.evaluation.report import PEAK_MEMORY, Metric, Result, nested
from ragspec.evaluation.suite import Outcome, Settings, Suite, engine_over
from ragspec.evaluation.suites.dense_step import FastestStep
from ragspec.evaluation.timing import GENERATE, PLAIN, Decoder, EngineDecoder, Tick, Timings
from ragspec.numerics.self_test import self_test
from ragspec.numerics.threads import num_processors, run_in_thread

AnyTarget = TypeVar("AnyTarget", bound=Target)

ROWS = (1, 4, 16, 64)
STEP_CONTEXT = 512
GENERATE_CONTEXT = 1024
DTYPES = ("float32", "bfloat16", "int8")
_KV_SLOTS = 4096


class ModelSize(NamedTuple):
    """A model to measure. `config`: None loads the weights of `path`, else they are random."""

    name: str
    path: str
    config: Any = None

    def model(self, dtype: str, attention: str) -> Any:
        """The same weights every time; beside int8 stands the model in float32."""
        options = {
            "dtype": torch.float32 if dtype == "int8" else getattr(torch, dtype),
            "attn_implementation": attention,
        }

        def build() -> Any:
            if self.config is None:
                return AutoModelForCausalLM.from_pretrained(self.path, **options).eval()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return AutoModelForCausalLM.from_config(self.config, **options).eval()

        return run_in_thread(build, num_processors())

    def target(self, kind: type[AnyTarget], dtype: str, num_slots: int = _KV_SLOTS) -> AnyTarget:
        """Raises: ModelError."""
        weights = {"quantization": "int8"} if dtype == "int8" else {"quantization": "none", "dtype": dtype}
        config = TargetConfig.model_validate({"model": self.path, **weights})
        if self.config is None:
            return run_in_thread(lambda: kind.load(config, num_slots), num_processors())
        model, tokenizer = self.model(dtype, "ragspec"), AutoTokenizer.from_pretrained(self.path)
        return run_in_thread(lambda: kind(model, tokenizer, config, num_slots), num_processors())

    @property
    def max_context_tokens(self) -> int:
        config = self.config or AutoConfig.from_pretrained(self.path)
        return int(config.get_text_config().max_position_embeddings)


def model_sizes(config: TargetConfig) -> list[ModelSize]:
    """The target itself, and a random Llama of 100 million parameters."""
    random = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return [ModelSize("target", target_folder(config)), ModelSize("random 100M", target_folder(config), random)]


def run_numerics(settings: Settings, tick: Tick, sizes: Sequence[ModelSize] | None = None) -> Outcome:
    """Self-test, step cost and plain decoding against transformers, for every size and type of weights.

    `step_cost`: milliseconds of our step and of the fastest variant by rows, and our relative cost (negative: ours
    is faster). `plain_vs_generate_1k`: transformers' seconds a token over ours. Raises: ModelError.
    """
    memory, threads = PeakMemory(), num_processors()
    num_steps, num_runs, num_tokens = (7, 1, 16) if settings.quick else (40, 3, 64)
    passed: dict[str, bool] = {}
    costs: dict[str, Result] = {}
    against: dict[str, float] = {}
    pairs = [(size, dtype) for size in sizes or model_sizes(settings.target) for dtype in DTYPES]
    for number, (size, dtype) in enumerate(pairs, 1):
        name = f"{size.name} {dtype}"
        target = size.target(Target, dtype)
        tested = run_in_thread(partial(self_test, target, target.max_context_tokens, dtype, threads), threads)
        passed[name] = tested.passed
        costs[name] = run_in_thread(partial(step_costs, target, size, dtype, num_steps), threads)
        against[name] = plain_against_generate(target, size, dtype, num_runs, num_tokens, settings.plan.seed)
        tick("sizes and types", number, len(pairs))
        gc.collect()
    result = {
        "label": f"{STEP_CONTEXT} tokens of context for a step, {GENERATE_CONTEXT} for decoding",
        "bitwise": all(passed.values()),
        "self_test": passed,
        "step_cost": costs,
        "largest_step_cost": max(value for cost in costs.values() for key, value in cost.items() if "cost" in key),
        "plain_vs_generate": against.get(f"target {settings.target.weight_dtype}"),
        "plain_vs_generate_1k": against,
        "num_runs": num_runs,
        "peak_pss_mb": memory.look(),
    }
    return Outcome(result)


def step_costs(target: Target, size: ModelSize, dtype: str, repeats: int) -> Result:
    """For each number of rows: our milliseconds, the variant's, and the relative cost; medians of alternating steps."""
    context = min(STEP_CONTEXT, (size.max_context_tokens - max(ROWS)) // 2)
    variant = FastestStep(size.model(dtype, "ragspec"), context, max(ROWS))
    costs: Result = {}
    for num_rows in ROWS:
        chain = range(-1, num_rows - 1)
        ours_s, variant_s = _alternate(
            partial(forward_s, target, num_rows, context, chain),
            partial(_forward_s, variant, torch.arange(num_rows) % target.vocab_size),
            repeats,
        )
        rows = f"{num_rows} row{'s' if num_rows > 1 else ''}"
        costs |= {
            f"{rows}, ms": ours_s * 1e3,
            f"{rows}, variant ms": variant_s * 1e3,
            f"{rows}, cost": ours_s / variant_s - 1.0,
        }
    return costs


def plain_against_generate(
    target: Target, size: ModelSize, dtype: str, num_runs: int, num_tokens: int, seed: int
) -> float:
    """Greedy decoding without an end after a long random prompt: transformers' seconds a token over ours."""
    context = min(GENERATE_CONTEXT, size.max_context_tokens - num_tokens - 1)
    prompt = np.random.default_rng(seed).integers(0, target.vocab_size, context).tolist()
    case = Case("long", "long", tuple(prompt), (), num_tokens)
    peer = size.model(dtype, "sdpa")
    peer.generation_config.eos_token_id = None
    config = EngineConfig(max_kv_tokens=_KV_SLOTS, adaptive_threads=False)
    with engine_over(Engine, target, config, CostTable({1: [1.0]}, rows=(1,))) as engine:
        decoders: dict[str, Decoder] = {
            PLAIN: EngineDecoder(engine, speculation=False, seed=seed, ignore_eos=True),
            GENERATE: TransformersDecoder(peer, engine, ends=False),
        }
        timings = Timings.measure(decoders, [case], num_runs, num_warm_up=1)
    # Why not `ratio`: on random text near ties may fall differently, and the same number of tokens is enough here
    pairs = [[timings.first_to_last_s(name, n) for name in (GENERATE, PLAIN)] for n in range(num_runs)]
    return median(theirs_s / ours_s for theirs_s, ours_s in pairs)


def _alternate(first: Callable[[], float], second: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Median seconds of both calls in turns; the first two turns do not count."""
    pairs = [(first(), second()) for _ in range(repeats + 2)][2:]
    return median(a for a, _ in pairs), median(b for _, b in pairs)


def _forward_s(variant: FastestStep, token_ids: torch.Tensor) -> float:
    begin = time.perf_counter()
    variant.forward(token_ids)
    return time.perf_counter() - begin


METRICS = (
    Metric("bitwise", "the numerics self-test passed"),
    Metric("plain_vs_generate", "decode time, transformers generate over our plain decoding, same number of tokens"),
    Metric("largest_step_cost", "what the bitwise promise costs a step at most, as a share of the fastest variant's"),
    PEAK_MEMORY,
)
SUITE = Suite(
    "numerics",
    run_numerics,
    METRICS,
    tables=lambda result: nested(result, "self_test", "step_cost", "plain_vs_generate_1k"),
)
