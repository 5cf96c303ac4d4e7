"""What a head that learns while it serves gains on a topic that it was not trained for (the drift experiment of OSD).

The same questions are answered before and after a stream of other questions of their topic. Every tree has a fixed size, so the
figures do not depend on how fast this machine is. The topic is GSM8K's: no head of `pipelines.train_drafter` has read it.

    >>> drift = measure_drift(target, eagle_config, stream, probes)
    >>> drift.gain                                # accepted draft tokens a step, after over before

Source: online speculative decoding (Liu et al. 2023, arXiv 2310.07177).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.config import DraftingConfig, EagleConfig, EngineConfig, TargetConfig
from ragspec.core import Message, Request, SamplingParams
from ragspec.drafting.eagle.online import OnlineEagleDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.evaluation.datasets import json_rows
from ragspec.evaluation.overrides import FixedTreePlanner
from ragspec.evaluation.timing import Tick, no_tick
from ragspec.rag.prompt import PromptBuilder

NUM_REQUESTS, NUM_PROBES = 2_000, 40
_TOKENS, _AT_ONCE = 64, 8
_KV_TOKENS = 8_192

Prompts = Sequence[tuple[int, ...]]


class Drift(NamedTuple):
    """Accepted draft tokens a step; and whether all tokens were the same before and after."""

    before: float
    after: float
    identical: bool

    @property
    def gain(self) -> float:
        return self.after / max(1e-9, self.before)


def gsm8k_prompts(path: Path, count: int, prompts: PromptBuilder) -> list[tuple[int, ...]]:
    """The first questions of the file, as chat prompts. Raises: InputError."""
    found: list[tuple[int, ...]] = []
    for _, row in json_rows(path):
        found.append(tuple(prompts.build([Message("user", row["question"])], (), _TOKENS).prompt_ids))
        if len(found) == count:
            break
    return found


def measure_drift(
    target: TargetConfig, eagle: EagleConfig, stream: Prompts, probes: Prompts, tick: Tick = no_tick
) -> Drift:
    """Answers `probes`, then `stream`, then `probes` again. Raises: ModelError, ConfigError."""
    learning: list[OnlineEagleDrafter] = []

    class Noting(FixedTreePlanner):
        def __init__(self, drafters: Sequence[Any], *args: Any) -> None:
            super().__init__(drafters, *args)
            learning.extend(drafters)

    online = eagle.online.model_copy(update={"enabled": True})
    drafting = DraftingConfig(drafters=("eagle",), eagle=eagle.model_copy(update={"online": online}), max_tree_nodes=16)
    config = EngineConfig(max_running=_AT_ONCE, max_kv_tokens=_KV_TOKENS)
    with load_engine(target, config, drafting, planner_class=Noting) as engine:
        before, first = _answered(engine, probes, "before")
        for start in range(0, len(stream), _AT_ONCE):
            _answered(engine, stream[start : start + _AT_ONCE], "drift")
            engine.between_steps(lambda: None)  # the last request has ended in the drafters too
            learning[0].wait()
            tick("requests of another topic", min(start + _AT_ONCE, len(stream)), len(stream))
        after, again = _answered(engine, probes, "drift")
    return Drift(before, after, first == again)


def _answered(engine: Engine, prompts: Prompts, salt: str) -> tuple[float, list[tuple[int, ...]]]:
    """Accepted draft tokens a step, and the tokens. `salt`: whose head drafts."""
    params = SamplingParams(max_tokens=_TOKENS)
    requests = [Request(f"{salt}-{n}", ids, params, salt=salt) for n, ids in enumerate(prompts)]
    done = engine.generate(requests)
    steps = sum(completion.stats.num_steps for completion in done)
    return sum(completion.stats.num_accepted for completion in done) / max(1, steps), [c.token_ids for c in done]
