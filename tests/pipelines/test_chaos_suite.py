"""The suite `chaos`: signals reach whom they are meant for, recovery is what is measured, and what is told is judged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_target import SENTENCES, save_model

from pipelines.benchmarks import soak
from pipelines.benchmarks.chaos.batch_job import BatchJob, driver_kills, judge_output, written_rows
from pipelines.benchmarks.chaos.check import StreamLog, Verdict, judge_rows, judge_streams
from pipelines.benchmarks.chaos.faults import (
    KINDS,
    SIGNALS,
    Fault,
    FaultInjector,
    InjectedFault,
    all_live,
    answered_s,
    faults,
    recovered,
)
from pipelines.benchmarks.chaos.load import Probe, StreamLoad
from pipelines.benchmarks.chaos.oracle import ChaosWorkload, ExpectedResults, comparable_row, expected_results
from pipelines.benchmarks.chaos.run import topology_for, undisturbed_s
from pipelines.benchmarks.chaos.suite import SUITE
from ragspec.cluster.processes import Process
from ragspec.cluster.registry import ReplicaStatus, Status
from ragspec.config import PipelineConfig, RetrieverConfig, TargetConfig
from ragspec.core import Delta, Document, FinishReason
from ragspec.engine.loading import load_engine
from ragspec.errors import EngineError, RetrievalError
from ragspec.evaluation.datasets import Question as BenchmarkQuestion
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Retriever, build_index

ROOT = Path(__file__).resolve().parents[2]
NUM_STREAMS, NUM_ROWS = 6, 12


def test_engines_have_ranks_only_where_they_can_share_the_target_s_heads(tmp_path: Path) -> None:
    """The default target has nine heads, three of keys and values: no engine of the suite ever started with it."""
    assert topology_for(TargetConfig()).tensor_parallel == 1
    assert topology_for(TargetConfig(model=str(save_model("llama", tmp_path / "model")))).tensor_parallel == 2


def test_a_fault_s_marks_have_one_name_each_in_the_results() -> None:
    """A mark that one suite calls duplicated and another doubled: a reader who looks for one of them finds nothing wrong."""
    marks = set(Verdict._fields)
    assert marks == {"lost", "doubled", "changed"} <= set(soak.BAD)
    names = {metric.name for metric in SUITE.metrics}
    assert marks | {f"driver_{mark}" for mark in marks} <= names


# -- faults ------------------------------------------------------------------------------------------------------------


def test_every_part_is_hit_in_every_way() -> None:
    """A kind of fault that is listed and never comes."""
    counts = Counter(faults(20, seed=1))
    assert counts == {Fault(kind, number): 2 for kind in KINDS for number in (signal.SIGKILL, signal.SIGSTOP)}
    assert {fault.kind for fault in faults(6, seed=1)} == set(KINDS)
    assert faults(20, seed=1) == faults(20, seed=1) != faults(20, seed=2)
    others = [kind for kind in KINDS if kind != "rank"]
    assert Counter(faults(16, 1, others)) == {Fault(kind, number): 2 for kind in others for number in SIGNALS}


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def replica(name: str, epoch: float, state: Any = "live", pids: tuple[int, ...] = ()) -> ReplicaStatus:
    return ReplicaStatus(name, name.rpartition("-")[0], state, epoch, "n", pids, "", None, "")


def scene(sleepers: list[subprocess.Popen[bytes]]) -> FaultInjector:
    first, second, other = (process.pid for process in sleepers)
    replicas = replica("engine-0", 3.0, pids=(first, second)), replica("shard-0", 1.0, "lost", (other,))
    nothing: Any = None
    return FaultInjector(nothing, lambda: Status("d", ("n",), replicas), random.Random(0), [], 2)


def test_a_rank_is_hit_and_no_other_process(sleepers: list[subprocess.Popen[bytes]]) -> None:
    """The group's first process hit in place of another, a shard hit, a stop that kills."""
    struck = scene(sleepers).inject(Fault("rank", signal.SIGSTOP))
    assert (struck.victim, struck.replicas) == ("engine-0", {"engine-0": 3})
    deadline = time.monotonic() + 5.0
    while Process.of(sleepers[1].pid).state() != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [Process.of(process.pid).state() == "T" for process in sleepers] == [False, True, False]
    scene(sleepers).inject(Fault("engine", signal.SIGKILL))
    assert sleepers[0].wait(5.0) == -signal.SIGKILL
    assert [process.poll() for process in sleepers[1:]] == [None, None]


@pytest.mark.parametrize("kind", ["shard", "encoder"])
def test_what_is_not_there_is_not_hit(kind: str, sleepers: list[subprocess.Popen[bytes]]) -> None:
    """A fault counted that hit nobody; a replica hit while it starts, so that nothing could be lost with it."""
    with pytest.raises(EngineError, match=f"there is no {kind}"):
        scene(sleepers).inject(Fault(kind, signal.SIGKILL))


@pytest.mark.parametrize(
    ("replicas", "live"),
    [
        ([replica("a-0", 2), replica("b-0", 1)], True),
        ([replica("a-0", 1), replica("b-0", 1)], False),
        ([replica("a-0", 2, "starting"), replica("b-0", 1)], False),
        ([replica("a-0", 2), replica("b-0", 1, "lost")], False),
        ([replica("b-0", 1)], False),
    ],
)
def test_live_again_is_everybody_and_the_victim_anew(replicas: list[ReplicaStatus], live: bool) -> None:
    """A fault that nobody has noticed yet taken for one that was recovered from."""
    assert all_live(Status("d", ("n",), tuple(replicas)), {"a-0": 1.0}) is live


def stream(begin_s: float, *times_s: float, ended: bool = True) -> StreamLog:
    deltas = [Delta("a", 0, (1,), "x") for _ in times_s]
    if ended:
        deltas[-1] = replace(deltas[-1], finish_reason=FinishReason.STOP)
    return StreamLog((), deltas, list(times_s), begin_s)


def struck_at(moment_s: float) -> InjectedFault:
    return InjectedFault(Fault("engine", signal.SIGKILL), "engine-0", moment_s, {"engine-0": 1})


def test_recovery_is_the_slowest_stream_or_the_first_right_lookup() -> None:
    """The fastest stream, or a lookup that began before the fault, taken for the recovery."""
    moment = time.monotonic() - 10.0
    streams = [stream(moment - 1, moment + 0.5, moment + 8), stream(moment - 1, moment - 0.5, moment + 3)]
    probes = [Probe(moment - 1, moment + 1, True), Probe(moment + 1, moment + 2, None)]
    probes.append(Probe(moment + 2, moment + 4, True))
    row = recovered(struck_at(moment), lambda: (streams, probes), lambda _: True)
    assert (row["streams_s"], row["retrieval_s"], row["recovery_s"]) == pytest.approx((3.0, 4.0, 4.0))
    assert row["recovered"] is True and row["num_streams_open"] == 2 and row["live_again_s"] >= 10.0


@pytest.mark.parametrize(
    ("streams", "right", "live"),
    [([stream(0.0, 0.5, ended=False)], True, True), ([], False, True), ([], None, True), ([], True, False)],
)
def test_what_never_goes_on_is_not_recovered(streams: list[StreamLog], right: bool | None, live: bool) -> None:
    """A run that waits for ever, or a fault without recovery that counts as the fastest of all."""
    moment = time.monotonic()
    moved = [replace(s, begin_s=moment - 1, times_s=[moment - 0.5]) for s in streams]
    probes = [Probe(moment + 0.01, moment + 0.02, right)]
    row = recovered(struck_at(moment), lambda: (moved, probes), lambda _: live, most_s=0.3)
    assert row["recovered"] is False
    assert max(row["recovery_s"], row["live_again_s"]) >= 0.3


def test_the_wait_without_a_fault_is_that_of_the_slowest_open_stream() -> None:
    """A wait of streams that had ended; a stream that never goes on that is waited for without end."""
    now = time.monotonic()
    running, slow, ended = stream(now - 1, now + 0.2), stream(now - 1, now + 0.4), stream(now - 2, now - 1)
    assert undisturbed_s(lambda: [running, slow, ended]) == pytest.approx(0.4, abs=0.1)
    assert undisturbed_s(lambda: [ended]) is None
    stuck = stream(now - 1, now - 0.5, ended=False)
    assert undisturbed_s(lambda: [stuck], most_s=0.3) == 0.3


def test_a_wrong_lookup_is_no_answer() -> None:
    """The first answer taken, whatever it says."""
    probes = [Probe(1.0, 2.0, False), Probe(3.0, 4.0, None), Probe(5.0, 6.0, True)]
    assert answered_s(probes, 1.0) == 5.0
    assert answered_s(probes, 5.5) is None


# -- load and oracle ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    """An index of a few sentences, and a random target with room for three passages."""
    folder = tmp_path_factory.mktemp("chaos")
    model = save_model("llama", folder / "model", max_position_embeddings=2048)
    documents = [Document(f"d{i}", f"{text} It was in {1800 + i}.") for i, text in enumerate(SENTENCES * 3)]
    config = PipelineConfig(
        target=TargetConfig(model=str(model)), retriever=RetrieverConfig(index_dir=str(folder / "index"))
    )
    build_index(documents, folder / "index", Encoder.load(config.encoder))
    engine = config.engine.model_copy(update={"max_kv_tokens": 8192, "num_threads": 1})
    return config.model_copy(update={"engine": engine})


@pytest.fixture(scope="module")
def work() -> ChaosWorkload:
    listed = [BenchmarkQuestion(f"q{i}", f"What does the text say about {1800 + i}?", ("",), "") for i in range(20)]
    return ChaosWorkload.of(listed, NUM_STREAMS, NUM_ROWS, max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def expected(work: ChaosWorkload, config: PipelineConfig) -> ExpectedResults:
    return expected_results(work, config)


class Failing:
    """A retriever that fails for one question."""

    def __init__(self, retriever: Retriever, text: str) -> None:
        self._retriever, self._text = retriever, text

    def retrieve(self, queries: list[str], *rest: Any) -> Any:
        if self._text in queries:
            raise RetrievalError("a shard is lost")
        return self._retriever.retrieve(queries, *rest)


@pytest.mark.slow
def test_streams_of_an_undisturbed_engine_are_as_expected(
    config: PipelineConfig, work: ChaosWorkload, expected: ExpectedResults
) -> None:
    """An oracle that no real run can meet; rounds that are not all asked; an error that nobody counts."""
    with load_engine(config.target, config.engine, config.drafting) as engine:
        retriever: Any = Retriever.from_config(config.retriever, config.encoder)
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
        load = StreamLoad(retriever, engine, prompts, work.streams, 3, 60.0)
        with load:
            pass
        failing: Any = Failing(retriever, work.streams[2].text)
        broken = StreamLoad(failing, engine, prompts, work.streams, 3, 60.0)
        with broken:
            pass
    wanted = {f"0/{name}": own for name, own in expected.streams.items()}
    assert len(load.heard) == NUM_STREAMS and all(stream.ended for stream in load.streams)
    assert judge_streams(wanted, load.heard) == Verdict()
    assert judge_streams(wanted, broken.heard) == Verdict(lost=("0/s2",))
    assert len({own.completion.token_ids for own in wanted.values()}) > 1, "streams must differ, or any would do"


def test_the_essence_of_a_row_is_what_it_says_and_not_how_long_it_took() -> None:
    """Rows that are always equal, or never."""
    row = {"id": "a", "answer": "x", "logprobs": [{"token_id": 5, "logprob": -0.5}], "stats": {"decode_s": 1.0}}
    assert comparable_row(row) == comparable_row(row | {"stats": {"decode_s": 2.0}})
    assert comparable_row(row) != comparable_row(row | {"logprobs": [{"token_id": 6, "logprob": -0.5}]})
    assert comparable_row(row) != comparable_row(row | {"answer": "y"})


@pytest.fixture
def job(work: ChaosWorkload, config: PipelineConfig, tmp_path: Path) -> BatchJob:
    """The real job, in a process of its own, without a cluster."""
    rows, settings = tmp_path / "rows.jsonl", tmp_path / "config.yaml"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in work.rows))
    settings.write_text(json.dumps(config.model_dump(mode="json")))
    return BatchJob(rows, ("--config", str(settings), "--seed", str(work.seed)), dict(os.environ))


@pytest.mark.slow
def test_a_killed_driver_leaves_every_row_once(job: BatchJob, expected: ExpectedResults, tmp_path: Path) -> None:
    """An oracle of rows that the real job never meets; kills that come too late to be any."""
    result = driver_kills(job, tmp_path / "out", expected.rows, 2, random.Random(0), lambda *_: None)
    assert (result["driver_lost"], result["driver_doubled"], result["driver_changed"]) == (0, 0, 0)
    assert result["driver_kills"] >= 1 and result["driver_exit_codes"][-1] == 0
    assert judge_output(expected.rows, tmp_path / "out") == Verdict()
    found = [(name, comparable_row(record)) for name, record in written_rows(tmp_path / "out")]
    assert judge_rows(expected.rows, found[1:]).lost and judge_rows(expected.rows, [*found, found[0]]).doubled


@pytest.mark.slow
@pytest.mark.ray
def test_the_whole_suite_runs(config: PipelineConfig, tmp_path: Path, shared_data: Path) -> None:
    """A fault that no deployment recovers from; a part that no run ever reaches; processes left behind."""
    out = tmp_path / "chaos.json"
    options = ["--suite", "chaos", "--quick", "--target", config.target.model, "--data", str(shared_data)]
    command = [sys.executable, "-m", "pipelines.benchmark", *options, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text())
    assert (result["faults"], result["recovered"]) == (6, 6), result["fault_rows"]
    assert (result["lost"], result["doubled"], result["changed"]) == (0, 0, 0), result
    assert (result["driver_lost"], result["driver_doubled"], result["driver_changed"]) == (0, 0, 0)
