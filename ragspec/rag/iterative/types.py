"""What the parts of an iterative answer share: what it is asked for, what serves it, and its rounds."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from ragspec.config import SpeculationConfig
from ragspec.core import Completion, Delta, Passage, Request, SamplingParams
from ragspec.rag.iterative.policies import PartialAnswer, Policy, RetrievalRound
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.search.index_types import IndexLike, Query
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.retrieval.speculative.speculation_cache import SearchBatcher
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.speculation import Speculation


class Streaming(Protocol):
    """An engine as an iterative answer needs it."""

    def stream(self, request: Request) -> AsyncIterator[Delta]: ...


class LoadCounter:
    """Answers of one pipeline under way, and those of them that are being written at this moment. For any thread."""

    def __init__(self) -> None:
        self._num_in_flight = self._num_writing = 0
        self._lock = threading.Lock()

    def in_flight(self, change: int) -> int:
        """How many there are after the change."""
        with self._lock:
            self._num_in_flight += change
            return self._num_in_flight

    def writing(self, change: int) -> int:
        """How many there are after the change."""
        with self._lock:
            self._num_writing += change
            return self._num_writing


@dataclass(frozen=True, slots=True)
class PipelineComponents:
    """What all answers of a pipeline share."""

    engine: Streaming
    prompts: PromptBuilder
    lookups: SearchBatcher
    scheduler: StrideScheduler
    policy: Policy
    config: SpeculationConfig
    traffic: LoadCounter = field(default_factory=LoadCounter)


@dataclass(frozen=True, slots=True)
class IterativeRequest:
    """What one answer is asked for. `index` is pinned to one generation; `params.seed` is given."""

    question: str
    params: SamplingParams
    index: IndexLike
    scope: SearchScope
    guessing: bool
    drafting: Speculation


@dataclass(slots=True, eq=False)
class SpeculationStep:
    """A round under way. `progress`: what was there before it; `seconds`: what encoding and guessing took."""

    progress: PartialAnswer
    round: RetrievalRound
    query: Query | None
    passages: list[Passage]
    verified: bool
    written: Completion | None = None
    token_ids: list[int] = field(default_factory=list)  # written so far
    seconds: float = 0.0
