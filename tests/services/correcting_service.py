"""A service whose target writes what a test wants: every part is real, the sampler's decisions apart.

>>> with correcting(serving_parts, lambda sentence: sentence.replace("go", "goes")) as service: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forced_sampler import ForcedSampler
from letter_encoder import LetterEncoder
from service_parts import KV_SLOTS, MODEL, Service, make_keys, started
from tiny_target import Free

from ragspec.config import EngineConfig, load_settings
from ragspec.core import Request
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever
from ragspec.verification.sampling import Sampler
from services.backend import ServiceBackend
from services.settings import ServiceConfig


class Writing:
    """A sampler factory: each request's output is what `rewrite` makes of its first source."""

    def __init__(self, target: Target, rewrite: Callable[[str], str]) -> None:
        self._target, self.rewrite = target, rewrite

    def __call__(self, request: Request, seed: int, choice: int) -> Sampler:
        text = self.rewrite(request.sources[0].text)
        ids = self._target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ForcedSampler([*ids, self._target.eos_ids[0]])


@contextmanager
def correcting(
    folder: Path, index: Path, target: Target, rewrite: Callable[[str], str], **overrides: Any
) -> Iterator[Service]:
    """Open under /v2, unless the settings say otherwise."""
    target.reset_pool(KV_SLOTS)
    planner = Planner([CopyDrafter(target.tokenizer, target.eos_ids)], Free(), 16)
    engine = Engine(target, planner, Admission(target, "tiny", Writing(target, rewrite)), EngineConfig())
    with corrected_by(engine, folder, index, **overrides) as running:
        yield running


@contextmanager
def corrected_by(engine: Engine, folder: Path, index: Path, **overrides: Any) -> Iterator[Service]:
    """As `correcting`; the engine's own target writes."""
    keys = make_keys(folder / "keys.json")
    settings: dict[str, Any] = {
        "service.model": MODEL,
        "service.port": 0,
        "service.keys_file": str(keys.path),
        "service.data_dir": str(folder / "data"),
        "service.languagetool_open": True,
        "service.grammar.timeout_s": 600.0,  # the first request compiles kernels, beside whatever else the machine does
        "retriever.index_dir": str(index),
        **overrides,
    }
    config = load_settings(ServiceConfig, **settings)
    encoder = LetterEncoder()
    retriever = Retriever(encoder, Store.open(index, encoder.identity), config.retriever)
    with (
        ServiceBackend(engine, engine.target.tokenizer, retriever, config, engine.close) as backend,
        started(config, backend, keys) as running,
    ):
        yield running
