"""Indexes that behave badly on purpose, around a real one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ragspec.retrieval.lookup import IndexLike, Lookup, Mode, Query


class Around:
    """An index that does as another says, but for what a subclass or `before` does to a lookup first."""

    def __init__(self, index: IndexLike, before: Callable[[int], None] = lambda _: None) -> None:
        self.index = index
        self.num_calls = 0
        self.texts: list[str] = []
        self._before = before
        self._lock = threading.Lock()

    @property
    def generation(self) -> str:
        return self.index.generation

    @property
    def mode(self) -> Mode:
        return self.index.mode

    @property
    def is_elsewhere(self) -> bool:
        return True

    def encode(self, texts: Sequence[str]) -> list[Query]:
        return self.index.encode(texts)

    def look_up(self, queries: Sequence[Query], *args: Any, **options: Any) -> Lookup:
        with self._lock:
            self.num_calls += 1
            self.texts += [query.text for query in queries]
            number = self.num_calls
        self._before(number)
        return self.index.look_up(queries, *args, **options)

    def pinned(self) -> IndexLike:
        return self
