"""Guesses are what the index would say, as far as the cache can know; lookups are shared and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.retrieval.batching_retriever import PendingQuery, SearchBatcher, SearchParams
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.index_types import RetrievalMode
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.retrieval.speculative.speculation_cache import SpeculationCache, passage_keys

WORDS = "river mill bridge stone sand water rain spring valley north hill sea".split()
DOCUMENTS = [
    Document(f"d{i:02}", " ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(1, 4 + i % 7)) + ".", owner=owner)
    for i, owner in enumerate([""] * 40 + ["ann"] * 5)
]
QUERIES = [f"{a} {b} {a}" for a in WORDS for b in WORDS[:5]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder: Path = tmp_path_factory.mktemp("speculation") / "index"
    build_index(DOCUMENTS, folder, LetterEncoder())
    return Store.open(folder)


def retriever(store: Store, mode: RetrievalMode) -> Retriever:
    return Retriever(LetterEncoder(), store, RetrieverConfig(mode=mode), follow=False)


@pytest.mark.parametrize("mode", ["dense", "sparse", "hybrid"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_cache_that_knows_everything_says_what_the_index_says(store: Store, mode: RetrievalMode, k: int) -> None:
    """Another formula, order of addition or tie order than the index's made right guesses wrong."""
    index = retriever(store, mode)
    cache = SpeculationCache(mode, index.relevance)
    queries = index.encode(QUERIES)
    cache.insert(index.search(queries, k, prefetch_k=45))
    for query, passages in zip(queries, index.search(queries, k).passages, strict=True):
        assert cache.guess(query, k) == passages  # the same scores, too


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_a_passage_once_met_is_guessed_wherever_it_is_the_best(store: Store, mode: RetrievalMode) -> None:
    """The cache forgot, or ranked what it knows otherwise than the index: then hits are luck."""
    index = retriever(store, mode)
    cache = SpeculationCache(mode, index.relevance)
    num_right = 0
    for query in index.encode(QUERIES):
        guess = cache.guess(query, 1)
        lookup = index.search([query], 1, prefetch_k=2, known=cache.known)
        known = set(passage_keys(lookup.passages[0])) <= cache.known
        assert (passage_keys(guess) == passage_keys(lookup.passages[0])) == known
        num_right += known
        cache.insert(lookup)
    assert num_right > len(QUERIES) // 3


def test_nothing_is_guessed_before_the_index_was_asked(store: Store) -> None:
    """An empty cache guessed that there are no passages."""
    index, cache = retriever(store, "dense"), SpeculationCache("dense")
    (query,) = index.encode(["river"])
    assert not cache.can_guess
    cache.insert(index.search([query], 1, SearchScope(tenant="ann"), prefetch_k=1))
    assert cache.can_guess


def test_the_oldest_passages_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer's cache grew without bound, or broke when it was cut."""
    monkeypatch.setattr("ragspec.retrieval.speculative.speculation_cache._MAX_PASSAGES", 6)
    index = retriever(store, "hybrid")
    cache = SpeculationCache("hybrid", index.relevance)
    for query in index.encode(QUERIES[:30]):
        lookup = index.search([query], 1, prefetch_k=3)
        cache.insert(lookup)
        assert len(cache.known) <= 6
        assert set(passage_keys(lookup.passages[0])) <= cache.known
        cache.guess(query, 1)


def test_lookups_of_several_requests_are_each_its_own(store: Store) -> None:
    """Passages of one request came to another, or a tenant's to somebody else, when lookups were shared."""
    index, lookups = retriever(store, "hybrid"), SearchBatcher(max_queries=8)
    try:
        queries = lookups.encode(index, QUERIES[:24]).result(30)
        assert [query.text for query in queries] == QUERIES[:24]
        scopes = [SearchScope(), SearchScope(tenant="ann")]
        asked = [SearchParams(index, 2, scope, 4) for scope in scopes]
        futures = [(i, lookups.search(asked[i % 2], [PendingQuery(q, frozenset())])) for i, q in enumerate(queries)]
        for i, future in futures:
            lookup, alone = future.result(30), index.search([queries[i]], 2, scopes[i % 2])
            assert lookup.passages == alone.passages
            if i % 2 == 0:
                assert all(not key[0] >= "d40" for key in lookup.candidates)
    finally:
        lookups.close()


def test_what_one_knows_is_still_brought_to_another(store: Store) -> None:
    """A shared lookup left out what only some of its requests know: the others could never guess it."""
    index, asked = retriever(store, "dense"), None
    lookups = SearchBatcher(max_queries=8)
    try:
        (query,) = index.encode(["river mill"])
        asked = SearchParams(index, 1, SearchScope(), 3)
        everything = index.search([query], 1, prefetch_k=3).candidates
        futures = [
            lookups.search(asked, [PendingQuery(query, known)]) for known in (frozenset(everything), frozenset())
        ]
        assert futures[1].result(30).candidates.keys() == everything.keys()
    finally:
        lookups.close()
