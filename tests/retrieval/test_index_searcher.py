"""What an index says beyond its passages: candidates that anybody can score as the index does, of one generation."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letter_encoder import LetterEncoder
from split_shards import one_each

from ragspec.config import ChunkingConfig, DenseConfig, IndexConfig, RetrieverConfig
from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.encoder import FloatArray, TextKind
from ragspec.retrieval.index import generation_builder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search import index_searcher
from ragspec.retrieval.search.analysis import RULES, Analyzer
from ragspec.retrieval.search.bm25 import TermStatistics
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.segment_search import SearchResult, SearchScope, Shard
from ragspec.retrieval.speculative.speculation_cache import SpeculationCache
from ragspec.retrieval_config import AnalyzerConfig

CONFIG = IndexConfig(chunking=ChunkingConfig(max_chars=60))
QUERIES = ["river stone", "the old mill by the river", "corn corn corn", "unknownword", "rivers", "the"]
WORDS = "river stone bridge mill corn water old new tall the the the a of rivers".split()
SCOPES = [SearchScope(), SearchScope("ann"), SearchScope("bob", parse_filter({"type": "lt", "key": "n", "value": 40}))]
MODES = ["dense", "sparse", "hybrid"]


def document(number: int) -> Document:
    words = (WORDS[(number * 7 + i * i * 3 + i) % len(WORDS)] for i in range(5 + number % 9))
    text = f"{' '.join(words).capitalize()}. {WORDS[number % 7].capitalize()} again and again."
    owner = ["", "", "ann", "bob"][number % 4]
    return Document(f"d{number:03d}", text, f"Old {WORDS[number % 3]}", metadata={"n": number}, owner=owner)


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several segments with deletions."""
    folder = tmp_path_factory.mktemp("index")
    with IndexWriter(folder, LetterEncoder(), CONFIG) as writer:
        for number in range(50):
            writer.upsert(document(number))
            if number % 17 == 0:
                writer.commit()
        writer.delete("d003")
        writer.commit()
    return folder


@pytest.fixture(autouse=True)
def _small_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few passages as these tests have would never be cut."""
    monkeypatch.setattr(index_searcher, "FUSION_DEPTH", 9)
    monkeypatch.setattr(index_searcher, "RERANK_DEPTH", 7)


def retrievers(folder: Path, mode: Any, **options: Any) -> list[Retriever]:
    """The same index as one shard and as one a segment."""
    store = Store.open(folder)
    shards = [Shard.open(store.segments), one_each(store)]
    config = RetrieverConfig(mode=mode)
    return [Retriever(LetterEncoder(), store, config, shard=lambda _, one=one: one, **options) for one in shards]


def keys(found: SearchResult) -> list[list[tuple[str, int]]]:
    return [[(passage.document_id, passage.ordinal) for passage in some] for some in found.passages]


class Letters:
    """A reranker: the letters that a query and a text share."""

    def scores(self, query: str, texts: Sequence[str]) -> Any:
        return np.array([len(set(query) & set(text)) // 2 for text in texts], np.float64)


PAIRS = [(m, scope, (None, Letters())[(i + j) % 2]) for i, m in enumerate(MODES) for j, scope in enumerate(SCOPES)]
"""Every pair of a mode, a scope and a reranker."""


@pytest.mark.parametrize(("mode", "scope", "reranker"), PAIRS)
def test_prefetching_changes_no_answer(index_dir: Path, mode: Any, scope: SearchScope, reranker: Any) -> None:
    """A verification that finds another passage than the baseline would, since it searched deeper. Candidates of the wrong query,
    twice, out of order, or sent again and again though the asker has them."""
    for retriever in retrievers(index_dir, mode, reranker=reranker):
        queries = retriever.encode(QUERIES)
        for k, prefetch_k in ((0, 5), (1, 1), (1, 6), (3, 0), (3, 2), (12, 25)):
            expected = retriever.retrieve(QUERIES, k, scope).passages
            found = retriever.search(queries, k, scope, prefetch_k=prefetch_k)
            assert found.passages == expected and found.generation == retriever.generation
            names = list(found.candidates)
            if 0 < prefetch_k < 25:  # else more are reranked
                best = keys(retriever.search(queries, max(k, prefetch_k), scope))
                assert names == list(dict.fromkeys(key for some in best for key in some))
            assert bool(names) == bool(prefetch_k)
            for key, candidate in found.candidates.items():
                assert (candidate.passage.document_id, candidate.passage.ordinal) == key
                assert candidate.passage.score == 0.0
            known = frozenset([*names[::2], ("elsewhere", 0)])
            again = retriever.search(queries, k, scope, prefetch_k=prefetch_k, known=known)
            assert again.passages == expected and list(again.candidates) == names[1::2]


@pytest.mark.parametrize(("kind", "mode"), [("hnsw", "dense"), ("ivf", "hybrid")])
def test_prefetching_changes_no_answer_of_an_approximate_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, mode: Any
) -> None:
    """HNSW and IVF look further for 300 than for 3, and then find better passages than the baseline gets."""
    pytest.importorskip("faiss")
    monkeypatch.setattr("ragspec.retrieval.search.faiss_index.MIN_ROWS", 200)
    dense = DenseConfig(kind=kind, factory="HNSW4" if kind == "hnsw" else "IVF32,SQ8", search_width=1)
    texts = [f"Text {number}." for number in range(900)]
    build_index([Document(t, t) for t in texts], tmp_path, LetterEncoder(), IndexConfig(dense=dense))
    retriever = Retriever(LetterEncoder(), Store.open(tmp_path), RetrieverConfig(mode=mode))
    queries = retriever.encode([f"question {number}" for number in range(20)])
    few, many = retriever.search(queries, 3), retriever.search(queries, 300)
    assert keys(few) != [some[:3] for some in keys(many)]  # or this test could not fail
    for prefetch_k in (5, 300):
        found = retriever.search(queries, 3, prefetch_k=prefetch_k)
        assert found.passages == few.passages
        assert {key for some in keys(few) for key in some} <= found.candidates.keys()
        alone = [retriever.search([query], 3, prefetch_k=prefetch_k).candidates for query in queries]
        assert [len(each) for each in alone] == [prefetch_k] * len(queries)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_a_candidate_scores_bit_for_bit_as_in_the_index(index_dir: Path, mode: Any, scope: SearchScope) -> None:
    """A guess that ranks by other numbers than its check, by a title left out or a tenant's own frequencies."""
    num_compared = 0
    for retriever in retrievers(index_dir, mode):
        queries = retriever.encode(QUERIES)
        found = retriever.search(queries, 12, scope, prefetch_k=30)
        cache = SpeculationCache(mode)
        cache.insert(found)
        for query, passages in zip(queries, found.passages, strict=True):
            assert cache.guess(query, 12) == passages  # the same scores, too
            num_compared += len(passages)
    assert num_compared > 60


def test_statistics_count_what_the_tenant_may_read(index_dir: Path) -> None:
    """Frequencies under the filter, of another tenant's documents, of deleted ones, or without titles."""
    analyzer = Analyzer(CONFIG.words)
    for retriever in retrievers(index_dir, "hybrid"):
        for scope in SCOPES:
            everything = retriever.search(retriever.encode(["x"]), 400, SearchScope(scope.tenant)).passages[0]
            readable = [Counter(analyzer.terms(f"{each.title}\n{each.text}")) for each in everything]
            found = retriever.search(retriever.encode(QUERIES[:2]), 1, scope, prefetch_k=3)
            statistics, candidates = found.statistics, found.candidates
            assert statistics.frequencies.keys() == {t for each in candidates.values() for t in each.term_counts}
            assert statistics.num_rows == len(readable)
            assert statistics.total_length == sum(counts.total() for counts in readable)
            for term, frequency in statistics.frequencies.items():
                assert frequency == sum(term in counts for counts in readable) > 0


def test_each_mode_sends_only_what_its_scores_take(index_dir: Path) -> None:
    """A vector of every prefetched passage for a search by words; words of a hundred passages for one by meaning."""
    found = {}
    for mode in MODES:
        (retriever, _) = retrievers(index_dir, mode)
        (query,) = retriever.encode(["the river"])
        one = retriever.search([query], 1, prefetch_k=3)
        candidate = next(iter(one.candidates.values()))
        found[mode] = [query.vector is None, query.terms, candidate.vector is None, bool(candidate.term_counts)]
        assert retriever.mode == mode and retriever.search([query], 1).statistics == TermStatistics()
        assert (one.statistics == TermStatistics()) is (mode == "dense")
    words = ("the", "river")
    assert found == {
        "dense": [False, (), False, False],
        "sparse": [True, words, True, True],
        "hybrid": [False, words, False, True],
    }


def test_candidates_hold_no_file_open(index_dir: Path) -> None:
    """A cache of twenty vectors that keeps the maps of a generation that is long gone."""
    (retriever, _) = retrievers(index_dir, "dense")
    for candidate in retriever.search(retriever.encode(["x"]), 1, prefetch_k=5).candidates.values():
        assert candidate.vector is not None and type(candidate.vector) is np.ndarray
        assert candidate.vector.base is None and candidate.vector.dtype == np.float32


def test_a_pinned_index_stays_with_its_generation(tmp_path: Path) -> None:
    """A guess under one generation and its check under the next: a mismatch that is none, or an answer from two indexes."""
    build_index([document(number) for number in range(9)], tmp_path, LetterEncoder(), CONFIG)
    retriever = Retriever(LetterEncoder(), Store.open(tmp_path))
    pinned = retriever.pinned()
    queries = pinned.encode(QUERIES)
    before = pinned.search(queries, 9)
    for _ in range(2):  # two: the first generation's files are removed
        with IndexWriter(tmp_path, LetterEncoder(), CONFIG) as writer:
            writer.delete(before.passages[0][0].document_id)
            writer.upsert(Document(before.generation, "The river mill again."))
            writer.commit()
            writer.compact()
    assert retriever.generation != before.generation
    assert retriever.search(queries, 9).passages != before.passages
    assert (pinned.generation, pinned.pinned().generation) == (before.generation, before.generation)
    assert pinned.search(queries, 9).passages == before.passages
    assert pinned.search(queries, 9, prefetch_k=9).passages == before.passages


def test_words_are_cut_as_the_answering_generation_cuts_them(tmp_path: Path) -> None:
    """An index built again for another language between encoding and looking up: "rivers" finds nothing."""
    documents = [Document("many", "Rivers."), Document("one", "River.")]
    build_index(documents, tmp_path, LetterEncoder(), IndexConfig(words=AnalyzerConfig(language="none")))
    retriever = Retriever(LetterEncoder(), Store.open(tmp_path), RetrieverConfig(mode="sparse"))
    queries = retriever.encode(["rivers"])
    assert keys(retriever.search(queries, 9)) == [[("many", 0)]]
    build_index(documents, tmp_path, LetterEncoder(), IndexConfig())
    assert keys(retriever.search(queries, 9)) == [[("many", 0), ("one", 0)]]


def test_an_empty_index_and_no_query_have_no_candidates(tmp_path: Path) -> None:
    """A crash on the first question of an index whose documents were all deleted."""
    build_index([Document("a", "A river.")], tmp_path, LetterEncoder(), CONFIG)
    retriever = Retriever(LetterEncoder(), Store.open(tmp_path))
    assert retriever.search([], 3, prefetch_k=3)[:2] == ([], {})
    with IndexWriter(tmp_path) as writer:
        writer.delete("a")
        writer.commit()
    found = retriever.search(retriever.encode(["river"]), 3, prefetch_k=3)
    assert found[:3] == ([[]], {}, TermStatistics())


class Broken(LetterEncoder):
    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        vectors = super().encode(texts, kind)
        for vector, text in zip(vectors, texts, strict=True):
            if text == "half broken":
                vector[3] = np.nan
        return vectors


def test_a_vector_that_is_not_finite_is_refused(index_dir: Path) -> None:
    """NaN scores: passages in any order, and a guess that never equals its check."""
    retriever = Retriever(Broken(), Store.open(index_dir))
    for ask in (retriever.encode, lambda texts: retriever.retrieve(texts, 3)):
        with pytest.raises(
            InputError, match=r"^the encoder letters gave a vector that is not finite for 'half broken'$"
        ):
            ask(["fine", "half broken"])
    assert len(retriever.encode(["fine"])) == 1


def test_a_query_without_a_vector_is_refused_by_a_search_that_needs_one(index_dir: Path) -> None:
    """Queries of a word index sent to another: an error about array shapes."""
    words, meaning = (retrievers(index_dir, mode)[0] for mode in ("sparse", "dense"))
    with pytest.raises(InputError, match="no vector"):
        meaning.search(words.encode(["river"]), 1)


def test_words_that_every_question_has_do_not_make_a_table_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A price list has no "what" and no "does": as rare words they made its rows far from every question about them."""
    monkeypatch.setattr(index_searcher, "_COSINE", 0.0)  # so that the words alone count
    rows = [Document(f"d{n}", f"chair {name} | price {n}9 | stock {n}") for n, name in enumerate(WORDS[:8])]
    closeness = {}
    for rules in (3, RULES):
        monkeypatch.setattr(generation_builder, "RULES", rules)
        index = tmp_path / str(rules)
        build_index(rows, index, LetterEncoder(), CONFIG)
        store = Store.open(index, LetterEncoder.identity)
        retriever = Retriever(LetterEncoder(), store, RetrieverConfig(index_dir=str(index)))
        asked = ["price chair mill", "What does the price of the chair mill do?", "What does a passport cost?"]
        closeness[rules] = retriever.retrieve(asked, len(rows)).closeness
    assert closeness[RULES][0] == closeness[RULES][1] == closeness[3][0] > 2 * closeness[3][1]
    assert closeness[RULES][2] < closeness[RULES][0] / 2
