"""Learned ranking: definitions before mentions, titles as a field, no passage twice."""

from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import RetrieverConfig
from ragspec.core import Document, Heading, Passage
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.analysis import Analyzer
from ragspec.retrieval.search.bm25 import TermStatistics
from ragspec.retrieval.search.relevance import Features, ListPlace, QueryWeights, Relevance, relevance_of
from ragspec.retrieval_config import AnalyzerConfig

COMMANDS = (
    "monitor who_points_at shows what points at an address: memcheck searches memory for it, then memcheck prints it."
)
FLOUR = "A sack of flour costs nine shillings at the door of the mill on every day of the week but Sunday."


def terms(text: str) -> tuple[str, ...]:
    return tuple(Analyzer(AnalyzerConfig()).terms(text))


def features(question: str, passage: Passage) -> Features:
    weights = QueryWeights.of(question, terms(question), TermStatistics(10))
    return Relevance(terms).features(weights, [passage], [(ListPlace(0.5, 0.9), ListPlace(0.0, 0.0))])[0]


def found(folder: Path, documents: list[Document], question: str, **options: object) -> list[str]:
    build_index(documents, folder, LetterEncoder())
    config = RetrieverConfig(**options)  # type: ignore[arg-type]
    (passages,) = Retriever(LetterEncoder(), Store.open(folder), config).retrieve([question], 4).passages
    return [passage.document_id for passage in passages]


def test_a_definition_comes_before_a_mention(tmp_path: Path) -> None:
    """ "What is Memcheck?" found "Monitor Commands", which names it twice."""
    documents = [
        Document("commands", COMMANDS, title="Monitor Commands"),
        Document("what", "Memcheck is a memory error detector. It can find problems that are common in programs."),
    ]
    assert found(tmp_path / "learned", documents, "What is Memcheck?") == ["what", "commands"]


def test_a_heading_is_a_field_of_its_own() -> None:
    """A heading of one word was levelled over the hundred words below it."""
    text = "It opens at nine."
    under, beside = (Passage("d", 0, text, 0, len(text), heading=heading) for heading in ("The mill", "The bridge"))
    about = features("When does the mill open?", under)
    other = features("When does the mill open?", beside)
    assert about.heading > other.heading and about.last_title > other.last_title and about.told > other.told
    assert relevance_of(about) > relevance_of(other)


def test_an_identifier_is_compared_letter_by_letter() -> None:
    """To the words of a search, json.dump and a JSON dump are the same."""
    texts = (".. function:: dump(obj, fp)\n\n   Writes obj.", "A JSON Dump, as every Dump, has an end.")
    values = [features("What does json.dump do?", Passage("d", 0, text, 0, len(text))).named for text in texts]
    assert values == [0.5, 0.0]


@pytest.mark.parametrize(("other", "last"), [(FLOUR + " Come.", "ab"), (FLOUR.replace("nine", "9"), "z")])
def test_a_passage_that_repeats_a_better_one_comes_last(tmp_path: Path, other: str, last: str) -> None:
    """Three copies of one page were the three sources of an answer; but two prices are two facts."""
    documents = [Document("a", FLOUR), Document("b", other), Document("z", "The flour of the sea is salt.")]
    assert found(tmp_path, documents, "What does a sack of flour cost?")[-1] in last


def test_equal_words_under_two_headings_are_two_facts() -> None:
    """The default of one of two options was pushed behind everything; and passages without words were all copies of the first."""
    relevance, text = Relevance(terms), "The default is zero on every machine."
    one, copy, other = (Passage("d", n, text, 0, len(text), heading=own) for n, own in enumerate(("-a", "-a", "-b")))
    assert relevance.is_repeated(copy, [one]) and not relevance.is_repeated(other, [one])
    titled = Passage("e", 0, text, 0, len(text), title="Another product", heading="-a")
    assert not relevance.is_repeated(titled, [one])
    assert not relevance.is_repeated(Passage("d", 3, "?", 0, 1), [Passage("d", 4, "!", 0, 1)])


def test_a_long_query_is_read_in_part() -> None:
    """A question of a thousand names was looked for in every sentence of every passage."""
    question = " ".join(f"name_{n}.part{n}" for n in range(1000))
    weights = QueryWeights.of(question, terms(question), TermStatistics(10))
    assert max(len(weights.terms), len(weights.weight_of), len(weights.identifiers)) <= 64
    assert weights.terms == terms(question)[:64] and sum(weights.weight_of.values()) == pytest.approx(1.0)
    assert weights.highest_bm25 > 10 * QueryWeights.of("mill", ("mill",), TermStatistics(10)).highest_bm25


def test_headings_of_an_index_count_in_its_search(tmp_path: Path) -> None:
    """A ranking that reads headings only where a test gives them."""
    text = "The mill\n\nIt opens at nine.\n\nThe bridge\n\nIt opens at ten.\n"
    headings = (Heading(0, 1, "The mill"), Heading(text.index("The bridge"), 1, "The bridge"))
    build_index([Document("d", text, headings=headings)], tmp_path, LetterEncoder())
    (passages,) = Retriever(LetterEncoder(), Store.open(tmp_path)).retrieve(["When does the bridge open?"], 2).passages
    assert [passage.heading for passage in passages] == ["The bridge", "The mill"]
