"""Random changes and searches against a model that keeps documents in a dictionary and scores them by the formulas."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from bm25_formula import formula_scores
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from letter_encoder import CoarseEncoder

from ragspec.config import ChunkingConfig, IndexConfig, RetrieverConfig
from ragspec.core import Document, Passage
from ragspec.errors import InputError
from ragspec.retrieval.chunking import chunk, embedded_text
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search import index_searcher
from ragspec.retrieval.search.analysis import Analyzer
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.retrieval_config import AnalyzerConfig

CONFIG = IndexConfig(chunking=ChunkingConfig(max_chars=40))
IDS = st.sampled_from([f"d{n}" for n in range(12)])
SENTENCES = [
    "The river flows.",
    "A mill stands by the river and grinds corn.",
    "雨が降る。",
    "Stones, stones, stones!",
    "",
]
TEXTS = st.lists(st.sampled_from(SENTENCES), max_size=4).map(" ".join)
OWNERS = st.sampled_from(["", "", "ann", "bob"])
SOURCES = st.sampled_from(["a.txt", "b.txt"])
FILTERS = st.sampled_from(
    [None, {"type": "gte", "key": "n", "value": 2}, {"type": "not", "filter": {"type": "eq", "key": "n", "value": 1}}]
)
QUERIES = st.sampled_from(["the river", "stones and corn", "雨", "mill mill", "The river flows.", "nothing of it"])
DEPTH = 10


class Model:
    """The definition: every passage of every readable document, scored one by one."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}

    def search(self, query: str, k: int, mode: str, tenant: str, low: object) -> list[tuple[str, float]]:
        rankings = {"dense": self.dense, "sparse": self.sparse}
        if mode != "hybrid":
            return [(p.id, score) for p, score in rankings[mode](query, tenant, low)[:k]]
        ranks: dict[tuple[str, int], list[int]] = {}
        for ranking in (self.dense, self.sparse):
            for rank, (p, _) in enumerate(ranking(query, tenant, low), 1):
                ranks.setdefault((p.document_id, p.ordinal), []).append(rank)
        first = {key: [rank for rank in own if rank <= DEPTH] or [min(own)] for key, own in ranks.items()}
        fused = {key: sum(1 / (60 + rank) for rank in own) for key, own in first.items()}
        ordered = sorted(fused.items(), key=lambda item: (-item[1], item[0]))
        return [(f"{name}#{ordinal}", score) for (name, ordinal), score in ordered[:k]]

    def passages(self, tenant: str) -> Iterator[tuple[Document, Passage]]:
        for document in self.documents.values():
            if document.owner in ("", tenant):
                yield from ((document, passage) for passage in chunk(document, CONFIG.chunking))

    def dense(self, query: str, tenant: str, low: object) -> list[tuple[Passage, float]]:
        (vector,) = CoarseEncoder().encode([query])
        found = []
        for document, passage in self.passages(tenant):
            score = 0.0
            for a, b in zip(CoarseEncoder().encode([embedded_text(passage)])[0], vector, strict=True):
                score += float(a) * float(b)
            if passes(document, low):
                found.append((passage, score))
        return ranked(found)

    def sparse(self, query: str, tenant: str, low: object) -> list[tuple[Passage, float]]:
        analyzer, texts = Analyzer(AnalyzerConfig()), list(self.passages(tenant))
        rows = [analyzer.terms(embedded_text(passage)) for _, passage in texts]
        scores = formula_scores(rows, [True] * len(rows), analyzer.terms(query))
        return ranked([(texts[row][1], score) for row, score in scores.items() if passes(texts[row][0], low)])


def passes(document: Document, condition: object) -> bool:
    if condition is None:
        return True
    number = document.metadata.get("n")
    if isinstance(condition, dict) and condition["type"] == "gte":
        return number is not None and number >= 2
    return number != 1


def ranked(found: list[tuple[Passage, float]]) -> list[tuple[Passage, float]]:
    return sorted(found, key=lambda item: (-item[1], item[0].document_id, item[0].ordinal))


class IndexMachine(RuleBasedStateMachine):
    """Every change goes through a writer of its own, and one retriever follows them all."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.encoder, self.model = CoarseEncoder(), Model()
        with IndexWriter(self.folder, self.encoder, CONFIG) as writer:
            writer.commit()
        store = Store.open(self.folder)
        modes = ("dense", "sparse", "hybrid")
        self.retrievers = {m: Retriever(self.encoder, store, RetrieverConfig(mode=m, fusion="rank")) for m in modes}

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(ids=st.lists(IDS, min_size=1, max_size=3), text=TEXTS, owner=OWNERS, source=SOURCES, n=st.integers(0, 3))
    def upsert(self, ids: list[str], text: str, owner: str, source: str, n: int) -> None:
        with IndexWriter(self.folder, self.encoder, passages_per_encode=2) as writer:
            for document_id in ids:
                metadata = {"n": n} if n else {}
                older = self.model.documents.get(document_id)
                if older is not None and older.owner != owner:  # an id belongs to its owner until it is deleted
                    with pytest.raises(InputError, match="another owner"):
                        writer.upsert(Document(document_id, text, owner=owner))
                    assert writer.delete(document_id)
                document = Document(document_id, text, f"Title {n}" if n > 1 else "", source, metadata, owner)
                writer.upsert(document)
                self.model.documents[document_id] = document
            writer.commit()

    @rule(document_id=IDS)
    def delete(self, document_id: str) -> None:
        with IndexWriter(self.folder) as writer:
            assert writer.delete(document_id) == (self.model.documents.pop(document_id, None) is not None)
            writer.commit()

    @rule(source=SOURCES)
    def delete_source(self, source: str) -> None:
        gone = [d.id for d in self.model.documents.values() if d.source == source]
        with IndexWriter(self.folder) as writer:
            assert writer.delete_source(source) == len(gone)
            writer.commit()
        for document_id in gone:
            del self.model.documents[document_id]

    @rule()
    def compact(self) -> None:
        with IndexWriter(self.folder) as writer:
            writer.compact()

    @rule(document_id=IDS)
    def abandon(self, document_id: str) -> None:
        with IndexWriter(self.folder, self.encoder, passages_per_encode=1) as writer:
            owner = self.model.documents[document_id].owner if document_id in self.model.documents else ""
            writer.upsert(Document(document_id, "Never committed. The river.", owner=owner))
            writer.delete(document_id)

    @rule(
        query=QUERIES,
        k=st.integers(1, 15),
        mode=st.sampled_from(["dense", "sparse", "hybrid"]),
        tenant=OWNERS,
        low=FILTERS,
    )
    def search(self, query: str, k: int, mode: str, tenant: str, low: object) -> None:
        scope = SearchScope(tenant, None if low is None else parse_filter(low))  # type: ignore[arg-type]
        (found,) = self.retrievers[mode].retrieve([query], k, scope).passages
        assert [(p.id, p.score) for p in found] == self.model.search(query, k, mode, tenant, low)

    @invariant()
    def holds_the_documents(self) -> None:
        if hasattr(self, "folder"):
            assert {d.id: d for d in Store.open(self.folder).documents()} == self.model.documents


@pytest.mark.parametrize(("examples", "steps"), [(5, 25), pytest.param(25, 50, marks=pytest.mark.slow)])
def test_random_changes_and_searches_agree_with_the_model(
    examples: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document found after its deletion, an old version, a score of yesterday's statistics."""
    monkeypatch.setattr(index_searcher, "FUSION_DEPTH", DEPTH)
    limits = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(IndexMachine, settings=limits)
