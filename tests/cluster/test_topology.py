"""Shapes that cannot be are refused with the sum that shows why; one file holds the pipeline and its deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ragspec.cluster.topology import ClusterConfig, NodeResources, Topology, check_fits
from ragspec.config import load_settings
from ragspec.errors import ConfigError


def nodes(*rooms: tuple[float, float]) -> list[NodeResources]:
    return [NodeResources(f"node-{number}", cpus, gpus) for number, (cpus, gpus) in enumerate(rooms)]


def refusal(topology: Topology, *rooms: tuple[float, float]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_fits(topology, nodes(*rooms))
    return str(caught.value)


def test_the_refusal_shows_every_sum_that_does_not_come_out() -> None:
    """`up` waits for ever for GPUs that are not there, or says only that resources are short."""
    topology = Topology(num_replicas=2, tensor_parallel_size=4, gpus_per_rank=1.0)
    assert refusal(topology, (64.0, 2.0), (64.0, 2.0)) == (
        "the topology does not fit: 2 replicas x 4 ranks x 1 GPU = 8 GPUs, the cluster has 4; "
        "the largest node has 2, and a group needs 4 on one node"
    )


def test_groups_that_fit_the_sum_but_no_node_are_refused() -> None:
    """3 nodes of 6 GPUs have 18, but no more than 3 groups of 4: the fourth would hang."""
    topology = Topology(num_replicas=4, tensor_parallel_size=4, gpus_per_rank=1.0)
    message = refusal(topology, (64.0, 6.0), (64.0, 6.0), (64.0, 6.0))
    assert "4 replicas need 4 GPUs and 2 CPUs on one node each, and only 3 find that" in message


def test_the_shards_and_encoders_are_in_the_sum() -> None:
    """A topology whose engines just fit leaves no room for the index."""
    topology = Topology(num_replicas=2, cpus_per_rank=1.0, num_shards=2, shard_replicas=2)
    message = refusal(topology, (2.0, 0.0))
    assert "2 replicas x 1 ranks x 1 CPU + 4 shards x 0.1 + 1 encoders x 0.1 = 2.5 CPUs, the cluster has 2" in message


@given(
    st.integers(1, 4), st.sampled_from([1, 2, 4]), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=4)
)
def test_what_is_accepted_can_be_packed(replicas: int, ranks: Any, rooms: list[tuple[int, int]]) -> None:
    """Sums alone accept shapes that no packing of whole groups fulfils."""
    topology = Topology(
        num_replicas=replicas,
        tensor_parallel_size=ranks,
        cpus_per_rank=0.5,
        gpus_per_rank=1.0,
        num_shards=0,
        num_encoders=0,
    )
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
    assert (settings.topology.num_replicas, settings.topology.num_shards, settings.retriever.index_dir) == (
        4,
        3,
        "here",
    )
    with pytest.raises(ConfigError, match=r"topology\.num_replicas"):
        load_settings(ClusterConfig, path, **{"topology.num_replicas": "many"})
