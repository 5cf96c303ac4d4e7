"""One truth: the same hits and scores in any batch, shard layout, segment layout and order of arrival."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from letter_encoder import CoarseEncoder, LetterEncoder
from split_shards import one_each

from ragspec.config import ChunkingConfig, DenseConfig, IndexConfig, RetrieverConfig
from ragspec.core import Document, Passage
from ragspec.errors import StoreCorrupt
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search import index_searcher
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.index_searcher import reciprocal_rank_fusion
from ragspec.retrieval.search.segment_search import SearchHit, SearchScope, Shard

CONFIG = IndexConfig(chunking=ChunkingConfig(max_chars=60))
QUERIES = ["river stone", "the old mill by the river", "a bridge", "corn corn corn", "mill", "unknownword", "the"]
WORDS = "river stone bridge mill corn water old new tall the the the a of".split()


def corpus(count: int) -> list[Document]:
    def text(number: int) -> str:
        words = (WORDS[(number * 7 + i * i * 3 + i) % len(WORDS)] for i in range(5 + number % 9))
        return f"{' '.join(words).capitalize()}. {WORDS[number % 7].capitalize()} again."

    return [
        Document(
            f"d{number:03d}", text(number), "", f"{number % 4}.txt", {"n": number}, ["", "", "ann", "bob"][number % 4]
        )
        for number in range(count)
    ]


def in_segments(folder: Path, documents: Sequence[Document], per_segment: int, encoder: LetterEncoder) -> Path:
    with IndexWriter(folder, encoder, CONFIG) as writer:
        for number, document in enumerate(documents):
            writer.upsert(document)
            if number % per_segment == per_segment - 1:
                writer.commit()
        writer.commit()
    return folder


def passages(found: list[list[Passage]]) -> list[list[tuple[str, float, str]]]:
    return [[(passage.id, passage.score, passage.text) for passage in some] for some in found]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same documents in one segment, in many, in another order, and after deletions and compaction."""
    base, encoder, documents = tmp_path_factory.mktemp("layouts"), CoarseEncoder(), corpus(60)
    folders = [in_segments(base / str(n), documents, n, encoder) for n in (60, 7)]
    folders.append(in_segments(base / "reversed", documents[::-1], 13, encoder))
    strangers = [Document(f"x{n}", f"Stranger {n} of the river mill.", owner="bob") for n in range(30)]
    older = [replace(document, text=f"Older text {document.id}. The river.") for document in documents[::3]]
    for name, compacted in (("deleted", False), ("compacted", True)):
        folder = in_segments(base / name, [*strangers, *older, *documents], 11, encoder)
        with IndexWriter(folder) as writer:
            for stranger in strangers:
                assert writer.delete(stranger.id)
            writer.commit()
            if compacted:
                writer.compact()
        folders.append(folder)
    return folders


SCOPES = SearchScope(), SearchScope("ann"), SearchScope("bob", parse_filter({"type": "lt", "key": "n", "value": 40}))


@pytest.mark.parametrize(("mode", "scope"), [*zip(["dense", "sparse", "hybrid"], SCOPES, strict=True)])
def test_every_layout_gives_the_same_passages_and_scores(
    layouts: list[Path], mode: Any, scope: SearchScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that depend on which segment a passage lies in, on deleted neighbours, or on the order of arrival."""
    monkeypatch.setattr(index_searcher, "FUSION_DEPTH", 30)
    config = RetrieverConfig(mode=mode)
    expected = None
    for folder in layouts:
        store = Store.open(folder)
        for shard in (Shard.open(store.segments), one_each(store)):
            retriever = Retriever(CoarseEncoder(), store, config, shard=lambda _, shard=shard: shard)
            together = passages(retriever.retrieve(QUERIES, 12, scope).passages)
            alone = [passages(retriever.retrieve([query], 12, scope).passages)[0] for query in QUERIES]
            fewer = passages(retriever.retrieve(QUERIES, 5, scope).passages)
            assert together == alone and fewer == [some[:5] for some in together]
            expected = expected or together
            assert together == expected
    assert expected is not None and sum(map(len, expected)) > 50


def test_many_scopes_do_not_fill_the_memory(layouts: list[Path]) -> None:
    """A mask of every row for every tenant that ever asked."""
    shard = Shard.open(Store.open(layouts[0]).segments)
    (segment,) = shard.part_of.values()
    for number in range(200):
        shard.dense(CoarseEncoder().encode(["x"]), 3, SearchScope(f"tenant {number}"))
    assert segment._allowed.cache_info().currsize <= 64


def test_fusion_follows_its_definition() -> None:
    """A rank counted from 0, or a tie that falls as a dictionary happens to be filled."""

    def hit(document_id: str, score: float = 0.0) -> SearchHit:
        return SearchHit(-score, document_id, 0, "s", 0)

    fused = reciprocal_rank_fusion([[hit("a"), hit("b"), hit("c")], [hit("c"), hit("b"), hit("d")]], 9)
    assert [(h.document_id, h.score) for h in fused] == [
        ("c", 1 / 63 + 1 / 61),
        ("b", 1 / 62 + 1 / 62),
        ("a", 1 / 61),
        ("d", 1 / 63),
    ]
    tied = reciprocal_rank_fusion([[hit("z"), hit("a")], [hit("a"), hit("z")]], 9)
    assert [h.document_id for h in tied] == ["a", "z"]
    assert reciprocal_rank_fusion([[], []], 9) == []
    deep = reciprocal_rank_fusion([[hit("a"), hit("b"), hit("c")], [hit("c"), hit("b"), hit("d"), hit("e")]], 1)
    assert [(h.document_id, h.score) for h in deep] == [
        ("a", 1 / 61),
        ("c", 1 / 61),
        ("b", 1 / 62),
        ("d", 1 / 63),
        ("e", 1 / 64),
    ]


def test_filters_for_1_and_for_true_are_two_filters(tmp_path: Path) -> None:
    """Python holds 1 and True for equal, so the second filter got the passages of the first."""
    documents = [Document("num", "Fact.", metadata={"x": 1}), Document("bool", "Fact.", metadata={"x": True})]
    build_index(documents, tmp_path, CoarseEncoder(), CONFIG)
    retriever = Retriever(CoarseEncoder(), Store.open(tmp_path))
    for value, expected in ((1, "num"), (True, "bool"), (1, "num")):
        scope = SearchScope("", parse_filter({"type": "eq", "key": "x", "value": value}))
        assert [p.document_id for p in retriever.retrieve(["fact"], 5, scope).passages[0]] == [expected]


@pytest.mark.parametrize("mode", ["dense", "sparse", "hybrid"])
def test_of_many_ties_the_first_by_id_are_found(tmp_path: Path, mode: Any) -> None:
    """Seconds and gigabytes for a sentence that a thousand documents share; or whichever of them came first."""
    ids = [f"{number * 7919 % 1000:05d}é" for number in range(1000)]
    with IndexWriter(tmp_path, CoarseEncoder(), CONFIG) as writer:
        for number, name in enumerate(ids):
            writer.upsert(Document(name, "All rights reserved."))
            if number == 300:
                writer.commit()
        writer.commit()
    retriever = Retriever(CoarseEncoder(), Store.open(tmp_path), RetrieverConfig(mode=mode))
    found = retriever.retrieve(["rights"], 20).passages[0]
    assert [p.document_id for p in found] == sorted(ids)[:20]
    segments = Store.open(tmp_path).segments
    hits = Shard.open(segments).dense(CoarseEncoder().encode(["rights"]), 20, SearchScope())
    assert len(hits[0]) == 20


def test_a_shard_that_lost_its_generation_is_asked_for_the_newer_one(layouts: list[Path]) -> None:
    """A query that fails because two commits came between its first and its second look."""
    opened: list[Store] = []

    class Losing(Shard):
        def dense(self, queries: FloatArray, k: int, scope: SearchScope) -> list[list[SearchHit]]:
            if len(opened) == 1:
                raise StoreCorrupt("generation-000001 cannot be read")
            return super().dense(queries, k, scope)

    def shard(store: Store) -> Shard:
        opened.append(store)
        return Losing.open(store.segments)

    store = Store.open(layouts[0])
    retriever = Retriever(CoarseEncoder(), store, RetrieverConfig(mode="dense"), shard=shard)
    with pytest.raises(StoreCorrupt):
        retriever.retrieve(["river"], 3)
    retriever._view.store = Store.open(layouts[0])
    newer = Store(store.index_dir, store.pointer + " ", store.manifest, store.segments)
    turns = iter([retriever._view.store, newer])
    retriever._view.store.refreshed = lambda: next(turns)  # type: ignore[method-assign]
    newer.refreshed = lambda: newer  # type: ignore[method-assign]
    assert len(retriever.retrieve(["river"], 3).passages[0]) == 3 and len(opened) == 2


def test_a_new_generation_that_is_gone_already_is_passed_over(layouts: list[Path]) -> None:
    """A service that stops answering because its shards were too late for one generation of many."""
    store = Store.open(layouts[0])
    late = Store(store.index_dir, "late", store.manifest, store.segments)
    newest = Store(store.index_dir, "newest", store.manifest, store.segments)
    store.refreshed, late.refreshed = (lambda: late), (lambda: newest)  # type: ignore[method-assign]
    newest.refreshed = lambda: newest  # type: ignore[method-assign]

    def shard(opened: Store) -> Shard:
        if opened is late:
            raise StoreCorrupt("generation-000002 cannot be read")
        return Shard.open(opened.segments)

    retriever = Retriever(CoarseEncoder(), store, shard=shard)
    assert len(retriever.retrieve(["river"], 3).passages[0]) == 3
    assert retriever._view.store is newest


class Overlap:
    """A reranker: the share of the query's letters in a text, with a passage's length to break no tie."""

    def scores(self, query: str, texts: Sequence[str]) -> Any:
        return [float(len(set(query) & set(text)) // 3) for text in texts]


def test_a_reranker_has_the_last_word_over_a_deeper_list(layouts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reranking only what would have been returned anyway; ties that fall by the order of arrival."""
    monkeypatch.setattr(index_searcher, "RERANK_DEPTH", 25)
    store, config = Store.open(layouts[1]), RetrieverConfig()
    plain = Retriever(CoarseEncoder(), store, config)
    reranked = Retriever(CoarseEncoder(), store, config, reranker=Overlap())
    for query in QUERIES:
        (deep,) = plain.retrieve([query], 25).passages
        (found,) = reranked.retrieve([query], 4).passages
        scored = [replace(p, score=Overlap().scores(query, [p.text])[0]) for p in deep]
        expected = sorted(scored, key=lambda p: (-p.score, p.document_id, p.ordinal))[:4]
        assert found == expected
    (wide,) = reranked.retrieve(["the river"], 40).passages
    assert len(wide) == 40


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_an_approximate_index_is_one_truth_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Answers of HNSW and IVF that depend on the batch, on threads or on how segments are spread over machines."""
    pytest.importorskip("faiss")
    monkeypatch.setattr("ragspec.retrieval.search.faiss_index.MIN_ROWS", 150)
    encoder = LetterEncoder()
    config = IndexConfig(dense=DenseConfig(kind=kind, factory="" if kind == "hnsw" else "IVF8,SQ8"))
    documents = [Document(str(n), f"Text {n}.", metadata={"n": n}) for n in range(420)]
    found = []
    for name in ("one", "two"):
        with IndexWriter(tmp_path / name, encoder, config) as writer:
            for number, document in enumerate(documents):
                writer.upsert(document)
                if number in (200, 400):
                    writer.commit()
            writer.commit()
        with IndexWriter(tmp_path / name) as writer:
            writer.delete("5")
            writer.commit()
        store = Store.open(tmp_path / name)
        assert ["dense.faiss" in s.segment.record.files for s in store.segments] == [True, True, False]
        first = store.segments[0].segment
        assert kind == "ivf" or first.nearest(on_gpu=True) is first.nearest(), (
            "searchers of both kinds share what has one form"
        )
        for shard in (Shard.open(store.segments), one_each(store)):
            retriever = Retriever(encoder, store, RetrieverConfig(mode="dense"), shard=lambda _, shard=shard: shard)
            queries = [f"Text {n}." for n in range(0, 420, 30)]
            found.append(passages(retriever.retrieve(queries, 10).passages))
            assert found[-1] == [passages(retriever.retrieve([query], 10).passages)[0] for query in queries]
            few = SearchScope("", parse_filter({"type": "in", "key": "n", "value": [5, 6, 250, 419]}))
            many = SearchScope("", parse_filter({"type": "gte", "key": "n", "value": 100}))
            assert {p.document_id for p in retriever.retrieve(["x"], 10, few).passages[0]} == {"6", "250", "419"}
            everything = {p.document_id for p in retriever.retrieve(["x"], 64, many).passages[0]}
            assert len(everything) == 64 and min(map(int, everything)) >= 100
    assert all(each == found[0] for each in found)
    exact = [
        Retriever(encoder, store, RetrieverConfig(mode="dense")).retrieve([q], 1).passages[0][0].id for q in queries
    ]
    assert sum(a[0][0] == b for a, b in zip(found[0], exact, strict=True)) >= 11


def test_word_search_encodes_nothing(layouts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of a model for an answer that never looks at vectors."""
    monkeypatch.setattr(CoarseEncoder, "encode", lambda *_: pytest.fail("encoded"))
    Retriever(CoarseEncoder(), Store.open(layouts[0]), RetrieverConfig(mode="sparse")).retrieve(QUERIES, 3)
