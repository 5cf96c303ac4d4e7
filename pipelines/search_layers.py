"""Find the layers of a target that draft best for it (self-speculative decoding).

    python -m pipelines.search_layers --target path/to/model --evaluations 80

Every evaluation decodes the same prompts with chains drafted by some of the layers, and counts tokens a step. From that and the
measured costs of steps and drafts follow tokens a second, which the search raises: Bayesian optimisation over sets of layers, a
Gaussian process with the number of differing layers as distance, and expected improvement over sets near the best ones.

The last line on stdout is one JSON object; its `keep` is the setting `drafting.self_draft.keep`. `early_exit` is the best set of
first layers among the evaluated ones. Source: Zhang et al. 2023 (arXiv 2309.08168).
"""

import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from pipelines.batch.options import exit_on_error
from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import Message, Request, SamplingParams
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.growing.shapes import make_shape
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.drafting.self_draft import SelfDrafter
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.loading import measure_costs
from ragspec.engine.measurements import forward_s
from ragspec.engine.target import Target
from ragspec.evaluation.datasets import stdlib_list
from ragspec.rag.prompt import PromptBuilder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Layers = tuple[int, ...]
_CANDIDATES, _SCALE, _NOISE = 400, 0.15, 1e-3
"""Sets that compete for an evaluation; the kernel's width as a share of all layers; noise of an evaluation."""
_KV_TOKENS = 8192


class Found(NamedTuple):
    keep: Layers
    value: float


def search(num_layers: int, value: Callable[[Layers], float], num_evaluations: int, seed: int) -> list[Found]:
    """All evaluated sets, the best first. Begins with first layers and with evenly spaced ones."""
    rng = random.Random(seed)
    shares = [max(1, round(num_layers * share)) for share in (0.25, 0.5, 0.75)]
    first = [tuple(range(count)) for count in shares]
    first += [tuple(sorted({n * num_layers // count for n in range(count)})) for count in shares]
    found = [Found(keep, value(keep)) for keep in dict.fromkeys(first[:num_evaluations])]
    while len(found) < min(num_evaluations, 2**num_layers - 1):
        near = sorted(found, key=lambda each: -each.value)[:4]
        candidates = {_changed(rng.choice(near).keep, num_layers, rng) for _ in range(_CANDIDATES)}
        left = sorted(candidates - {each.keep for each in found})
        if not left:
            left = [_changed(rng.choice(found).keep, num_layers, rng)]
            if left[0] in {each.keep for each in found}:
                continue
        keep = left[int(np.argmax(_expected_improvement(found, left, num_layers)))]
        found.append(Found(keep, value(keep)))
    return sorted(found, key=lambda each: (-each.value, each.keep))


def _changed(keep: Layers, num_layers: int, rng: random.Random) -> Layers:
    """With one to three layers more or less; never empty."""
    other = set(keep) ^ set(rng.sample(range(num_layers), min(num_layers, rng.randint(1, 3))))
    return tuple(sorted(other)) or keep


def _expected_improvement(found: Sequence[Found], sets: Sequence[Layers], num_layers: int) -> NDArray[np.float64]:
    """Of each set over the best value, by a Gaussian process through all evaluations."""
    known, new = (np.zeros((len(each), num_layers)) for each in (found, sets))
    for rows, kept in ((known, [each.keep for each in found]), (new, sets)):
        for row, keep in zip(rows, kept, strict=True):
            row[list(keep)] = 1.0
    values = np.array([each.value for each in found])
    spread = values.std() or 1.0

    def kernel(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        distance: NDArray[np.float64] = np.abs(a[:, None] - b[None]).sum(-1)
        return np.exp(-distance / (_SCALE * num_layers))

    across = kernel(new, known)
    solved = np.linalg.solve(kernel(known, known) + _NOISE * np.eye(len(known)), across.T)
    means = values.mean() + solved.T @ (values - values.mean())
    deviations = spread * np.sqrt(np.maximum(1e-9, 1.0 - (across * solved.T).sum(1)))
    z = (means - values.max()) / deviations
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2)))
    gain: NDArray[np.float64] = deviations * (z * below + density)
    return gain


class LayerSpeeds:
    """Tokens a second of drafts by some layers, over plain decoding. `depth`: tokens of a drafted chain."""

    def __init__(self, target: Target, requests: Sequence[Request], depth: int) -> None:
        self._target, self._requests, self._depth = target, requests, depth
        self._costs = measure_costs(target, 8 * (depth + 1))
        context = min(self._costs.measured[1])
        one, whole = ([*range(count)] for count in (1, target.num_layers))
        self._one_s, self._whole_s = (
            CostTable.measure(partial(forward_s, target, layers=layers), [context], 8).cost_s(1, context)
            for layers in (one, whole)
        )
        self._context = context
        self.lengths: dict[Layers, float] = {}

    def __call__(self, keep: Layers) -> float:
        self.lengths[keep] = length = self._acceptance_length(keep)
        layer_s = (self._whole_s - self._one_s) / max(1, self._target.num_layers - 1)
        draft_s = self._depth * (self._one_s + layer_s * (len(keep) - 1))
        step_s = self._costs.cost_s(1 + self._depth, self._context)
        return length * self._costs.cost_s(1, self._context) / (step_s + draft_s)

    def _acceptance_length(self, keep: Layers) -> float:
        shape = make_shape("chain", 1, 1, self._depth)
        drafter = SelfDrafter(self._target, keep, shape, deepcopy(self._costs))  # Why copies: both refine their table
        planner = FixedTreePlanner([drafter], deepcopy(self._costs), self._depth, self._target.vocab_size)
        settings = EngineConfig(max_kv_tokens=self._target.pool.num_slots, enable_prefix_caching=False)
        with Engine(self._target, planner, self._admission, settings) as engine:
            stats = [done.stats for done in engine.generate(self._requests)]
        return sum(each.num_output_tokens for each in stats) / sum(each.num_steps for each in stats)

    @functools.cached_property
    def _admission(self) -> Admission:
        return Admission(self._target, "search")


@app.command()
def main(
    target: Annotated[str, typer.Option(help="Model directory, name or GGUF file; its weights stay floats.")],
    evaluations: Annotated[int, typer.Option(min=1, help="Sets of layers to try.")] = 80,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Tokens of a drafted chain.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of an evaluation.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
) -> None:
    """Search the layers that draft best."""
    console = Console(stderr=True)
    with exit_on_error():
        loaded = Target.load(TargetConfig(model=target, device=device, quantization="none"), _KV_TOKENS)
        builder = PromptBuilder(loaded.tokenizer, loaded.max_context_tokens)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        asked = [Message("user", question.text) for question in stdlib_list(prompts).questions]
        requests = [
            Request(f"{n}", builder.build([each], (), tokens).prompt_ids, params) for n, each in enumerate(asked)
        ]
        speeds = LayerSpeeds(loaded, requests, depth)

        def value(keep: Layers) -> float:
            found = speeds(keep)
            console.print(f"{found:.3f} x plain decoding, {speeds.lengths[keep]:.2f} tokens a step: {list(keep)}")
            return found

        ranked = search(loaded.num_layers, value, evaluations, seed)
    exits = [
        each for each in ranked if each.keep == tuple(range(len(each.keep))) and len(each.keep) < loaded.num_layers
    ]
    result = {
        "keep": ranked[0].keep,
        "speed_over_plain": ranked[0].value,
        "acceptance_length": speeds.lengths[ranked[0].keep],
        "early_exit": exits[0].keep if exits else None,
        "early_exit_over_plain": exits[0].value if exits else None,
        "num_evaluations": len(ranked),
        "num_layers": loaded.num_layers,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app()
