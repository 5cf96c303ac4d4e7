"""Retrieval that threads share is each one's own, bit for bit, and its calls are fewer than its callers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.errors import EngineClosed
from ragspec.retrieval.batching_retriever import BatchingRetriever
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.index_types import Query
from ragspec.retrieval.search.segment_search import SearchScope

WAIT_S = 20.0
WORDS = "river mill bridge stone sand water rain spring".split()
ASKED = [(f"{a} {b}", k, SearchScope(tenant)) for a in WORDS for b in WORDS[:3] for k, tenant in ((1, ""), (3, "ann"))]


class CountingRetriever(Retriever):
    """Counts what it is asked for at once; the first call waits until it may go."""

    may_go: threading.Event
    encoded: list[int]

    def encode(self, texts: Sequence[str]) -> list[Query]:
        self.encoded.append(len(texts))
        assert self.may_go.wait(WAIT_S)
        return super().encode(texts)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder: Path = tmp_path_factory.mktemp("joined") / "index"
    owned = [Document(f"a{i}", f"{a} of Ann.", owner="ann") for i, a in enumerate(WORDS)]
    build_index([*(Document(f"d{i}", f"{a} {a} hill.") for i, a in enumerate(WORDS)), *owned], folder, LetterEncoder())
    return Store.open(folder)


@pytest.fixture
def index(store: Store) -> CountingRetriever:
    index = CountingRetriever(LetterEncoder(), store, RetrieverConfig(mode="hybrid"), follow=False)
    index.may_go, index.encoded = threading.Event(), []
    return index


@pytest.fixture
def joined(index: CountingRetriever) -> Iterator[BatchingRetriever]:
    joined = BatchingRetriever(index, max_queries=16)
    yield joined
    index.may_go.set()
    joined.close()


def test_what_threads_ask_together_is_what_each_is_told_alone(
    index: CountingRetriever, joined: BatchingRetriever
) -> None:
    """Passages, scores or a tenant's documents that came to somebody else; or a call for every caller, as before."""
    with ThreadPoolExecutor(len(ASKED)) as threads:
        found = [threads.submit(joined.retrieve, [text], k, scope) for text, k, scope in ASKED]
        index.may_go.set()
        together = [future.result(WAIT_S) for future in found]
    assert len(index.encoded) < len(ASKED) // 2 and sum(index.encoded) == len(ASKED) and max(index.encoded) <= 16
    assert together == [index.retrieve([text], k, scope) for text, k, scope in ASKED]
    for (_, _, scope), found in zip(ASKED, together, strict=True):
        assert any(passage.document_id[0] == "a" for passage in found.passages[0]) == (scope.tenant == "ann")


def test_closing_ends_the_wait(index: CountingRetriever, joined: BatchingRetriever) -> None:
    """A service that stops waits for its waiting threads for ever."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(joined.retrieve, ["river"], 1)
        while not index.encoded:
            threading.Event().wait(0.01)
        second = threads.submit(joined.retrieve, ["mill"], 1)
        joined.close()
        index.may_go.set()
        for future in (first, second):
            with pytest.raises(EngineClosed):
                future.result(WAIT_S)
