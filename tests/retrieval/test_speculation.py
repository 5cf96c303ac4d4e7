"""Guesses are what the index would say, as far as the cache can know; lookups are shared and nobody else's."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.retrieval.batching_retriever import SearchBatcher
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.segment_search import Lookup, RetrievalMode, SearchScope
from ragspec.retrieval.speculative.speculation_cache import SpeculationCache, passage_keys
from ragspec.retrieval.speculative.stride import (
    GAMMA_MAX,
    NEVER_PAYS,
    NO_SPECULATION,
    Concurrency,
    StrideCosts,
    StrideScheduler,
    StrideTiming,
    best_plan,
    verified_documents,
)

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
    index = retriever(store, "hybrid")
    with closing(SearchBatcher(max_queries=8)) as lookups:
        queries = lookups.encode(index, QUERIES[:24]).result(30)
        assert [query.text for query in queries] == QUERIES[:24]
        scopes = [SearchScope(), SearchScope(tenant="ann")]
        asked = [Lookup([query], 2, scopes[i % 2], 4) for i, query in enumerate(queries)]
        futures = [(i, lookups.search(index, each)) for i, each in enumerate(asked)]
        for i, future in futures:
            lookup, alone = future.result(30), index.search([queries[i]], 2, scopes[i % 2])
            assert lookup.passages == alone.passages
            if i % 2 == 0:
                assert all(not key[0] >= "d40" for key in lookup.candidates)


def test_what_one_knows_is_still_brought_to_another(store: Store) -> None:
    """A shared lookup left out what only some of its requests know: the others could never guess it."""
    index = retriever(store, "dense")
    with closing(SearchBatcher(max_queries=8)) as lookups:
        (query,) = index.encode(["river mill"])
        everything = index.search([query], 1, prefetch_k=3).candidates
        asked = [Lookup([query], 1, SearchScope(), 3, known) for known in (frozenset(everything), frozenset())]
        _, other = [lookups.search(index, each) for each in asked]
        assert other.result(30).candidates.keys() == everything.keys()


OPTIMA = {  # (b / a, gamma): gain and stride of the synchronous objective, then of the asynchronous one
    (0.1, 0.6): (1.00, 1, 1.06, 1),
    (1.0, 0.3): (1.00, 1, 1.18, 1),
    (1.0, 0.6): (1.07, 2, 1.43, 1),
    (1.0, 0.9): (1.38, 4, 1.82, 1),
    (2.0, 0.8): (1.48, 4, 1.63, 3),
    (5.0, 0.8): (2.02, 5, 2.09, 5),
    (10.0, 0.9): (3.59, 11, 3.65, 11),
    (40.0, 0.6): (2.12, 6, 2.13, 6),
    (40.0, 0.9): (6.01, 19, 6.02, 19),
}


def constant(ratio: float, gamma: float) -> StrideCosts:
    return StrideCosts(StrideTiming(1.0, lambda _: ratio), gamma)


@pytest.mark.parametrize("case", OPTIMA)
def test_the_published_optima_are_found(case: tuple[float, float]) -> None:
    """A stride off by one in E[verified] or in the overlapped step moved every optimum."""
    costs, (sync_gain, sync_stride, async_gain, async_stride) = constant(*case), OPTIMA[case]
    waiting, going_on = (best_plan(costs, 64, lambda _, overlap=overlap: overlap) for overlap in (0, 1))  # type: ignore[misc]
    assert (round(waiting.gain, 2), waiting.stride) == (sync_gain, sync_stride)
    assert (round(going_on.gain, 2), going_on.stride) == (async_gain, async_stride)


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_search_finds_the_best_of_all_strides(overlap: int) -> None:
    """Ending at the first fall misses a second peak: there must be none, also where larger batches cost more."""
    for ratio in (0.05, 0.3, 0.9, 1.0, 1.1, 2.0, 7.0, 40.0, 200.0):
        for gamma in (0.05, 0.3, 0.6, 0.8, 0.95, 0.99):
            for rise in (0.0, 0.02, 0.3, 1.0):
                timing = StrideTiming(1.0, lambda s, b=ratio, r=rise: b * (1.0 + r * (s - 1)))  # type: ignore[misc]
                costs = StrideCosts(timing, gamma)
                most = max(costs.gain(stride, overlap) for stride in range(1, 65))
                assert best_plan(costs, 64, lambda _: overlap).gain == pytest.approx(most)


def test_rounds_take_what_a_simulation_takes() -> None:
    """Formula and schedule drifted apart: the steps beside a verification count once, and only after a success."""
    rng = random.Random(4)
    step_s, verification_s, gamma, stride, overlap = 1.0, 2.5, 0.8, 3, 2
    seconds, documents, num_rounds = 0.0, 0, 40_000
    for _ in range(num_rounds):
        right = 0
        while right < stride and rng.random() < gamma:
            right += 1
        documents += min(right + 1, stride)
        beside_s = max(overlap * step_s, verification_s)
        seconds += (stride - overlap) * step_s + beside_s if right == stride else stride * step_s + verification_s
    expected_s = StrideCosts(StrideTiming(step_s, lambda _: verification_s), gamma).round_s(stride, overlap)
    assert seconds / num_rounds == pytest.approx(expected_s, rel=0.02)
    assert documents / num_rounds == pytest.approx(verified_documents(gamma, stride), rel=0.02)


def test_guesses_that_were_all_right_have_a_plan() -> None:
    """In a short benchmark no guess was wrong, and the plan was divided by zero."""
    costs = StrideCosts(StrideTiming(1.0, lambda _: 40.0), gamma=1.0)
    assert best_plan(costs, 32, lambda _: 0).stride == 32
    assert costs.gain(32, 0) == pytest.approx(32 * 41 / 72)


def told(
    scheduler: StrideScheduler, step_s: float, verification_s: float, gamma: float, beside_s: float | None = None
) -> StrideScheduler:
    for number in range(50):
        scheduler.note_step(step_s)
        scheduler.note_verification(1 + number % 4, verification_s)
        scheduler.note_guesses(int(10 * gamma), 10 - int(10 * gamma))
        if beside_s is not None:
            scheduler.note_step(beside_s, beside=True)
            scheduler.note_verification(1 + number % 4, verification_s, beside=True)
    return scheduler


def test_nothing_is_speculated_before_anything_is_known() -> None:
    """The first request of all paid for a guess about guesses."""
    scheduler = StrideScheduler()
    assert scheduler.choose() == NO_SPECULATION
    scheduler.note_step(1.0)
    scheduler.note_guesses(5, 0)
    assert scheduler.choose() == NO_SPECULATION


def test_a_fast_index_is_asked_every_time() -> None:
    """Guessing what takes no time to know made fast retrievers 0.58 times as fast."""
    might_pay = told(StrideScheduler(asynchronous=False), 1.0, 0.2, 0.7)  # if guesses were better
    assert might_pay.choose() == NO_SPECULATION
    assert told(StrideScheduler(), 1.0, 0.02, 0.9).choose() == NEVER_PAYS


def test_a_slow_index_is_guessed() -> None:
    """The scheduler never left its first stride."""
    plan = told(StrideScheduler(), 1.0, 40.0, 0.8).choose()
    assert 8 <= plan.stride <= 14
    assert plan.gain > 3.0


def test_wrong_guesses_end_speculation() -> None:
    """Speculation went on with guesses that are never right."""
    assert told(StrideScheduler(), 1.0, 1.0, 0.0).choose() == NO_SPECULATION


def test_decoding_beside_a_verification_must_be_worth_it() -> None:
    """Where both want the same processors, overlapping them slows both, and the formula alone cannot know."""
    assert told(StrideScheduler(), 1.0, 0.5, 0.9).choose().overlap >= 1
    assert told(StrideScheduler(), 1.0, 0.5, 0.9, beside_s=4.0).choose().overlap == 0


def test_what_decoding_beside_costs_is_tried_again() -> None:
    """Once another program had the processors, decoding never went on beside a verification again."""
    scheduler = told(StrideScheduler(), 1.0, 0.5, 0.9, beside_s=4.0)
    for _ in range(1000):
        scheduler.note_verification(1, 0.5)
    assert scheduler.choose().overlap >= 1


def test_a_verification_beside_decoding_is_not_what_waiting_for_it_takes() -> None:
    """A fast index that shares the processors looked slow beside decoding, and so worth guessing."""
    scheduler = told(StrideScheduler(), 1.0, 0.02, 0.9)
    for _ in range(50):
        scheduler.note_step(1.1, beside=True)
        scheduler.note_verification(1, 1.0, beside=True)
    assert scheduler.choose()[:2] == (1, 0)


def test_a_batch_that_costs_more_shortens_the_stride() -> None:
    """b(s) was taken for b(1): strides for a flat index, on one that is linear in the batch."""
    flat, linear = StrideScheduler(asynchronous=False), StrideScheduler(asynchronous=False)
    for number in range(60):
        for scheduler in (flat, linear):
            scheduler.note_step(1.0)
            scheduler.note_guesses(9, 1)
        size = 1 + number % 6
        flat.note_verification(size, 4.0)
        linear.note_verification(size, 4.0 * size)
    assert flat.choose().stride > 4
    assert linear.choose()[:2] == (1, 0)


def test_a_fixed_stride_is_kept_or_off() -> None:
    """A fixed stride was used where it slows down, or replaced by another."""
    assert told(StrideScheduler(3, asynchronous=False), 1.0, 10.0, 0.8).choose().stride == 3
    assert told(StrideScheduler(3, asynchronous=False), 1.0, 0.1, 0.8).choose()[:2] == (1, 0)


def test_old_measurements_are_forgotten() -> None:
    """An index that became slow was asked every time for ever."""
    scheduler = told(StrideScheduler(window=16), 1.0, 0.01, 0.9)
    assert scheduler.choose() == NEVER_PAYS
    assert told(scheduler, 1.0, 30.0, 0.9).choose()[:2] > (1, 0)


def test_one_slow_step_does_not_decide() -> None:
    """A compilation in one step of many made steps look expensive and verification cheap."""
    scheduler = told(StrideScheduler(), 1.0, 5.0, 0.8)
    before = scheduler.choose()
    scheduler.note_step(500.0)
    for number in range(4):
        scheduler.note_verification(1 + number, 5.0)
    assert scheduler.choose() == before


def test_certainty_is_not_believed() -> None:
    """Two lucky guesses meant gamma 1 and the longest stride."""
    scheduler = StrideScheduler()
    scheduler.note_guesses(1, 0)
    assert scheduler.gamma == 0.75
    for _ in range(100):
        scheduler.note_guesses(10, 0)
    assert scheduler.gamma == GAMMA_MAX


def test_where_others_are_written_meanwhile_waiting_costs_nothing() -> None:
    """Eight answers at once on two cores: each looked slow, so all guessed, and what was written in vain slowed all of them."""
    alone = StrideCosts(StrideTiming(1.0, lambda _: 1.0), 0.9)
    full = StrideCosts(StrideTiming(8.0, lambda _: 1.0), 0.9, None, Concurrency(8, 1.0, 8))
    assert alone.gain(4, 0) > 1.3
    assert full.gain(4, 0) == pytest.approx(verified_documents(0.9, 4) / 4, rel=0.01)
    for costs in (full, replace(full, crowd=Concurrency(8, 1.0, 5), apart=StrideTiming(5.0, lambda _: 1.0))):
        assert best_plan(costs, 32, lambda _: 0).stride == 1
    free = replace(alone, crowd=Concurrency(8, 0.0, 8))  # decoding together is free: each is as alone
    assert free.gain(4, 0) == alone.gain(4, 0)
    far = StrideCosts(StrideTiming(1.0, lambda _: 100.0), 0.9, None, Concurrency(8, 1.0, 1))
    assert far.gain(8, 0) > 3.0  # eight do not hide a far index


def test_a_crowd_is_noticed() -> None:
    """The scheduler never learned that steps slow each other down."""
    scheduler = told(StrideScheduler(asynchronous=False), 1.0, 1.0, 0.9)
    assert scheduler.choose()[:2] > (1, 0)
    for number in range(100):
        num_writing = 4 + number % 5
        scheduler.note_step(0.5 * num_writing, num_writing=num_writing, num_in_flight=8)
        scheduler.note_verification(1, 1.0)
        scheduler.note_guesses(9, 1)
    assert scheduler.choose()[:2] == (1, 0)
    for _ in range(100):
        scheduler.note_step(1.0)
        scheduler.note_verification(1, 1.0)
    assert scheduler.choose()[:2] > (1, 0)


@pytest.mark.parametrize("ratio", [2.0, 5.0, 10.0])
@pytest.mark.parametrize("gamma", [0.5, 0.7, 0.9])
def test_an_index_that_is_linear_in_the_batch_is_not_tried_for_ever(ratio: float, gamma: float) -> None:
    """While off, what batches cost was forgotten: speculation went on again and again, and took a fifth of the time."""
    rng = random.Random(3)
    scheduler, documents, seconds = StrideScheduler(asynchronous=False), 0, 0.0
    while documents < 4000:
        stride = scheduler.choose().stride
        right = 0
        while right < stride and rng.random() < gamma:
            right += 1
        for _ in range(stride):
            scheduler.note_step(1.0)
        scheduler.note_verification(stride, stride * ratio)
        scheduler.note_guesses(right, int(right < stride))
        documents += min(right + 1, stride)
        seconds += stride * (1.0 + ratio)
    assert documents * (1.0 + ratio) / seconds > 0.985


def test_one_step_beside_a_verification_may_always_be_taken() -> None:
    """Where guesses are rarely right, the paper's asynchronous plan was never considered."""
    assert told(StrideScheduler(), 1.0, 1.0, 0.2).choose().overlap == 1
