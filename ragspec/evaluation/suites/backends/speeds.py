"""How fast steps are on a GPU: beside its bandwidth, a tree beside a row, exact products beside fast ones, drafts beside none."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import CopySource, SourceKind
from ragspec.engine.engine import Engine
from ragspec.engine.measurements import forward_s
from ragspec.engine.target import Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import engine_over
from ragspec.evaluation.suites.backends.models import KV_SLOTS, SHAPES, Shape, random_target
from ragspec.evaluation.suites.backends.promises import TEXT
from ragspec.evaluation.timing import EngineDecoder, Tick, warm_turns
from ragspec.numerics.torch.backend import TiledLinear

_CONTEXT, _TREE_ROWS, _ROUNDS = 512, 64, 20
_BATCHES, _NUM_PROMPT, _NUM_TOKENS = (1, 32), 48, 32
_COPIED_NUMBERS = 2**28
_BUDGET_S = 400.0
"""No model is begun after so many seconds, so that a machine which is lent for ten minutes gives a result."""


def speeds(
    names: Sequence[Literal["torch", "cuda"]],
    shapes: Sequence[Shape],
    real: TargetConfig | None,
    tick: Tick,
    device: str,
) -> Result:
    """Milliseconds of a forward by backend and shape, in bfloat16. `real`: weights for 0.1 B; None: random ones.

    Raises: ModelError.
    """
    begin, bandwidth = time.perf_counter(), measured_bandwidth(device)
    steps, left_out = dict[str, Result](), list[str]()
    for number, shape in enumerate(shapes, 1):
        for name in names:
            if steps and time.perf_counter() - begin > _BUDGET_S:
                left_out.append(f"{shape.name}, {name}")
                continue
            target = _target(shape, real if shape.name == SHAPES[0].name else None, device, name)
            steps[f"{shape.name}, {name}"] = _measured(target, bandwidth)
            del target
            torch.cuda.empty_cache()
        tick("speeds", number, len(shapes))
    largest = [step for key, step in steps.items() if key.startswith("8 B")]
    result: Result = {"device": torch.cuda.get_device_name() if device == "cuda" else device}
    result |= {"bandwidth_gb_s": bandwidth / 1e9, "steps": steps, "left_out": left_out}
    result |= {"on_off_min": min(step["on over off"] for step in steps.values())}
    if largest:
        result |= {
            "bandwidth_share": max(step["share of bandwidth"] for step in largest),
            "tree64_over_1": min(step["tree over 1 row"] for step in largest),
            "bitwise_over_fast": min(step["exact over fast"] for step in largest),
        }
    return result


def _target(shape: Shape, real: TargetConfig | None, device: str, name: Literal["torch", "cuda"]) -> Target:
    own: dict[str, Any] = {"device": device, "backend": name, "dtype": "bfloat16", "quantization": "none"}
    if real is not None:
        return Target.load(TargetConfig(**{**real.model_dump(), **own}), KV_SLOTS)
    return random_target(shape, TargetConfig(**own))


def _measured(target: Target, bandwidth: float) -> Result:
    one_s, tree_s = (_forward_s(target, rows) for rows in (1, _TREE_ROWS))
    return {
        "1 row, ms": 1e3 * one_s,
        f"{_TREE_ROWS} rows, ms": 1e3 * tree_s,
        "share of bandwidth": 2 * target.num_parameters / one_s / bandwidth,
        "tree over 1 row": tree_s / one_s,
        "on over off": on_over_off(target),
        "exact over fast": tree_s / fast_forward_s(target, _TREE_ROWS),  # last: the target stays fast
    }


def measured_bandwidth(device: str) -> float:
    """Bytes a second that the device reads and writes in copies."""
    source = torch.empty(_COPIED_NUMBERS, device=device)
    target, seconds = torch.empty_like(source), list[float]()
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / median(seconds[2:])


def _forward_s(target: Target, num_rows: int) -> float:
    """A tree of one chain after a context."""
    chain = range(-1, num_rows - 1)
    return median([forward_s(target, num_rows, _CONTEXT, chain) for _ in range(_ROUNDS)][2:])


def fast_forward_s(target: Target, num_rows: int) -> float:
    """As `_forward_s`, after all products have become the device's own, which may see the number of rows. The target stays so."""
    for module in target._model.modules():
        if isinstance(module, TiledLinear):
            module.forward = functools.partial(F.linear, weight=module.weight, bias=module.bias)  # type: ignore[method-assign]
    target.reset_pool(KV_SLOTS)
    return _forward_s(target, num_rows)


def on_over_off(target: Target) -> float:
    """Tokens a second with drafts over those without, the least of all batches; the runs take turns."""
    ratios, text = list[float](), (CopySource(SourceKind.PASSAGE, TEXT, "0"),)
    ids = tuple(target.tokenizer(3 * TEXT).input_ids)  # a model of real weights goes on with the text
    for size in _BATCHES:
        cases = [Case(f"{i}", "on_off", ids[i % 10 :][:_NUM_PROMPT], text, _NUM_TOKENS) for i in range(size)]
        with engine_over(Engine, target, EngineConfig(max_kv_tokens=KV_SLOTS)) as engine:
            decoders = (
                EngineDecoder(engine, speculation=on, seed=0, salt="on", ignore_eos=True) for on in (True, False)
            )
            on, off = (functools.partial(decoder.together, cases) for decoder in decoders)
            runs = warm_turns({"on": on, "off": off}, num_runs=4)
        ratios.append(median(b.wall_s / a.wall_s for a, b in zip(runs["on"], runs["off"], strict=True)))
    return min(ratios)
