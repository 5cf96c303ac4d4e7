"""From questions to passages, and from documents to an index."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import ChunkingConfig, EncoderConfig, IndexConfig, RetrieverConfig
from ragspec.core import Document
from ragspec.errors import ConfigError, EncoderMismatch, InputError, StoreMissing
from ragspec.rag.citations import find_citations
from ragspec.retrieval import retriever as retriever_module
from ragspec.retrieval.chunking import sentences
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import RetrievalResult, Retriever, build_index
from ragspec.retrieval_config import AnalyzerConfig

FACTS = [
    Document("rivers", "The Danube flows into the Black Sea. The Rhine flows into the North Sea.", "Rivers"),
    Document("kings", "Charlemagne was crowned in the year 800. He lived in Aachen.", "Kings"),
    Document("plants", "Chlorophyll makes leaves green. Roots take up water.", "Plants"),
    Document("copy", "Chlorophyll makes leaves green. Roots take up water.", "Plants"),
]
LANGUAGES = Path(__file__).with_name("words.json")
QUESTIONS = ["Where does the Danube end?", "Who was crowned in 800?", "Why are leaves green?"]


@pytest.fixture(scope="module")
def facts_dir(tmp_path_factory: pytest.TempPathFactory, encoder: Encoder) -> Path:
    folder = tmp_path_factory.mktemp("facts")
    build_index(FACTS, folder, encoder, IndexConfig(chunking=ChunkingConfig(max_chars=45)))
    return folder


@pytest.mark.parametrize("mode", ["dense", "sparse", "hybrid"])
def test_questions_find_their_facts_alone_and_together(facts_dir: Path, encoder: Encoder, mode: Any) -> None:
    """A batch that shuffles its rows answers everybody with somebody else's passages."""
    retriever = Retriever(encoder, Store.open(facts_dir), RetrieverConfig(mode=mode))
    together = retriever.retrieve(QUESTIONS, 3).passages
    assert [passages[0].document_id for passages in together] == ["rivers", "kings", "copy"]
    assert together == [retriever.retrieve([question], 3).passages[0] for question in QUESTIONS]
    for passages in together:
        scores = [passage.score for passage in passages]
        assert scores == sorted(scores, reverse=True) and len({p.id for p in passages}) == len(passages) <= 3
        for passage in passages:
            text = next(d.text for d in FACTS if d.id == passage.document_id)
            assert text[passage.start : passage.end] == passage.text
    same = together[2][:2]
    if mode == "hybrid":  # the same text is not shown twice
        assert same[0].text != same[1].text
    else:
        assert [p.document_id for p in same] == ["copy", "plants"] and same[0].score == same[1].score


def test_a_word_counts_once_towards_closeness(tmp_path: Path, letters: LetterEncoder) -> None:
    """A German word counted with its English stem too, which its other forms do not have, so German questions abstained more."""
    texts = (
        "Am Fluss liegt ein Dorf. Die Häuser wurden 1874 gebaut, und das ist lange her.",
        "Die Mühle ist alt, und das Wasser fließt nicht mehr.",
        "Der Bäcker ist am Markt, und er hat nur am Morgen offen.",
    )
    closeness = []
    for language in ("auto", "german"):
        config = IndexConfig(words=AnalyzerConfig(language=language))
        with IndexWriter(tmp_path / language, letters, config) as writer:
            for number, text in enumerate(texts):
                writer.upsert(Document(str(number), text))
            writer.commit()
        retriever = Retriever(letters, Store.open(tmp_path / language), RetrieverConfig(abstain_below=0.1))
        closeness.append(retriever.retrieve(["Welches Haus ist am Fluss?", "Wo sind die alten Mühlen?"], 3).closeness)
    assert closeness[0] == closeness[1]


def test_other_languages_are_found_by_word_forms_and_cited(tmp_path: Path, letters: LetterEncoder) -> None:
    """English stems find no "Häuser" for "Haus"; a text of two languages is found by neither; another tenant's text is."""
    questions, texts = zip(*json.loads(LANGUAGES.read_text(encoding="utf-8"))["questions"], strict=True)
    secret = Document("secret", texts[0], owner="ann")
    with IndexWriter(tmp_path, letters) as writer:
        for number, text in enumerate(texts):
            writer.upsert(Document(str(number), text))
            writer.commit()
        writer.upsert(secret)
        writer.commit()
    retriever = Retriever(letters, Store.open(tmp_path), RetrieverConfig(mode="sparse"))
    found = retriever.retrieve(questions, 1).passages
    assert [passage.document_id for (passage,) in found] == list(map(str, range(len(texts))))
    for passage in (passage for (passage,) in found):
        start, end = sentences(passage.text)[1]
        quote = passage.text[start:end]
        (citation,) = find_citations(f"{quote} [1]", [passage])
        assert quote.startswith(passage.text[citation.passage_start : citation.passage_end])
        assert texts[int(passage.document_id)][citation.document_start : citation.document_end] in quote
        assert citation.end - citation.start >= len(quote) - 1


def test_generation_and_edges(facts_dir: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """k above the number of passages, no question, and what names the index."""
    monkeypatch.setattr(retriever_module.Encoder, "load", lambda _: encoder)
    retriever = Retriever.from_config(RetrieverConfig(index_dir=str(facts_dir)), EncoderConfig())
    assert retriever.generation == Store.open(facts_dir).generation
    assert retriever.retrieve([], 3) == RetrievalResult([], retriever.generation)
    assert retriever.retrieve(["leaves"], 0).passages == [[]]
    assert len(retriever.retrieve(["leaves"], 64).passages[0]) == 8


@pytest.mark.parametrize("bad", ["", "  \n", "a\0b", "\ud800", 3])
def test_a_question_that_is_no_text_is_refused(bad: str, facts_dir: Path, encoder: Encoder) -> None:
    """The tokenizer's own error for a surrogate names neither the question nor the place."""
    with pytest.raises(InputError, match="question"):
        Retriever(encoder, Store.open(facts_dir)).retrieve(["fine", bad], 1)


def test_a_wrong_setup_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts_dir: Path, letters: LetterEncoder
) -> None:
    """Half a minute of loading, then "index not found"."""
    with pytest.raises(EncoderMismatch):
        Retriever(letters, Store.open(facts_dir))
    monkeypatch.setattr(retriever_module.Encoder, "load", lambda _: pytest.fail("loaded a model"))
    with pytest.raises(ConfigError, match="index_dir"):
        Retriever.from_config(RetrieverConfig(), EncoderConfig())
    with pytest.raises(StoreMissing):
        Retriever.from_config(RetrieverConfig(index_dir=str(tmp_path / "none")), EncoderConfig())


def test_building_streams_and_reports(tmp_path: Path, letters: LetterEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting all passages before encoding does not fit a large collection."""
    monkeypatch.setattr(
        IndexWriter.__init__, "__kwdefaults__", {**IndexWriter.__init__.__kwdefaults__, "passages_per_encode": 10}
    )
    given: list[int] = []

    def stream() -> Iterator[Document]:
        for n in range(100):
            given.append(n)
            yield Document(str(n), f"Text {n}.")

    seen: list[tuple[int, int, int]] = []
    build_index(stream(), tmp_path, letters, IndexConfig(), lambda d, p: seen.append((d, p, len(given))))
    assert seen == [(n, n - n % 10, n) for n in range(1, 101)]


def test_nothing_to_index_and_double_ids_are_errors(tmp_path: Path, letters: LetterEncoder) -> None:
    """An empty index answers every question with "no passages"; a double id makes citations ambiguous."""
    with pytest.raises(InputError, match="nothing to index"):
        build_index([Document("a", " \n ")], tmp_path, letters, IndexConfig())
    with pytest.raises(InputError, match="two documents have the id 'a'"):
        build_index([Document("a", "x"), Document("a", "y")], tmp_path, letters, IndexConfig())
