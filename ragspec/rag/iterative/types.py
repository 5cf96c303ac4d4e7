"""Records of an iterative answer: the request, the components that serve it, and its speculation steps."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from ragspec.config import SpeculationConfig
from ragspec.core import Completion, Passage, SamplingParams
from ragspec.rag.iterative.policies import PartialAnswer, Policy, RetrievalRound
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike
from ragspec.retrieval.search.index_types import IndexLike, Query
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.retrieval.speculative.speculation_cache import SearchBatcher
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.speculation import Speculation


class LoadCounter:
    """Counts of a pipeline: answers in flight, and answers that decode at the moment. Safe to call from several threads."""

    def __init__(self) -> None:
        self._counts, self._lock = Counter[str](), threading.Lock()

    def add(self, name: str, change: int) -> int:
        """The count after the change."""
        with self._lock:
            self._counts[name] += change
            return self._counts[name]


@dataclass(frozen=True, slots=True)
class PipelineComponents:
    """What all answers of a pipeline share."""

    engine: EngineLike
    prompts: PromptBuilder
    search_batcher: SearchBatcher
    scheduler: StrideScheduler
    policy: Policy
    config: SpeculationConfig
    load: LoadCounter = field(default_factory=LoadCounter)


@dataclass(frozen=True, slots=True)
class IterativeRequest:
    """`index` is pinned to one generation; `params.seed` is set. `guessing`: whether retrievals are speculated."""

    question: str
    params: SamplingParams
    index: IndexLike
    scope: SearchScope
    guessing: bool
    drafting: Speculation


@dataclass(slots=True, eq=False)
class SpeculationStep:
    """One retrieval round: its query, its passages (speculated or verified), and the segment generated with them.

    `answer`: the partial answer before the round. `seconds`: the time for encoding and guessing.
    """

    answer: PartialAnswer
    round: RetrievalRound
    query: Query | None
    passages: list[Passage]
    verified: bool
    completion: Completion | None = None
    token_ids: list[int] = field(default_factory=list)  # generated so far
    seconds: float = 0.0
