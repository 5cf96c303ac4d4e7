"""What every test of a service may use; `service_parts` has the parts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from correcting_service import Correcting, correcting_by
from letter_encoder import LetterEncoder
from service_parts import CONTEXT, DOCUMENTS, HASTY, KV_SLOTS, Service, Serving, save_parts, served, service_engine
from tiny_target import save_model

from ragspec.config import TargetConfig
from ragspec.engine.target import Target
from ragspec.retrieval.retriever import build_index


@pytest.fixture(scope="session")
def letter_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of `DOCUMENTS`; whoever changes it copies it first."""
    folder = tmp_path_factory.mktemp("service") / "index"
    build_index(DOCUMENTS, folder, LetterEncoder())
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("target"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def service_target(model_folder: Path) -> Target:
    """For one engine at a time, whose pool it has."""
    return load_target(model_folder)


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """For services in other processes."""
    return save_parts(tmp_path_factory.mktemp("parts"), model_folder)


def load_target(folder: Path) -> Target:
    return Target.load(TargetConfig(model=str(folder)), num_kv_slots=KV_SLOTS)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, letter_index: Path, model_folder: Path) -> Serving:
    """Starts services, each with a target of its own."""

    @contextmanager
    def start(index: Path = letter_index, engine: dict[str, Any] | None = None, **overrides: Any) -> Iterator[Service]:
        running = service_engine(load_target(model_folder), **engine or {})
        with served(running, tmp_path_factory.mktemp("serving"), index, **overrides) as service:
            yield service

    return start


@pytest.fixture(scope="module")
def correcting(tmp_path_factory: pytest.TempPathFactory, letter_index: Path, service_target: Target) -> Correcting:
    """Starts services whose target writes what a function makes of each sentence."""

    def start(rewrite: Callable[[str], str], **overrides: Any) -> AbstractContextManager[Service]:
        folder = tmp_path_factory.mktemp("correcting")
        return correcting_by(rewrite, folder, letter_index, service_target, **overrides)

    return start


@pytest.fixture(scope="module")
def service(serving: Serving) -> Iterator[Service]:
    """The one that a module's tests share."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def hasty(serving: Serving) -> Iterator[Service]:
    """With little patience, and small bodies; also shared by a module's tests."""
    with serving(**HASTY) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    """With the trusted key."""
    with service.client() as open_client:
        yield open_client


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with service.openai() as client:
        yield client
