"""The service in front of a deployment: the same app, the same texts, engines and index elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_parts import MODEL, Service, make_keys, started

from ragspec.cluster.deployment import Deployment
from ragspec.cluster.topology import Topology
from ragspec.config import PipelineConfig, load_settings
from ragspec.errors import EngineError
from services.backend import clustered, settled_config
from services.settings import ServiceConfig


def test_the_deployment_says_what_is_served_and_the_caller_how() -> None:
    """A service in front of a cluster tokenizes for another target than the engines have."""
    there = {"retriever.index_dir": "there", "engine.max_num_seqs": 3, "generation.temperature": 0.5}
    deployed = load_settings(PipelineConfig, **there)
    said = {"service.port": 1, "chat.max_carried": 2, "generation.max_tokens": 7, "prompts.require_support": True}
    given = load_settings(ServiceConfig, **said)
    settled = settled_config(deployed, given)
    assert (settled.service.port, settled.chat.max_carried, settled.prompts.require_support) == (1, 2, True)
    assert settled.target == deployed.target and settled.retriever.index_dir == "there"
    assert settled.engine.max_num_seqs == 3 and settled.index.chunking == PipelineConfig().index.chunking
    assert (settled.generation.max_tokens, settled.generation.temperature) == (7, 0.5)


@pytest.fixture(scope="module")
def fronted(local_ray: None, tmp_path_factory: pytest.TempPathFactory, parts: Path) -> Iterator[Service]:
    """A service in front of a deployment."""
    folder = tmp_path_factory.mktemp("fronted")
    engine = {"engine.max_kv_tokens": 4096, "engine.num_threads": 1}
    paths = {"target.model": str(parts / "model"), "retriever.index_dir": str(parts / "index")}
    deployed = load_settings(PipelineConfig, **engine, **paths)
    keys = make_keys(folder / "keys.json")
    given = {"service.served_model_name": MODEL, "service.port": 0, "service.keys_file": str(keys.path)}
    config = load_settings(ServiceConfig, **given, **{"service.data_dir": str(folder / "data")})
    with (
        Deployment.up(Topology(num_replicas=1, num_shards=1), deployed, name="fronted"),
        clustered("fronted", config) as backend,
        started(config, backend, keys) as service,
    ):
        yield service


@pytest.mark.slow
@pytest.mark.ray
def test_a_question_is_answered_by_engines_elsewhere(fronted: Service) -> None:
    """A service on a cluster that answers without passages, in other words, or not as a stream."""
    messages = [{"role": "user", "content": "What is the password of the mill?"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 16, "seed": 5, "temperature": 1.0}
    with fronted.client(fronted.keys.ann) as client:
        whole = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
        plain = client.post("/v1/chat/completions", json={**asked, "speculation": False}).raise_for_status().json()
        streamed = client.post("/v1/chat/completions", json={**asked, "stream": True}).raise_for_status().text
        vector = client.post("/v1/embeddings", json={"model": MODEL, "input": "a mill"}).raise_for_status().json()
    assert whole["choices"] == plain["choices"] and streamed.rstrip().endswith("[DONE]")
    assert "ann-1" in {passage["document_id"] for passage in whole["ragspec"]["passages"]}
    assert len(vector["data"][0]["embedding"]) == 384
    with fronted.client(fronted.keys.bob) as other:
        found = other.post("/v1/chat/completions", json=asked).raise_for_status().json()["ragspec"]["passages"]
    assert "ann-1" not in {passage["document_id"] for passage in found}


@pytest.mark.slow
@pytest.mark.ray
def test_a_service_is_ready_in_front_of_a_deployment_that_is_there(fronted: Service) -> None:
    """Health that says nothing of the engines elsewhere; or a wait for ever for a name with a typing mistake."""
    with fronted.client("") as client:
        assert client.get("/health/ready").status_code == 200
    with pytest.raises(EngineError, match="nowhere"), clustered("nowhere", fronted.backend.config):
        pass
