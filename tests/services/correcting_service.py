"""A service whose target writes what a test wants: every part is real, the sampler's decisions apart.

>>> with correcting(lambda sentence: sentence.replace("go", "goes")) as service: ...        # the fixture
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from forced_sampler import ForcedSampler
from service_parts import KV_SLOTS, Service, served
from tiny_target import Free

from ragspec.config import EngineConfig
from ragspec.core import Request
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.verification.sampling import Sampler


class Writing:
    """A sampler factory: each request's output is what `rewrite` makes of its first source."""

    def __init__(self, target: Target, rewrite: Callable[[str], str]) -> None:
        self._target, self.rewrite = target, rewrite

    def __call__(self, request: Request, seed: int, choice: int) -> Sampler:
        text = self.rewrite(request.sources[0].text) if request.sources else ""  # the instruction that is read at start
        ids = self._target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ForcedSampler([*ids, self._target.eos_ids[0]])


Correcting = Callable[..., AbstractContextManager[Service]]


@contextmanager
def correcting_by(
    rewrite: Callable[[str], str], folder: Path, index: Path, target: Target, **overrides: Any
) -> Iterator[Service]:
    """Open under /v2, unless the settings say otherwise."""
    target.reset_pool(KV_SLOTS)
    planner = Planner([CopyDrafter(target.tokenizer, target.eos_ids)], Free(), 16)
    engine = Engine(target, planner, Admission(target, "tiny", Writing(target, rewrite)), EngineConfig())
    with corrected_by(engine, folder, index, **overrides) as running:
        yield running


def corrected_by(engine: Engine, folder: Path, index: Path, **overrides: Any) -> AbstractContextManager[Service]:
    """As `correcting_by`; the engine's own target writes."""
    # The first request compiles kernels, beside whatever else the machine does
    settings = {"service.languagetool_open": True, "service.grammar.timeout_s": 600.0}
    return served(engine, folder, index, **settings | overrides)


LATEX: tuple[dict[str, str], ...] = (
    {"markup": "\\section{", "interpretAs": "\n\n"},
    {"text": "He "},
    {"markup": "\\emph{"},
    {"text": "go"},
    {"markup": "}"},
    {"text": " to a old mill."},
    {"markup": "}\n\n"},
)


def annotation(*nodes: Mapping[str, str | None]) -> str:
    """The field `data` of an annotated text."""
    return json.dumps({"annotation": nodes})


def applied(text: str, matches: list[dict[str, Any]]) -> str:
    """As a client written in Java or JavaScript applies them all."""
    units = text.encode("utf-16-le")
    for match in reversed(matches):
        start, end = 2 * match["offset"], 2 * (match["offset"] + match["length"])
        units = units[:start] + match["replacements"][0]["value"].encode("utf-16-le") + units[end:]
    return units.decode("utf-16-le")
