"""Tensor parallel in the suite `cluster`: groups of 1, 2 and 4 ranks in Ray actors, each target and type of weights in turn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipelines.benchmarks.cluster.shards import identical_share
from ragspec.cluster.actors import ActorPool, WorkerActor
from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.measurements import forward_s
from ragspec.engine.parallel import load_follower
from ragspec.engine.target import Floats, Ints, Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.overrides import FixedTreePlanner
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import EngineDecoder, Tick
from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.ranks import ONE_RANK, DistributedRanks, Ranks, Rendezvous
from ragspec.numerics.self_test import self_test
from ragspec.numerics.threads import num_processors, set_num_threads

SIZES = (1, 2, 4)
_KV_TOKENS = 4096
_TIMEOUT_S = 900.0
_RANK_TIMEOUT_S = 60.0
"""Four ranks on two cores may wait long for each other; this suite does not test lost ranks."""

_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "eos_token_id": None,
}
RANDOM: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "random Llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "random Qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False, "head_dim": 32}),
}


class RankProbe(WorkerActor):
    """The process of one rank, for one group after the other."""

    def meet(self) -> str:
        """Rank 0's address for the other ranks."""
        self._meeting = Rendezvous("127.0.0.1")
        return self._meeting.address

    def follow(self, config: TargetConfig, address: str, rank: int, size: int) -> None:
        """Follow rank 0 until its engine ends."""
        ranks = DistributedRanks(address, rank, size, timeout_s=_RANK_TIMEOUT_S)
        load_follower(config, EngineConfig(max_kv_tokens=_KV_TOKENS, num_threads=1), ranks).run()

    def lead(self, config: TargetConfig, cases: Sequence[Case], size: int, seed: int) -> RankMeasurement:
        ranks = DistributedRanks(self._meeting, 0, size, timeout_s=_RANK_TIMEOUT_S) if size > 1 else ONE_RANK
        return measure_ranks(config, cases, ranks, seed)


def saved_model(name: str, tokenizer: Any, folder: Path) -> Path:
    """A small random model with grouped queries and a given tokenizer; the same weights every time."""
    config_class, model_class, extra = RANDOM[name]
    path = folder / f"{name.replace(' ', '_').lower()}-{len(tokenizer)}"
    if not (path / "complete").is_file():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config_class(vocab_size=len(tokenizer), **_SHAPE, **extra))
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
        (path / "complete").touch()
    return path


def tensor_parallel(
    targets: Sequence[tuple[str, TargetConfig]], cases: Sequence[Case], seed: int, tick: Tick
) -> list[Result]:
    """One row for each target and size of group, compared with one rank. Raises: what a rank raises."""
    rows: list[Result] = []
    with ActorPool(RankProbe, count=max(SIZES), prefix="rank") as pool:
        probes = [replica.actor for replica in pool.replicas]
        for name, config in targets:
            alone: RankMeasurement | None = None
            for size in SIZES:
                measured = _measured(probes, config, cases, size, seed)
                alone = alone or measured
                rows.append(
                    {"target": name, "dtype": config.weight_dtype, "ranks": size} | compare_ranks(alone, measured)
                )
                tick("tensor parallel", len(rows), len(targets) * len(SIZES))
    return rows


def tp_headlines(rows: Sequence[Result]) -> Result:
    """Headlines over all groups of more than one rank."""
    groups = [row for row in rows if row["ranks"] > 1]
    bitwise = all(row["bitwise"] for row in groups) if groups else None
    return {"tp_identical": identical_share(groups), "tp_bitwise": bitwise}


def _measured(
    probes: Sequence[Any], config: TargetConfig, cases: Sequence[Case], size: int, seed: int
) -> RankMeasurement:
    address = ray.get(probes[0].meet.remote()) if size > 1 else ""
    follows = [probe.follow.remote(config, address, rank, size) for rank, probe in enumerate(probes[1:size], 1)]
    lead = probes[0].lead.remote(config, cases, size, seed)
    measured: RankMeasurement = ray.get(lead, timeout=_TIMEOUT_S)
    ray.get(follows, timeout=_RANK_TIMEOUT_S)
    return measured


STEP_ROWS = (1, 8, 64)
_CONTEXT = 512
_NUM_STEPS = 9
_NODES = 8
_THREADS = 1
"""Threads of a rank. One rank alone is timed with all threads, too, and its better time counts."""

Answers = dict[str, list[tuple[int, ...]]]


class RankMeasurement(NamedTuple):
    """`bits`: a digest of every logit of `num_rows` rows in prompts, chunks, trees and batches. `answers`: tokens by setting.

    `step_ms`: milliseconds of a forward by its rows; `fingerprint`: the numerics id.
    """

    bits: str
    num_rows: int
    answers: Answers
    step_ms: dict[int, float]
    fingerprint: str


class LogitsDigest:
    """Wraps a target and digests the bits of all its logits."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.pool, self.vocab_size = target.pool, target.vocab_size
        self.digest = hashlib.sha256()
        self.num_rows = 0

    def forward(self, token_ids: Ints, metadata: AttentionMetadata, logit_rows: Ints) -> Floats:
        logits = self._target.forward(token_ids, metadata, logit_rows)
        self.digest.update(np.ascontiguousarray(logits).tobytes())
        self.num_rows += len(logits)
        return logits


def measure_ranks(config: TargetConfig, cases: Sequence[Case], ranks: Ranks, seed: int = 0) -> RankMeasurement:
    """Rank 0's part; the other ranks follow, and end with rank 0. Raises: ModelError, RankLost."""
    settings = EngineConfig(max_kv_tokens=_KV_TOKENS, max_running=8, num_threads=_THREADS, adaptive_threads=False)
    drafting = DraftingConfig(max_tree_nodes=_NODES)
    with load_engine(config, settings, drafting, ranks=ranks, planner_class=FixedTreePlanner) as engine:
        target, recorder = engine.target, LogitsDigest(engine.target)
        steps: dict[int, float] = {}

        def compute() -> None:  # Why in the engine's thread: the ranks follow what that says
            self_test(recorder, target.max_context_tokens, config.dtype, _THREADS)
            for num_threads in (num_processors(), _THREADS) if ranks.size == 1 else (_THREADS,):
                set_num_threads(num_threads)
                for num_rows in STEP_ROWS:
                    steps[num_rows] = min(_step_ms(target, num_rows), steps.get(num_rows, math.inf))

        engine.between_steps(compute)
        return RankMeasurement(
            recorder.digest.hexdigest(), recorder.num_rows, _answers(engine, cases, seed), steps, engine.fingerprint
        )


def compare_ranks(alone: RankMeasurement, group: RankMeasurement) -> Result:
    """Equality of a group with one rank: all bits or not, and the number of equal answers."""
    pairs = [
        (a, b)
        for setting, tokens in alone.answers.items()
        for a, b in zip(tokens, group.answers.get(setting, []), strict=True)
    ]
    return {
        "bitwise": (alone.bits, alone.num_rows) == (group.bits, group.num_rows),
        "num_rows": group.num_rows,
        "same_numerics_id": alone.fingerprint == group.fingerprint,
        "num_identical": sum(a == b for a, b in pairs),
        "num_compared": len(pairs),
        "step_ms": {str(rows): ms for rows, ms in group.step_ms.items()},
        "step_over_one_rank": {str(rows): ms / alone.step_ms[rows] for rows, ms in group.step_ms.items()},
    }


def _answers(engine: Engine, cases: Sequence[Case], seed: int) -> Answers:
    answers: Answers = {}
    for temperature in (0.0, 1.0):
        for speculation in (False, True):
            decoder = EngineDecoder(engine, speculation=speculation, seed=seed, temperature=temperature)
            runs = decoder.together(cases).runs
            answers[f"T={temperature:g}, speculation {'on' if speculation else 'off'}"] = [r.token_ids for r in runs]
    return answers


def _step_ms(target: Target, num_rows: int) -> float:
    context = min(_CONTEXT, target.max_context_tokens - num_rows)
    return 1e3 * median(forward_s(target, num_rows, context, range(-1, num_rows - 1)) for _ in range(_NUM_STEPS))
