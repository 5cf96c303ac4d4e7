"""Retrieval that threads share is each one's own, bit for bit, and its calls are fewer than its callers."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.errors import EngineClosed, InputError, RetrievalError
from ragspec.retrieval import batching_retriever
from ragspec.retrieval.batching_retriever import BatchingRetriever, CachingRetriever, RequestBatcher
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import RetrievalResult, Retriever, build_index
from ragspec.retrieval.search.segment_search import Query, SearchScope

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


def test_a_recent_question_is_not_searched_again(index: CountingRetriever) -> None:
    """Each repeated question cost the encoder; or one tenant, filter or number of passages was answered with another's."""
    index.may_go.set()
    kept = CachingRetriever(index, lambda: index.generation)
    first = [kept.retrieve([text], k, scope) for text, k, scope in ASKED]
    first[0].passages[0].clear()  # a caller's list is the caller's
    num_encoded = len(index.encoded)
    again = [kept.retrieve([text], k, scope) for text, k, scope in ASKED]
    assert len(index.encoded) == num_encoded
    assert again == [index.retrieve([text], k, scope) for text, k, scope in ASKED]


def test_a_new_generation_empties_the_memory_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages of a deleted document were shown, or kept for ever; a tenant with many questions cost others theirs."""
    monkeypatch.setattr(batching_retriever, "_KEPT_IN_ALL", 3)
    asked: list[str] = []
    generation, missing = "1", ()

    class Numbered:
        def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope) -> RetrievalResult:
            asked.extend(queries)
            return RetrievalResult([[]], generation, missing)

    kept = CachingRetriever(Numbered(), lambda: generation)
    for text in "abcdabd":
        kept.retrieve([text], 1, SearchScope("ann" if text == "a" else "bob"))
    assert asked == ["a", "b", "c", "d", "b"]
    generation, missing = "2", ("segment-1",)
    assert [kept.retrieve(["a"], 1, SearchScope("ann")).generation for _ in range(2)] == ["2", "2"]
    assert asked[5:] == ["a", "a"]  # an incomplete result is not kept


WAIT_S = 10.0


class Doubling:
    """Doubles numbers, once it may; a negative one fails the call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[list[int]]]] = []
        self.may_go = threading.Event()
        self.began = threading.Semaphore(0)

    def __call__(self, key: str, parts: list[Sequence[int]]) -> list[list[int]]:
        self.seen.append((key, [list(part) for part in parts]))
        self.began.release()
        assert self.may_go.wait(WAIT_S)
        if any(number < 0 for part in parts for number in part):
            raise InputError("negative")
        return [[2 * number for number in part] for part in parts]


@pytest.fixture
def doubling() -> Doubling:
    return Doubling()


@pytest.fixture
def calls(doubling: Doubling) -> Iterator[RequestBatcher[str, int, list[int]]]:
    made = RequestBatcher(doubling, max_items=4)
    yield made
    doubling.may_go.set()
    made.close()


def test_what_comes_during_a_call_shares_the_next(
    calls: RequestBatcher[str, int, list[int]], doubling: Doubling
) -> None:
    """Every request made a call of its own, or got another's part of the answer."""
    first = calls.submit("a", [1])
    assert doubling.began.acquire(timeout=WAIT_S)
    others = [calls.submit("a", [2, 3]), calls.submit("b", [9]), calls.submit("a", [4]), calls.submit("a", [5, 6])]
    doubling.may_go.set()
    assert [future.result(WAIT_S) for future in (first, *others)] == [[2], [4, 6], [18], [8], [10, 12]]
    assert doubling.seen == [("a", [[1]]), ("a", [[2, 3], [4]]), ("b", [[9]]), ("a", [[5, 6]])]


def test_a_key_with_many_submissions_delays_nobody(
    calls: RequestBatcher[str, int, list[int]], doubling: Doubling
) -> None:
    """A tenant's flood stood before all others, and each call compared each waiting query with each chosen one."""
    num_compared = 0

    class Scope(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    calls.submit("first", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    flood = [calls.submit(Scope("flood"), [number]) for number in range(400)]
    calls.submit("other", [0])
    doubling.may_go.set()
    assert [future.result(WAIT_S) for future in flood] == [[2 * number] for number in range(400)]
    assert [str(key) for key, _ in doubling.seen[:3]] == ["first", "flood", "other"]
    assert len(doubling.seen) == 2 + 400 // 4 and num_compared <= 2 * 400


def test_a_submission_larger_than_a_call_is_one_call(
    calls: RequestBatcher[str, int, list[int]], doubling: Doubling
) -> None:
    """It waited for room that never comes."""
    doubling.may_go.set()
    assert calls.submit("a", list(range(9))).result(WAIT_S) == [2 * number for number in range(9)]


def test_one_fault_is_not_the_others(calls: RequestBatcher[str, int, list[int]], doubling: Doubling) -> None:
    """One request's bad query failed all that shared its call."""
    calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    good, bad, late = calls.submit("a", [1]), calls.submit("a", [-1]), calls.submit("a", [2])
    doubling.may_go.set()
    assert good.result(WAIT_S) == [2]
    assert late.result(WAIT_S) == [4]
    with pytest.raises(InputError, match="negative"):
        bad.result(WAIT_S)


def test_what_is_lost_is_lost_for_all(doubling: Doubling) -> None:
    """An index that does not answer was asked once more by each that waited, one after the other, while all others stood."""
    num_calls = 0

    def call(key: str, parts: list[Sequence[int]]) -> list[list[int]]:
        nonlocal num_calls
        num_calls += 1
        doubling.began.release()
        assert doubling.may_go.wait(WAIT_S)
        raise RetrievalError("lost")

    calls = RequestBatcher(call, max_items=8)
    first = calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    others = [calls.submit("a", [number]) for number in range(5)]
    doubling.may_go.set()
    for future in (first, *others):
        with pytest.raises(RetrievalError, match="lost"):
            future.result(WAIT_S)
    assert num_calls == 2
    calls.close()


def test_cancelled_submissions_are_left_out(calls: RequestBatcher[str, int, list[int]], doubling: Doubling) -> None:
    """A request that was given up still cost a lookup, or broke the thread when its answer came."""
    calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    gone, there = calls.submit("a", [1]), calls.submit("a", [2])
    assert gone.cancel()
    doubling.may_go.set()
    assert there.result(WAIT_S) == [4]
    assert doubling.seen[-1] == ("a", [[2]])


def test_closing_ends_what_waits(calls: RequestBatcher[str, int, list[int]], doubling: Doubling) -> None:
    """Requests that wait at the end waited for ever."""
    calls.submit("a", [0])
    assert doubling.began.acquire(timeout=WAIT_S)
    gone, waiting = calls.submit("b", [0]), calls.submit("b", [1])
    assert gone.cancel()
    calls.close()
    doubling.may_go.set()
    with pytest.raises(EngineClosed):
        waiting.result(WAIT_S)
    with pytest.raises(EngineClosed):
        calls.submit("a", [1])
