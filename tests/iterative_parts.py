"""What tests of iterative answers share: documents, a target with room for passages, plans that are always followed, and indexes
that behave badly on purpose.

>>> pipeline = IterativePipeline(Around(index), engine, prompts, scheduler=Always(StridePlan(3, 3, 2.0)))
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiny_target import SENTENCES, save_model

from ragspec.config import TargetConfig
from ragspec.core import Document
from ragspec.engine.target import Target
from ragspec.retrieval.search.segment_search import Query, SearchResult
from ragspec.retrieval.speculative.stride import StridePlan, StrideScheduler

CONTEXT = 768
WORDS = "river mill bridge stone sand water rain spring valley north".split()
DOCUMENTS = [
    Document(f"d{i:02}", f"{SENTENCES[i % len(SENTENCES)]} {WORDS[i % 10]} {WORDS[(3 * i) % 10]}.") for i in range(24)
]


def wide_target(folder: Path) -> Target:
    """Random weights, and a context that holds passages beside the question."""
    model = save_model("llama", folder / "wide", max_position_embeddings=CONTEXT)
    return Target.load(TargetConfig(model=str(model)), num_kv_slots=8192)


class Always(StrideScheduler):
    """These plans in turn, whatever is measured."""

    def __init__(self, *plans: StridePlan) -> None:
        super().__init__()
        self._plans = itertools.cycle(plans)

    def choose(self) -> StridePlan:
        return next(self._plans)


class Around:
    """An index that does as another says, but for what a subclass or `before` does to a lookup first."""

    def __init__(self, index: Any, before: Callable[[int], None] = lambda _: None) -> None:
        self.index = index
        self.num_calls = 0
        self._before = before
        self._lock = threading.Lock()

    is_elsewhere = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)

    def search(self, queries: Sequence[Query], *args: Any, **options: Any) -> SearchResult:
        with self._lock:
            self.num_calls += 1
            number = self.num_calls
        self._before(number)
        return self.index.search(queries, *args, **options)

    def pinned(self) -> Any:
        return self
