"""Whether one service with several models answers by the model that a request names, and as that model alone would."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from letter_encoder import LetterEncoder
from service_parts import CONTEXT, KV_SLOTS, MODEL, Service, make_keys, started
from tiny_target import SENTENCES, save_model

from ragspec.config import load_settings
from ragspec.core import Request, SamplingParams
from ragspec.errors import ConfigError
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever
from services.backend import ServiceBackend, load_models
from services.settings import ServiceConfig

SMALL = "small"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, letter_index: Path, model_folder: Path) -> Iterator[Service]:
    """Two targets that write different texts; the second corrects."""
    folder = tmp_path_factory.mktemp("models")
    other = save_model("qwen3", folder, max_position_embeddings=CONTEXT)
    keys = make_keys(folder / "keys.json")
    overrides: dict[str, Any] = {
        "target.model": str(model_folder),
        "service.models": {SMALL: {"model": str(other)}},
        "engine.max_kv_tokens": 2 * KV_SLOTS,
        "retriever.index_dir": str(letter_index),
        "retriever.abstain_below": 0.0,
        "service.served_model_name": MODEL,
        "service.port": 0,
        "service.keys_file": str(keys.path),
        "service.grammar.model": SMALL,
    }
    config, encoder = load_settings(ServiceConfig, **overrides), LetterEncoder()
    retriever = Retriever(encoder, Store.open(letter_index, encoder.identity), config.retriever)
    with ExitStack() as stack:
        models = load_models(config, stack)
        backend = ServiceBackend(models, retriever, config, stack.pop_all().close)
        with backend, started(config, backend, keys) as running:
            yield running


def complete(client: httpx.Client, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 1.0, "seed": 3}
    return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_requests_beside_each_other_get_the_text_of_their_model_alone(service: Service) -> None:
    """Two engines in one process share threads and memory; the other's steps may change no token."""
    alone = {}
    for name, model in service.backend.models.items():
        for prompt in SENTENCES[:4]:
            ids = tuple(model.prompts.plain_ids([prompt], begins=True)[0])
            params = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
            alone[name, prompt] = model.engine.generate([Request(f"{name}-{prompt}", ids, params)])[0].text
    assert {alone[MODEL, prompt] for prompt in SENTENCES[:4]}.isdisjoint(alone[SMALL, p] for p in SENTENCES[:4])
    with service.client() as client, ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda asked: complete(client, *asked), alone)
        assert dict(zip(alone, found, strict=True)) == alone


def test_every_model_is_listed_and_chosen_by_name(service: Service, client: httpx.Client) -> None:
    """A client that picks from the list got 404, or another model's answer under the name it asked for."""
    listed = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert listed[:2] == [MODEL, SMALL]
    messages = [{"role": "user", "content": "Who lives in the old mill?"}]
    for name in listed[:2]:
        body = {"model": name, "messages": messages, "max_tokens": 4, "retrieval": True}
        reply = client.post("/v1/chat/completions", json=body).json()
        assert reply["model"] == name
        assert reply["system_fingerprint"] == service.backend.models[name].engine.fingerprint
    unknown = client.post("/v1/completions", json={"model": "large", "prompt": "a"})
    assert unknown.status_code == 404
    assert MODEL in unknown.text and SMALL in unknown.text


def test_the_named_model_corrects_unless_a_request_names_another(client: httpx.Client) -> None:
    """Sentences are corrected by the large model that answers questions, at many times the cost."""
    assert client.post("/v1/grammar", json={"text": "She have a old car."}).json()["model"] == SMALL
    named = client.post("/v1/grammar", json={"text": "She have a old car.", "model": MODEL})
    assert named.json()["model"] == MODEL
    assert client.post("/v1/grammar", json={"text": "a", "model": "large"}).status_code == 404


def test_each_model_counts_under_its_name_and_has_its_share_of_the_cache(service: Service) -> None:
    """Dashboards that add two models' tokens; two pools that together take twice the memory that was allowed."""
    with service.client() as client:
        for name in service.backend.models:
            complete(client, name, "The mill")
    rows = [row for row in service.metrics() if row.startswith("vllm:generation_tokens_total")]
    assert len(rows) == 2 and all(float(row.rpartition(" ")[2]) > 0 for row in rows)
    assert service.backend.config.for_model(SMALL).engine.max_kv_tokens == KV_SLOTS
    assert service.backend.config.for_model(MODEL).engine.max_kv_tokens == KV_SLOTS


@pytest.mark.parametrize(
    "overrides",
    [{"service.grammar.model": "none"}, {"service.models": {"tiny": {}}, "service.served_model_name": "tiny"}],
)
def test_names_that_fit_no_model_or_two_are_refused(overrides: dict[str, Any]) -> None:
    """A mistyped name falls back to the target without a word."""
    with pytest.raises(ConfigError, match=r"service\.models"):
        load_settings(ServiceConfig, **overrides)
