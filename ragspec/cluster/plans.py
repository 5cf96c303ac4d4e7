"""From a topology and a pipeline's configuration to what a supervisor starts."""

from __future__ import annotations

from pathlib import Path

from ragspec.cluster.groups import Wanted
from ragspec.cluster.keepers import Timing
from ragspec.cluster.shell import Role
from ragspec.cluster.spares import Warmth
from ragspec.cluster.supervisor import Plan
from ragspec.cluster.topology import Note, Topology
from ragspec.config import PipelineConfig
from ragspec.errors import ConfigError

_ENGINES, _SHARDS, _ENCODERS = "ragspec.cluster.engines", "ragspec.cluster.shards", "ragspec.cluster.encoding"


def make_plan(name: str, note: Note, num_nodes: int) -> Plan:
    """Of a configuration with full paths. Raises: ConfigError if there are shards, but no index."""
    topology, config = note.topology, note.config
    if topology.num_shards and not config.retriever.index_dir:
        raise ConfigError("no index: name its folder as retriever.index_dir, or ask for 0 shards")
    paths = _paths(topology, config)
    modules = (
        [_ENGINES] * bool(topology.replicas)
        + [_SHARDS] * bool(topology.num_shards)
        + [_ENCODERS] * bool(topology.num_encoders)
    )
    folders = tuple(path for path, what in paths if what in ("target", "drafting head", "encoder"))
    return Plan(
        name,
        (*_engines(topology, config, num_nodes), *_shards(topology), *_encoders(topology, config)),
        Timing(topology.heartbeat_s, topology.hang_s, topology.start_timeout_s),
        Warmth(topology.spares_per_node, tuple(modules), folders),
        paths,
        note,
    )


def with_full_paths(config: PipelineConfig) -> PipelineConfig:
    """Folders by their full names: a process elsewhere has another current one."""
    sections = {
        "target": config.target.model_copy(update={"model": _full(config.target.model)}),
        "encoder": config.encoder.model_copy(update={"model": _full(config.encoder.model)}),
        "retriever": config.retriever.model_copy(
            update={
                "index_dir": str(Path(config.retriever.index_dir).resolve()) if config.retriever.index_dir else "",
                "reranker": _full(config.retriever.reranker),
            }
        ),
        "drafting": config.drafting.model_copy(
            update={"eagle": config.drafting.eagle.model_copy(update={"path": _full(config.drafting.eagle.path)})}
        ),
    }
    return config.model_copy(update=sections)


def _full(model: str) -> str:
    """Of a folder, there is one or it looks like one; a name that a hub knows stays."""
    return str(Path(model).resolve()) if model and (model.startswith((".", "/")) or Path(model).exists()) else model


def _paths(topology: Topology, config: PipelineConfig) -> tuple[tuple[str, str], ...]:
    found = []
    if topology.replicas:
        found += [(config.target.model, "target"), (config.drafting.eagle.path, "drafting head")]
    if topology.num_shards:
        found += [(config.retriever.index_dir, "index"), (config.retriever.reranker, "reranker")]
    if topology.num_encoders:
        found.append((config.encoder.model, "encoder"))
    return tuple((path, what) for path, what in found if path.startswith("/"))


def _engines(topology: Topology, config: PipelineConfig, num_nodes: int) -> list[Wanted]:
    num_beside = -(-topology.replicas // max(1, num_nodes))
    return [
        Wanted(
            f"engine-{number}",
            "engine",
            Role("engine", f"{_ENGINES}:load_host", (config, num_beside)),
            Role("engine", f"{_ENGINES}:load_rank", (config, num_beside)),
            topology.tensor_parallel,
            topology.cpus_per_rank,
            topology.gpus_per_rank,
            topology.rank_timeout_s,
        )
        for number in range(topology.replicas)
    ]


def _shards(topology: Topology) -> list[Wanted]:
    role = Role("shard", f"{_SHARDS}:ShardActor", serial=True)
    number = topology.num_shards * topology.shard_replicas
    return [Wanted(f"shard-{i}", "shard", role, cpus=topology.cpus_per_shard) for i in range(number)]


def _encoders(topology: Topology, config: PipelineConfig) -> list[Wanted]:
    role = Role("encoder", f"{_ENCODERS}:EncoderActor", (config.encoder,), serial=True)
    return [
        Wanted(f"encoder-{i}", "encoder", role, cpus=topology.cpus_per_encoder) for i in range(topology.num_encoders)
    ]
