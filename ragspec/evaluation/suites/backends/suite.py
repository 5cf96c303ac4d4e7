"""The suite `backends`: whether each backend keeps the promises, and on a GPU how fast its steps are.

Without a GPU the torch backend runs on the CPU over a small random model. With one, both of the GPU's backends run over that
model, and steps are timed over the configured target and over models of 1 to 32 billion parameters with random weights.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch

from ragspec.config import TargetConfig
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.errors import ModelError
from ragspec.evaluation.report import Metric, Result, at_least, at_most, equal_to, nested
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.suites.backends.filters import filtered_searches
from ragspec.evaluation.suites.backends.models import SHAPES, SMALL, random_target
from ragspec.evaluation.suites.backends.promises import (
    crossing_bytes,
    equal_tokens_share,
    identical_share,
    kernels_exact,
)
from ragspec.evaluation.suites.backends.speeds import speeds
from ragspec.evaluation.timing import Tick
from ragspec.numerics.self_test import self_test
from ragspec.numerics.threads import num_processors

_IDS_BYTES = 16.0
"""Read of a row: its token, and its near tie."""
_NUM_VECTORS = 50_000


def run_backends(settings: Settings, tick: Tick) -> Outcome:
    """Promises of every backend that this machine runs, then speeds where there is a GPU. Raises: ModelError."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names: tuple[Literal["torch", "cuda"], ...] = ("torch", "cuda") if device == "cuda" else ("torch",)
    promises: dict[str, Result] = {}
    for number, name in enumerate(names, 1):
        target = random_target(SMALL, TargetConfig(device=device, backend=name))
        tested = self_test(target, target.max_context_tokens, target.config.numerics_dtype, num_processors())
        promises[name] = {
            "oracle_identical": identical_share(target) == 1.0,
            "rows_invariant": tested.passed,
            "sampling_equal": equal_tokens_share(device) == 1.0,
            "kernels_exact": kernels_exact(target.backend),
        }
        crossed = crossing_bytes(target)
        is_small = crossed["read, bytes a row"] <= _IDS_BYTES and crossed["sent, bytes a row"] < 2 * target.vocab_size
        promises[name] |= {"bus_small": is_small, **crossed}
        tick("promises", number, len(names))
    kept_by_all = [key for key, kept in promises["torch"].items() if isinstance(kept, bool)]
    result: Result = {key: all(kept[key] for kept in promises.values()) for key in kept_by_all}
    result |= {"label": f"on {device}", "target": f"{SMALL.layers} layers of random weights", "dtype": "float32"}
    result |= {"promises": promises}
    if find_spec("faiss"):
        result |= filtered_searches(_NUM_VECTORS)
    if device == "cuda":
        shapes = SHAPES[:3] if settings.quick else SHAPES[2:] + SHAPES[:2]  # the time may not do for all
        result |= speeds(names, shapes, _with_weights(settings.target), tick, device)
    return Outcome(result)


def _with_weights(config: TargetConfig) -> TargetConfig | None:
    """The configured target, if its weights are here."""
    try:
        target_folder(config)
    except ModelError:
        return None
    return config


METRICS = (
    Metric("oracle_identical", "tokens with drafts and in a batch equal those without, alone", equal_to(True)),
    Metric("rows_invariant", "the numerics self-test passed", equal_to(True)),
    Metric("kernels_exact", "products, norms and attention are float64's, in any number of rows", equal_to(True)),
    Metric("bus_small", "token ids and a few numbers cross between host and device", equal_to(True)),
    Metric("sampling_equal", "10,000 tokens sampled on the device equal the CPU's", equal_to(True)),
    Metric("filters_exact", "filtered searches on the device give exact search's rows", equal_to(True)),
    Metric("bandwidth_share", "8 B, bfloat16, one row: share of the memory's bandwidth", at_least(0.85)),
    Metric("tree64_over_1", "8 B, bfloat16: a forward of 64 nodes over one of a row", at_most(1.15)),
    Metric(
        "bitwise_over_fast", "8 B, bfloat16: a step with exact products over one with the device's own", at_most(1.15)
    ),
    Metric(
        "on_off_min", "tokens a second with drafts over without, the least of all shapes and batches", at_least(1.0)
    ),
)
SUITE = Suite("backends", run_backends, METRICS, tables=lambda result: nested(result, "promises", "filters", "steps"))
