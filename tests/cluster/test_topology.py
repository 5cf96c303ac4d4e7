"""Shapes that cannot be are refused with the sum that shows why; one file holds the pipeline and its deployment.

What a caller says of a deployment is what it is, or an error.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ragspec.cluster.deployment import check_agreement
from ragspec.cluster.launch import with_full_paths
from ragspec.cluster.topology import ClusterConfig, NodeResources, Topology, check_fits
from ragspec.config import PipelineConfig, load_settings
from ragspec.errors import ConfigError


def nodes(*rooms: tuple[float, float]) -> list[NodeResources]:
    return [NodeResources(f"node-{number}", cpus, gpus) for number, (cpus, gpus) in enumerate(rooms)]


@pytest.mark.parametrize(
    ("topology", "rooms", "reason"),
    [
        (
            {"num_replicas": 2, "tensor_parallel_size": 4, "gpus_per_rank": 1.0},
            [(64.0, 2.0), (64.0, 2.0)],
            "it needs 8 GPUs, and the cluster has 4; 2 engines need 2 CPUs and 4 GPUs on one node each, and only 0 find that",
        ),
        (
            {"num_replicas": 4, "tensor_parallel_size": 4, "gpus_per_rank": 1.0},
            3 * [(64.0, 6.0)],
            "4 engines need 2 CPUs and 4 GPUs on one node each, and only 3 find that",
        ),
        (
            {"num_replicas": 2, "cpus_per_rank": 1.0, "num_shards": 2, "shard_replicas": 2},
            [(2.0, 0.0)],
            "it needs 2.5 CPUs, and the cluster has 2",
        ),
    ],
)
def test_the_refusal_shows_every_sum_that_does_not_come_out(
    topology: dict[str, Any], rooms: list[tuple[float, float]], reason: str
) -> None:
    """`up` waits for ever for GPUs that are not there, for a node that holds a whole engine, or for the index's share."""
    with pytest.raises(ConfigError) as caught:
        check_fits(Topology(**topology), nodes(*rooms))
    assert str(caught.value) == f"the topology does not fit: {reason}"


@given(
    st.integers(1, 4), st.sampled_from([1, 2, 4]), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4)
)
def test_what_is_accepted_can_be_packed(replicas: int, ranks: Any, rooms: list[tuple[int, int]]) -> None:
    """Sums alone accept shapes that no packing of whole groups fulfils."""
    of_ranks = {"tensor_parallel_size": ranks, "cpus_per_rank": 0.5, "gpus_per_rank": 1.0}
    topology = Topology(num_replicas=replicas, num_shards=0, num_encoders=0, **of_ranks)
    fits = sum(min(int(gpus) // ranks, int(cpus * 2) // ranks) for cpus, gpus in rooms) >= replicas
    try:
        check_fits(topology, nodes(*((float(cpus), float(gpus)) for cpus, gpus in rooms)))
    except ConfigError:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_replicas": 0, "num_shards": 0, "num_encoders": 0},
        {"tensor_parallel_size": 3},
        {"hang_s": 0.1},
        {"gpus_per_rank": 1.5},
        {"replica": 1},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    """A misspelt or senseless setting is taken for its default."""
    with pytest.raises(ValidationError):
        Topology(**wrong)


def test_one_file_has_the_pipeline_and_its_topology(tmp_path: Path) -> None:
    """The topology's section is unknown to the reader of the pipeline's, or the other way round."""
    path = tmp_path / "cluster.yaml"
    path.write_text("topology:\n  num_replicas: 2\n  num_shards: 3\nretriever:\n  index_dir: here\n", encoding="utf-8")
    settings = load_settings(ClusterConfig, path, **{"topology.num_replicas": 4})
    topology = settings.topology
    assert (topology.num_replicas, topology.num_shards, settings.retriever.index_dir) == (4, 3, "here")
    with pytest.raises(ConfigError, match=r"topology\.num_replicas"):
        load_settings(ClusterConfig, path, **{"topology.num_replicas": "many"})


SECTIONS = ("target", "engine.max_kv_tokens", "encoder", "retriever")


def config(**given: Any) -> PipelineConfig:
    return load_settings(PipelineConfig, **{name.replace("__", "."): value for name, value in given.items()})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"retriever__index_dir": "other"}, "retriever.index_dir"),
        ({"target__model": "./other"}, "target.model"),
        ({"retriever__mode": "sparse"}, "retriever.mode"),
        ({"encoder__model": "./other"}, "encoder.model"),
        ({"engine__max_kv_tokens": 65_536}, "engine.max_kv_tokens"),
    ],
)
def test_a_job_that_names_something_else_is_refused(
    given: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--index B --cluster of A was answered from A, without a word and with exit code 0."""
    monkeypatch.chdir(tmp_path)
    deployed = with_full_paths(config(retriever__index_dir="index", target__model="./model"))
    with pytest.raises(ConfigError, match=f"deployment 'ragspec' runs with {named} "):
        check_agreement("ragspec", deployed, config(**given), SECTIONS)
    if named != "target.model":
        check_agreement("ragspec", deployed, config(**given), ("target",))
        check_agreement("ragspec", deployed, config(**given), SECTIONS, own=(named,))


def test_what_is_the_same_or_not_said_is_no_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that a deployment was brought up with is refused, since its folders have full names there."""
    monkeypatch.chdir(tmp_path)
    same = {"retriever__index_dir": "index", "target__model": "./model"}
    deployed = with_full_paths(config(**same, retriever__mode="sparse"))
    others = (
        config(retriever__index_dir=str(tmp_path / "index")),
        config(retriever__device="cpu", engine__max_num_seqs=3),
        load_settings(ClusterConfig, None, **{"topology.num_shards": 2}),  # a section that the deployment lacks
    )
    for said in (config(**same), config(), *others):
        check_agreement("ragspec", deployed, said, SECTIONS)
