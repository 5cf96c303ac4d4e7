"""Two replicas beside one, with the forward replaced by a sleep of the time that it was measured to take.

Two cores cannot compute for two; what can be shown on them is that nothing else holds the second replica up. So everything but
the forward is real: retrieval, prompts, router, polls, actors, planner, sampling, commits. Only `SleepingTarget` is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import ray

from ragspec.cluster.actors import Replica, WorkerActor, remote_class
from ragspec.cluster.engine_host import EngineHost
from ragspec.cluster.engine_server import CONCURRENT_CALLS
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.cluster.routing.replica_client import ray_connect
from ragspec.cluster.routing.router import Router
from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import SamplingParams
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.loading import make_drafters
from ragspec.engine.target import Floats, Ints, Target
from ragspec.evaluation.cases import RAG_PASSAGES, RAG_TOKENS
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick, warm_turns
from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.backend import LogitRows
from ragspec.rag.pipeline import AsyncPipeline, PipelineLimits
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Question, RetrieverLike
from ragspec.retrieval.search.segment_search import SearchScope

MAX_RUNNING = 8
_KV_TOKENS = 16_384
_START_S = 180.0
_STRAY = 7
"""One token in so many is unusual."""


class SleepingTarget(Target):
    """Its forward sleeps, which lets other threads compute, and says what usually follows a token; at times something else.

    A function of the token and its position alone, so that no draft and no batch can change it.
    """

    def prepare(self, costs: CostTable, successors: Mapping[int, int]) -> None:
        """`costs`: how long a forward takes. `successors`: which token follows which."""
        self._costs = costs
        self._next = np.arange(1, self.vocab_size + 1) % self.vocab_size
        self._next[list(successors)] = list(successors.values())

    def forward_tapped(
        self, token_ids: Ints, metadata: AttentionMetadata, logit_rows: Ints, taps: Sequence[int]
    ) -> tuple[LogitRows, dict[int, Floats]]:
        time.sleep(self._costs.cost_s(len(token_ids), int(metadata.positions.max())))
        asked, places = token_ids[logit_rows].astype(np.int64), metadata.positions[logit_rows].astype(np.int64)
        mixed = (asked * 0x9E3779B1 + places * 0x85EBCA77) % 2**31
        chosen = np.where(mixed % _STRAY == 0, mixed // _STRAY % self.vocab_size, self._next[asked])
        logits = np.zeros((len(logit_rows), self.vocab_size), np.float32)
        logits[np.arange(len(logit_rows)), chosen] = 1.0
        return logits, {}


def usual_successors(texts: Sequence[Sequence[int]]) -> dict[int, int]:
    """The most frequent successor of each token; the lower id of equals."""
    counts: dict[int, Counter[int]] = {}
    for tokens in texts:
        for first, second in pairwise(tokens):
            counts.setdefault(first, Counter())[second] += 1
    return {first: min(found, key=lambda token: (-found[token], token)) for first, found in counts.items()}


class SleepingEngine(EngineHost, WorkerActor):
    """An `EngineHost` in an actor, with a `SleepingTarget`."""

    def __init__(self, config: TargetConfig, costs: CostTable, successors: Mapping[int, int]) -> None:
        """Raises: ModelError."""
        target = SleepingTarget.load(config, _KV_TOKENS)
        target.prepare(costs, successors)
        drafting = DraftingConfig()
        own = deepcopy(costs)  # Why: a planner refines its own, and the sleeps would grow with what it saw of them
        planner = Planner(make_drafters(target, drafting), own, drafting.max_tree_nodes, target.vocab_size)
        settings = EngineConfig(
            max_kv_tokens=_KV_TOKENS, max_running=MAX_RUNNING, num_threads=1, adaptive_threads=False
        )
        super().__init__(Engine(target, planner, Admission(target, "sleeping"), settings))


@contextlib.contextmanager
def sleeping_replicas(count: int, *arguments: Any) -> Iterator[list[Replica]]:
    """Actors like those of a deployment, each a `SleepingEngine` of these arguments."""
    start = remote_class(SleepingEngine, CONCURRENT_CALLS).options(num_cpus=0.1).remote
    replicas = [Replica(f"engine-{number}", start(*arguments)) for number in range(count)]
    try:
        ray.get([replica.actor.load.remote() for replica in replicas], timeout=_START_S)
        yield replicas
    finally:
        for replica in replicas:
            ray.kill(replica.actor)


class Scaling:
    """The same questions to the first one or two of some replicas, through a router and the whole flow."""

    def __init__(
        self, replicas: Sequence[Replica], retriever: RetrieverLike, prompts: PromptBuilder, questions: Sequence[str]
    ) -> None:
        self._replicas, self._questions = replicas, questions
        self._retriever, self._prompts = retriever, prompts
        self._num_passes = 0

    def measure(self, num_runs: int, tick: Tick) -> Result:
        """One replica and two take turns; ratios of neighbouring passes, their median."""
        passes = warm_turns({str(n): partial(self._pass, n) for n in (1, 2)}, num_runs, tick, "one replica and two")
        walls_s = {count: [wall_s for wall_s, _ in runs] for count, runs in passes.items()}
        answers = [found for runs in passes.values() for _, found in runs]
        ratios = [one_s / two_s for one_s, two_s in zip(*walls_s.values(), strict=True)]
        num_tokens = sum(map(len, answers[0].values()))
        return {
            "replica_scaling_simulated": median(ratios),
            "scaling_identical": all(each == answers[0] for each in answers),
            "scaling_ratios": ratios,
            "scaling_tokens_per_s": {count: num_tokens / median(taken_s) for count, taken_s in walls_s.items()},
            "scaling_questions": len(self._questions),
        }

    def _pass(self, num_replicas: int) -> tuple[float, dict[str, tuple[int, ...]]]:
        """Seconds of one pass over all questions, and the tokens by question.

        Why a tenant of its own: no prefix is cached from the pass before."""
        self._num_passes += 1
        tenant = f"pass-{self._num_passes}"
        params = SamplingParams(max_tokens=RAG_TOKENS, ignore_eos=True, seed=0)
        asked = [
            Question(f"{tenant}-{i}", text, params, RAG_PASSAGES, SearchScope(tenant))
            for i, text in enumerate(self._questions)
        ]
        routing = RoutingConfig(max_running=MAX_RUNNING + MAX_RUNNING // 2)
        with Router(self._replicas[:num_replicas], ray_connect(routing), routing) as router:
            limits = PipelineLimits(max_in_flight=2 * MAX_RUNNING * num_replicas)
            begin = time.perf_counter()
            answers = asyncio.run(_answers(AsyncPipeline(self._retriever, router, self._prompts, limits), asked))
            wall_s = time.perf_counter() - begin
        return wall_s, {name.removeprefix(tenant): tokens for name, tokens in answers.items()}


async def _answers(flow: AsyncPipeline, questions: Sequence[Question]) -> dict[str, tuple[int, ...]]:
    """Raises: the first error of a question."""
    answers: dict[str, tuple[int, ...]] = {}
    async for finished in flow.run(questions):
        answers[finished.id] = finished.result()[0].token_ids
    return answers
