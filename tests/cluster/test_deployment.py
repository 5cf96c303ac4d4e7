"""A deployment whose engines, ranks and shards are killed and stopped: Ray restarts them, and every stream and query goes on."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray.util.placement_group import placement_group_table
from stand_ins import Heard, until
from tiny_target import SENTENCES, save_model

import ragspec
from ragspec.cluster import launch, registry
from ragspec.cluster.deployment import Deployment
from ragspec.cluster.launch import check_here, check_nodes
from ragspec.cluster.registry import NAMESPACE, ReplicaStatus, actors_of, teardown
from ragspec.cluster.routing.router import Router
from ragspec.cluster.topology import DeploymentSpec, Topology
from ragspec.config import EngineConfig, PipelineConfig, RetrieverConfig, TargetConfig
from ragspec.core import Document, FinishReason, Request, SamplingParams
from ragspec.engine.client import completion_of
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import ConfigError, EngineError, InputError, ModelError
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Retriever, build_index

pytestmark = pytest.mark.ray

BOUND_S = 600.0
OTHER_VERSION = f"0.0.9 ({'0' * 12})"
PARAMS = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=120, ignore_eos=True, logprobs=1)
ENGINES = Topology(num_replicas=2, num_shards=0, num_encoders=0, cpus_per_rank=0.1)
ALL = ENGINES.model_copy(update={"tensor_parallel_size": 2, "num_shards": 1, "shard_replicas": 2, "num_encoders": 1})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    folder = tmp_path_factory.mktemp("deployment")
    target = TargetConfig(model=str(save_model("llama", folder / "model")))
    engine = EngineConfig(num_threads=1, max_kv_tokens=4096)
    return PipelineConfig(target=target, engine=engine, retriever=RetrieverConfig(index_dir=str(folder / "index")))


@pytest.fixture(scope="module")
def indexed(config: PipelineConfig) -> PipelineConfig:
    """The configuration once its index is there."""
    documents = [Document(f"d{i}", f"{text} It was in {1800 + i}.") for i, text in enumerate(SENTENCES)]
    build_index(documents, Path(config.retriever.index_dir), Encoder.load(config.encoder))
    return config


@pytest.fixture(scope="module")
def plain(config: PipelineConfig) -> Iterator[Engine]:
    """One engine of one rank in this process."""
    with load_engine(config.target, config.engine, config.drafting) as engine:
        yield engine


@pytest.fixture(scope="module")
def deployment(local_ray: None, config: PipelineConfig, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    topology = getattr(request, "param", ENGINES)
    settings = request.getfixturevalue("indexed") if topology.num_shards else config
    with Deployment.up(topology, settings, name="many") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def router(deployment: Deployment) -> Iterator[Router]:
    with deployment.engine() as router:
        yield router


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def live(deployment: Deployment) -> dict[str, ReplicaStatus]:
    """Waits until all replicas are."""
    until(lambda: deployment.status().is_complete, "a complete deployment")
    return {replica.name: replica for replica in deployment.status().replicas}


def streams(name: str, count: int = 6) -> list[tuple[Request, Heard]]:
    return [(Request(f"{name}{i}", (5 + i, 6, 7), PARAMS), Heard()) for i in range(count)]


def busiest(deployment: Deployment, asked: Sequence[tuple[Request, Heard]]) -> str:
    """The engine with the most requests, once three have a token."""
    until(lambda: sum(heard.began.is_set() for _, heard in asked) >= 3, "running requests")
    engines = [replica for replica in deployment.status().replicas if replica.kind == "engine"]
    return max(engines, key=lambda replica: replica.load or 0).name


def assert_undisturbed(plain: Engine, asked: Sequence[tuple[Request, Heard]]) -> None:
    for request, heard in asked:
        one = completion_of(heard.wait(BOUND_S))
        (truth,) = plain.generate([replace(request, params=replace(PARAMS, seed=one.stats.seed))])
        assert (one.token_ids, one.text, one.logprobs) == (truth.token_ids, truth.text, truth.logprobs)
        assert one.finish_reason is FinishReason.LENGTH


@pytest.mark.slow
def test_streams_go_on_when_an_engine_is_killed(deployment: Deployment, router: Router, plain: Engine) -> None:
    """A stream is lost, begins again or changes; a wrong request or a second deployment of the name costs an engine."""
    with pytest.raises(InputError, match="the prompt is empty"):
        router.generate([Request("empty", (), PARAMS)])
    with pytest.raises(EngineError, match="there is a deployment 'many'"):
        Deployment.up(ENGINES, deployment.config, name="many")
    assert Deployment.find("many").config == deployment.config
    kill_the_busiest(deployment, router, plain, 0, signal.SIGKILL)


def kill_the_busiest(
    deployment: Deployment, router: Router, plain: Engine, rank: int, number: int
) -> tuple[dict[str, ReplicaStatus], ReplicaStatus]:
    """Send a signal to a rank under six streams, which must not change. Gives all replicas before it, and the victim."""
    before = live(deployment)
    until(lambda: router.num_connected == 2, "two connections")
    asked = streams(f"{rank}-{number}-")
    for request, heard in asked:
        router.submit(request, heard)
    victim = before[busiest(deployment, asked)]
    os.kill(victim.pids[rank], number)
    assert_undisturbed(plain, asked)
    assert any(delta.stats and delta.stats.num_replays for _, heard in asked for delta in heard.deltas)
    return before, victim


@pytest.mark.slow
@pytest.mark.parametrize("deployment", [ALL], indirect=True)
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_group_of_a_lost_rank_is_rebuilt(
    deployment: Deployment, router: Router, plain: Engine, rank: int, number: int
) -> None:
    """A new rank beside old ones; a stopped process that stays; a group that restarts for another's loss."""
    before, victim = kill_the_busiest(deployment, router, plain, rank, number)
    assert len(victim.pids) == 2
    until(lambda: all(map(is_gone, victim.pids)), "the end of all old ranks")
    after = live(deployment)
    assert after[victim.name].epoch > victim.epoch and not set(victim.pids) & set(after[victim.name].pids)
    others = [name for name in before if name != victim.name]
    assert [before[name].pids for name in others] == [after[name].pids for name in others]
    until(lambda: router.num_connected == 2, "the router's connection to the new group")


@pytest.mark.slow
@pytest.mark.parametrize("deployment", [ALL], indirect=True)
@pytest.mark.parametrize(
    ("kind", "number"), [("shard", signal.SIGKILL), ("shard", signal.SIGSTOP), ("encoder", signal.SIGKILL)]
)
def test_lookups_go_on_and_the_actor_is_restarted(
    deployment: Deployment, config: PipelineConfig, kind: str, number: int
) -> None:
    """A lookup fails, finds less, or waits for ever."""
    queries = ["The river", "What was in 1803?"]
    truth = Retriever.from_config(config.retriever, config.encoder).retrieve(queries, 3).passages
    before = live(deployment)
    with contextlib.closing(deployment.retriever()) as retriever:
        assert retriever.retrieve(queries, 3).passages == truth
        victim = before[f"{kind}-0"]
        os.kill(victim.pids[0], number)
        for _ in range(4):
            assert retriever.retrieve(queries, 3).passages == truth
        until(lambda: is_gone(victim.pids[0]), "the end of the old process")
        assert live(deployment)[victim.name].epoch > victim.epoch


@pytest.mark.slow
@pytest.mark.parametrize("deployment", [ALL], indirect=True)
def test_a_dead_record_is_restarted_with_its_specification(deployment: Deployment) -> None:
    """Nobody finds a deployment whose engines all live."""
    record = ray.get_actor("many/record", namespace=NAMESPACE)
    ray.kill(record, no_restart=False)

    def is_found() -> bool:
        with contextlib.suppress(EngineError):
            return Deployment.find("many").topology == deployment.topology
        return False

    until(is_found, "the record")


def test_nodes_are_checked_before_anything_starts(local_ray: None, tmp_path: Path, config: PipelineConfig) -> None:
    """Every engine fails by itself, after minutes, with an error of the loader's that names no node."""
    missing = config.model_copy(update={"target": TargetConfig(model=str(tmp_path / "missing"))})
    with pytest.raises(ConfigError, match=rf"node \S+ \(\w+\) has no target {tmp_path}/missing"):
        Deployment.up(ENGINES, missing, name="lacking")
    assert not actors_of("lacking")


def test_other_versions_are_refused(local_ray: None, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of one version are read as those of another, and fail somewhere inside."""
    other = check_here(())._replace(version=OTHER_VERSION)
    actual = launch.check_here
    monkeypatch.setattr(launch, "check_here", lambda paths: actual(paths) if paths else other)
    spec = DeploymentSpec(ENGINES, config)
    with pytest.raises(EngineError, match=r"versions differ here and on node .*: ragspec 0\.0\.9 \(0{12}\)"):
        check_nodes(spec)


def test_a_deployment_of_another_version_is_named_with_its_restart(
    local_ray: None, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of the next release failed with an AttributeError, or hung, at a deployment that was still of this."""

    class EarlierRecord:  # as records were before they told their version; Ray's worker cannot import this module
        def __init__(self, spec: DeploymentSpec) -> None:
            self._spec = spec

        def state(self) -> tuple[DeploymentSpec, bool]:
            return self._spec, True

    here, spec, remote = registry.own_version(), DeploymentSpec(ENGINES, config), cast(Any, ray.remote)
    earlier = remote(EarlierRecord).options(name="older/record", namespace=NAMESPACE, num_cpus=0).remote(spec)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "own_version", lambda: OTHER_VERSION)
        records = {"older": earlier, "other": registry.start_record("other", spec, None)}
    for name, there in (("older", ragspec.__version__), ("other", OTHER_VERSION)):
        for ask in (Deployment.find, registry.status_of):
            with pytest.raises(EngineError) as refused:
                ask(name)
            restart = f"`ragspec cluster down --name {name}` and `ragspec cluster up --name {name}`"
            versions = f"runs ragspec {there}, and this is ragspec {here}"
            assert str(refused.value) == f"the deployment {name!r} {versions}: restart it with {restart}"
        teardown(name)
    assert len(records) == 2, "Ray ends an actor with its last handle"


@pytest.mark.slow
def test_a_target_that_cannot_be_loaded_is_told_and_leaves_nothing(
    local_ray: None, indexed: PipelineConfig, tmp_path: Path
) -> None:
    """`up` waits for ever for an engine that dies again and again, or leaves processes behind."""
    (tmp_path / "broken").mkdir()
    broken = indexed.model_copy(update={"target": TargetConfig(model=str(tmp_path / "broken"))})
    for ranks in (1, 2):
        topology = ALL.model_copy(update={"tensor_parallel_size": ranks, "num_replicas": 1})
        with pytest.raises(ModelError, match="broken"):
            Deployment.up(topology, broken, name="broken")
        assert not actors_of("broken")


@pytest.mark.slow
def test_nothing_is_left_after_down_even_of_stopped_processes(local_ray: None, indexed: PipelineConfig) -> None:
    """Actors, placement groups or processes of a deployment that is gone."""
    topology = ALL.model_copy(update={"num_replicas": 1, "shard_replicas": 1, "num_encoders": 0})
    deployment = Deployment.up(topology, indexed, name="ended", detached=True)
    pids = [pid for replica in live(deployment).values() for pid in replica.pids]
    assert len(pids) == 3
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[-1], signal.SIGSTOP)
    teardown("ended")
    assert not actors_of("ended")
    until(lambda: all(map(is_gone, pids)), "the end of all processes")
    groups = [group for group in placement_group_table().values() if "/ended/" in group["name"]]
    assert all(group["state"] == "REMOVED" for group in groups)
    teardown("ended")
    with pytest.raises(EngineError, match="there is no deployment 'ended'"):
        Deployment.find("ended")
