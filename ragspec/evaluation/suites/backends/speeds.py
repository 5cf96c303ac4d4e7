"""How fast steps are on a GPU: beside its bandwidth, a tree beside a row, exact products beside fast ones, drafts beside none."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F

from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.engine.engine import Engine
from ragspec.engine.loading import forward_s
from ragspec.engine.target import Target
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import engine_over
from ragspec.evaluation.suites.backends.models import KV_SLOTS, Shape, random_target
from ragspec.evaluation.timing import Tick
from ragspec.numerics.torch.backend import TiledLinear
from ragspec.speculation import Speculation

_CONTEXT, _TREE_ROWS, _ROUNDS = 512, 64, 20
_BATCHES, _NUM_PROMPT, _NUM_TOKENS = (1, 32), 48, 32


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
                "on over off": on_over_off(target),
            }
            steps[f"{shape.name}, {name}"]["exact over fast"] = tree_s / fast_forward_s(target, _TREE_ROWS)
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
        "bitwise_over_fast": min(step["exact over fast"] for step in largest),
        "on_off_min": min(step["on over off"] for step in steps.values()),
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


def fast_forward_s(target: Target, num_rows: int) -> float:
    """As `_forward_s`, after all products have become the device's own, which may see the number of rows. The target stays so."""
    for module in target._model.modules():
        if isinstance(module, TiledLinear):
            module.forward = functools.partial(F.linear, weight=module.weight, bias=module.bias)  # type: ignore[method-assign]
    target.reset_pool(KV_SLOTS)
    return _forward_s(target, num_rows)


def on_over_off(target: Target) -> float:
    """Tokens a second with drafts over those without, the least of all batches; the runs take turns."""
    ratios = list[float]()
    for size in _BATCHES:
        prompts = [tuple((7 * i + j) % 97 + 3 for j in range(_NUM_PROMPT)) for i in range(size)]
        params = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
        text = (CopySource(SourceKind.PASSAGE, str(target.tokenizer.decode(list(prompts[0]))), "0"),)
        ways = (Speculation(), Speculation(drafters=()))
        with engine_over(Engine, target, EngineConfig(max_kv_tokens=KV_SLOTS)) as engine:
            seconds: list[list[float]] = [[], []]
            for turn in range(5):
                for way, times in zip(ways, seconds, strict=True):
                    requests = [Request(f"{turn} {i}", p, params, text, speculation=way) for i, p in enumerate(prompts)]
                    begin = time.perf_counter()
                    engine.generate(requests)
                    times.append(time.perf_counter() - begin)
        ratios.append(float(median(off / on for on, off in list(zip(*seconds, strict=True))[1:])))
    return min(ratios)
