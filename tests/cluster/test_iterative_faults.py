"""Iterative answers over an index elsewhere, with everything going wrong there: the sequential answer, or one clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from iterative_parts import CONTEXT, DOCUMENTS, Always, wide_target
from letter_encoder import LetterEncoder
from shard_parts import pid_of
from tiny_target import tiny_engine

from pipelines.benchmarks.iterative import SlowShardActor
from ragspec.cluster.actors import ActorPool, Replica
from ragspec.cluster.remote_retrieval import cluster_retriever
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.config import RetrieverConfig, SpeculationConfig
from ragspec.core import SamplingParams
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import RetrievalError
from ragspec.rag.answer import Answer
from ragspec.rag.iterative.pipeline import IterativePipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.speculative.stride import StridePlan

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

QUESTION = "When was the bridge built?"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=1)
BOUND_S = 600.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = wide_target(tmp_path_factory.mktemp("faults"))
    with tiny_engine(target, [CopyDrafter(target.tokenizer, target.eos_ids)], num_kv_slots=8192) as made:
        yield made


@pytest.fixture
def index_dir(tmp_path: Path) -> Path:
    build_index(DOCUMENTS, tmp_path / "index", LetterEncoder())
    return tmp_path / "index"


@contextlib.contextmanager
def remote(
    index_dir: Path, service_s: float = 0.0, timeout_s: float = BOUND_S
) -> Iterator[tuple[ClusterRetriever, Replica]]:
    """An index on one shard whose every call takes `service_s` longer until it is restarted; and that shard."""
    config = RetrieverConfig(index_dir=str(index_dir), mode="dense")
    with ActorPool(SlowShardActor, prefix="shard") as shards:
        (shard,) = shards.replicas
        ray.get(shard.actor.slow_down.remote(service_s))
        with contextlib.closing(ClusterRetriever(config, LetterEncoder(), [shard], timeout_s=timeout_s)) as index:
            yield index, shard


def pipeline(engine: Engine, index: Any, **speculation: Any) -> IterativePipeline:
    config = SpeculationConfig(**speculation)
    prompts = PromptBuilder(engine.target.tokenizer, CONTEXT)
    return IterativePipeline(index, engine, prompts, speculation=config, scheduler=Always(StridePlan(2, 2, 2.0)))


def said(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.passages, answer.dropped_passages, answer.stats.index_generation


def truth(engine: Engine, index_dir: Path) -> tuple[Any, ...]:
    """The sequential answer, of the generation that is current now."""
    index = Retriever(LetterEncoder(), Store.open(index_dir), RetrieverConfig(mode="dense"), follow=False)
    return said(pipeline(engine, index, enabled=False).ask(QUESTION, PARAMS))


def during_the_second_lookup(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Run `act` in a thread, shortly after the second lookup has begun."""
    look_up, count = cluster_retriever.ClusterView.search, [0]

    def look_up_and_act(view: Any, *arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            threading.Timer(0.2, act).start()
        return look_up(view, *arguments, **options)

    monkeypatch.setattr(cluster_retriever.ClusterView, "search", look_up_and_act)


def test_a_reply_that_does_not_come_is_one_clear_error(engine: Engine, index_dir: Path) -> None:
    """A lost reply stopped the answer for ever, without a word."""
    with remote(index_dir, timeout_s=4.0) as (index, shard):
        guessed = pipeline(engine, index)
        pid = pid_of(shard)
        guessed.ask(QUESTION, PARAMS)
        os.kill(pid, signal.SIGSTOP)  # alive, and silent
        begin = time.monotonic()
        try:
            with pytest.raises(
                RetrievalError, match=r"cannot be searched: a shard of the index did not answer within 4 s$"
            ):
                guessed.ask(QUESTION, PARAMS)
            assert time.monotonic() - begin < BOUND_S
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_an_answer_keeps_its_generation_though_the_index_dies_and_changes(
    engine: Engine, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor came back with another generation, and half an answer was verified against that."""
    expected = truth(engine, index_dir)

    def change_and_kill() -> None:
        with IndexWriter(index_dir) as writer:
            for document in DOCUMENTS[:16]:
                writer.delete(document.id)
            writer.commit()
        os.kill(pid, signal.SIGKILL)

    with remote(index_dir, service_s=0.5) as (index, shard):
        pid = pid_of(shard)
        during_the_second_lookup(monkeypatch, change_and_kill)
        guessed = pipeline(engine, index)
        assert said(guessed.ask(QUESTION, PARAMS)) == expected
        assert said(guessed.ask(QUESTION, PARAMS)) == truth(engine, index_dir) != expected
