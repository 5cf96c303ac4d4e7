"""The suite `cluster`: what stands in for a forward computes nothing, and everything else is real."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_target import Free, save_model

from pipelines.benchmark import measure_suite
from pipelines.benchmarks.cluster.scaling import SleepingEngine, SleepingTarget, usual_successors
from pipelines.benchmarks.cluster.shards import identical_share
from ragspec.config import TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine.target import Floats
from ragspec.errors import ConfigError
from ragspec.evaluation.report import complete
from ragspec.evaluation.suite import Repetitions, Settings
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    """Four ranks share it: a key and value head for each."""
    folder = tmp_path_factory.mktemp("sleeping") / "llama"
    save_model("llama", folder, max_position_embeddings=2048, num_key_value_heads=4)
    return TargetConfig(model=str(folder))


def logits_of(target: SleepingTarget, tokens: list[int], start: int) -> Floats:
    slots = SequenceSlots(target.pool)
    slots.keep(*slots.reserve(start), list(range(start)))
    batch = Batch([ScheduledSequence(slots, tokens)])
    wanted = np.arange(len(tokens), dtype=np.int32)
    logits, _ = target.forward_tapped(batch.token_ids, batch.metadata, wanted, ())
    slots.release()
    return logits


def test_a_sleeping_forward_takes_its_time_and_depends_on_nothing_beside_a_row(model: TargetConfig) -> None:
    """Rows that say something else in another batch: then no draft could ever be checked against plain decoding."""
    target = SleepingTarget.load(model, 512)
    target.prepare(Free(0.05), {40: 41, 41: 42})
    begin = time.perf_counter()
    together = logits_of(target, [40, 41, 99], 3)
    assert time.perf_counter() - begin >= 0.05
    alone = np.concatenate([logits_of(target, [token], 3 + i) for i, token in enumerate([40, 41, 99])])
    np.testing.assert_array_equal(together, alone)
    said = [int(logits_of(target, [40], start).argmax()) for start in range(40)]
    assert said.count(41) > 25 and len(set(said)) > 2, "the usual token, and at times another"


def test_a_sleeping_replica_answers_with_drafts_accepted(model: TargetConfig) -> None:
    """Answers that no draft ever meets would leave planner and commits out of what is measured."""
    prompt = tuple(range(40, 60)) * 2
    host = SleepingEngine(model, Free(1e-4), usual_successors([prompt]))
    try:
        deltas = []
        host.submit("me", [Request("a", prompt, SamplingParams(max_tokens=60, ignore_eos=True))])
        while not deltas or deltas[-1].finish_reason is None:
            deltas += host.poll("me", 1.0).deltas
    finally:
        host.close()
    stats = deltas[-1].stats
    assert stats is not None and stats.num_output_tokens == 60 and stats.num_accepted > 0


def test_usual_successors() -> None:
    """The last seen in place of the most frequent."""
    assert usual_successors([(1, 2, 1, 2, 1, 3), (4, 9), (4, 8)]) == {1: 2, 2: 1, 4: 8}


def test_one_query_that_differs_is_no_whole_share() -> None:
    """A share over layouts that rounds the one difference away."""
    rows = [{"num_identical": 200, "num_compared": 200}, {"num_identical": 199, "num_compared": 200}]
    share = identical_share(rows)
    assert share is not None and share < 1.0
    assert identical_share([]) is None


def test_settings_of_other_suites_are_refused(model: TargetConfig, tmp_path: Path) -> None:
    """An option that is read and ignored; refused before Ray is started."""
    with pytest.raises(ConfigError, match="--full"):
        measure_suite("chaos", Settings(model, None, tmp_path, full=True), lambda *_: None)


@pytest.mark.slow
@pytest.mark.ray
def test_the_whole_suite_runs(model: TargetConfig, tmp_path: Path, shared_data: Path) -> None:
    """A part that no run ever reaches; a key that the result lacks."""
    plan = Repetitions(num_runs=1, seed=3)
    settings = Settings(model, shared_data, tmp_path / "cache", plan, quick=True, num_prompts=4)
    _, outcome = measure_suite("cluster", settings, lambda *_: None)
    result = complete(outcome.result | {"commit": "abc", "threads": 2})
    json.dumps(result, allow_nan=False)
    assert result["tp_identical"] == 1.0 and result["tp_bitwise"] is True
    assert result["sharded_identical"] == 1.0 and result["scaling_identical"] is True
    assert result["step_overhead_b1"] is not None
    assert result["replica_scaling_simulated"] > 0.5 and result["seed"] == 3
