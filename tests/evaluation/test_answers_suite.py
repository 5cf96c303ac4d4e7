"""The suite answers: its measures tell right from wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from real_data import DATA, needs_data
from transformers import AutoTokenizer

from ragspec.config import EncoderConfig, IndexConfig, RetrieverConfig
from ragspec.core import Completion, Document, FinishReason, GenerationStats, Passage, Request, SourceKind
from ragspec.errors import InputError
from ragspec.evaluation.suites.answers.altered_sentences import labels_of, measure_alterations
from ragspec.evaluation.suites.answers.json_outputs import is_valid
from ragspec.evaluation.suites.answers.read_sentences import sentences_to_read, supported_precision, write_sentences
from ragspec.evaluation.suites.answers.retrieved import measure_retrieval, measure_together, rank_of
from ragspec.evaluation.suites.answers.suite import mixed_passages
from ragspec.evaluation.timing import no_tick
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.training.documentation import DocumentationQuestion, documentation_questions

FLOOR = "math.floor returns the floor of x as an integral number."
OPEN = "The mill opens at nine on weekdays and closes at noon."


def asked(question: str, quote: str, path: str) -> DocumentationQuestion:
    return DocumentationQuestion(question, quote, quote, "", "definition", path)


def test_questions_with_their_passage_are_found_and_without_it_abstain(tmp_path: Path) -> None:
    """A measure that counts every first passage as gold, or no abstention at all."""
    encoder = Encoder.load(EncoderConfig())
    documents = [
        Document("math.rst", FLOOR, "math"),
        Document("mill.md", OPEN, "The mill"),
        Document("sea.md", "Salt."),
    ]
    build_index(documents, tmp_path, encoder, IndexConfig())
    questions = [
        asked("What does math.floor return?", FLOOR, "math.rst"),
        asked("When does the mill open on weekdays?", OPEN, "mill.md"),
        asked("What does math.floor return?", "Another quote.", "math.rst"),
    ]
    found = measure_retrieval(Store.open(tmp_path, encoder.identity), encoder, questions, no_tick)
    assert found["doc_top1"] == found["doc_top3"] == pytest.approx(2 / 3)
    assert found["good_answers_lost"] == found["wrongly_answered_ratio"] == 0.0
    assert found["num_doc_questions"] == 3 and found["retrieval_p50_ms"] > 0


class Scripted:
    """Answers every question but those about a mill."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        for request in requests:
            asked = "".join(each.text for each in request.sources if each.kind is SourceKind.HISTORY)
            text = ABSTENTION if "mill" in asked else '"Salt." [1]'
            yield Completion(request.id, 0, (1,), text, FinishReason.STOP, (), GenerationStats())

    def close(self) -> None:
        pass


def test_an_abstention_of_either_counts_as_one(tmp_path: Path, tiny_dir: Path) -> None:
    """A target that abstains where its passages are close was counted as answering; a lost answer was not counted."""
    encoder = Encoder.load(EncoderConfig())
    names = {"math.rst": (FLOOR, "math"), "mill.md": (OPEN, "The mill"), "mills.md": (OPEN + " Salt.", "Mills")}
    build_index([Document(name, *text) for name, text in names.items()], tmp_path, encoder, IndexConfig())
    config = RetrieverConfig(abstain_below=0.3)
    retriever = Retriever(encoder, Store.open(tmp_path, encoder.identity), config)
    prompts = PromptBuilder(AutoTokenizer.from_pretrained(tiny_dir), 2048)
    pipeline = Pipeline(retriever, Scripted(), prompts)
    floor = asked("What does math.floor return?", FLOOR, "math.rst")
    mill = asked("When does the mill open on weekdays?", OPEN, "mill.md")
    lone = asked("What opens at nine on weekdays and closes at noon?", OPEN, "mill.md")  # the other file answers it too
    measured = measure_together(pipeline, retriever, [floor, mill, lone], no_tick, 0.3)
    assert measured["wrongly_answered_together"] == measured["good_answers_lost_together"] == pytest.approx(1 / 3)
    assert measured["wrongly_answered_target"] == pytest.approx(2 / 3)


def test_the_rank_is_the_first_passage_with_the_quote() -> None:
    """A quote that counts wherever its document is."""
    passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(("Salt.", FLOOR, FLOOR))]
    assert rank_of(asked("?", FLOOR, "d"), passages) == 1 and rank_of(asked("?", OPEN, "d"), passages) == 3


@pytest.mark.parametrize(
    ("name", "text", "valid"),
    [
        ("facts", '{"subject": "mill", "year": 1874}', True),
        ("facts", '{"subject": "mill", "year": true}', False),
        ("facts", '{"subject": "mill"}', False),
        ("facts", '{"subject": "mill", "year": 18', False),
        ("words", '["yes", "no"]', True),
        ("words", '["maybe"]', False),
        ("words", "[]", False),
    ],
)
def test_outputs_that_break_their_schema_are_counted(name: str, text: str, valid: bool) -> None:
    """A parser that is content with any JSON."""
    assert is_valid(name, text) == valid


@needs_data
def test_alterations_of_the_data_lose_their_label() -> None:
    """The rule's promise: at most five in a hundred alterations keep their label, every quote equals its source."""
    pages = [question.passage for question in documentation_questions(DATA / "docs", evaluation=True)]
    measured = measure_alterations(mixed_passages(DATA, list(dict.fromkeys(pages)), 1), 60, 1)
    assert measured["num_altered"] >= 60 and measured["altered_still_supported"] <= 0.05
    assert measured["quoted_confirmed"] == measured["invented_marked"] == 1.0


def test_verdicts_count_for_supported_sentences_alone(tmp_path: Path) -> None:
    """A sheet that shows its labels, in its order or by name; verdicts on other sentences that count; 100 % without a reader."""
    texts = [f"The mill {n} was built in {1800 + n} by the people of the valley." for n in range(300)]
    passages = [Passage(f"p{n}", 0, text, 0, len(text)) for n, text in enumerate(texts)]
    read, verdicts = sentences_to_read(passages, 3), tmp_path / "verdicts.jsonl"
    assert read == sentences_to_read(passages, 3) != sentences_to_read(passages, 4)
    assert len(read) == len({each.name for each in read}) == 250
    labels = ["supported" if each.is_supported else "unsupported" for each in read]
    assert labels.count("supported") == 200 and "unsupported" in labels[:50]
    found = [labels_of(each.text, Passage("p", 0, each.passage, 0, len(each.passage))) for each in read]
    assert found == [[label] for label in labels]
    assert supported_precision(read, verdicts) == {"supported_precision": None, "supported_judged": 0}
    write_sentences(read, tmp_path)
    sheet = (tmp_path / "supported_sentences.md").read_text()
    assert "supported" not in sheet and all(f"## {each.name}" in sheet for each in read)
    assert list(json.loads((tmp_path / "supported_key.json").read_text()).values()) == labels
    said = ["no" if number % 4 == 0 else "yes" for number in range(250)]
    lines = [json.dumps({"sentence": each.name, "verdict": word}) for each, word in zip(read, said, strict=True)]
    verdicts.write_text("\n".join([*lines, '{"sentence": "of another run", "verdict": "no"}']))
    confirmed = [word == "yes" for word, label in zip(said, labels, strict=True) if label == "supported"]
    expected = {"supported_precision": sum(confirmed) / 200, "supported_judged": 200}
    assert supported_precision(read, verdicts) == expected
    verdicts.write_text('{"sentence": "x", "verdict": "perhaps"}')
    with pytest.raises(InputError, match="no verdict"):
        supported_precision(read, verdicts)
