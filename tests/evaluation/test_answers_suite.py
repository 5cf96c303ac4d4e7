"""The suite answers: its measures tell right from wrong, and no question sees its own answer."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from letter_encoder import LetterEncoder
from real_data import DATA, needs_data
from transformers import AutoTokenizer

from pipelines.benchmarks import answers
from pipelines.benchmarks.answers import mixed_passages, ndcg, rank_of
from pipelines.benchmarks.cases.follow_ups import half_of, read_canard, spread
from pipelines.benchmarks.cases.labels import measure_alterations
from pipelines.benchmarks.harness import Run
from ragspec.config import EncoderConfig, IndexConfig, RetrieverConfig, TargetConfig
from ragspec.core import Completion, Document, FinishReason, GenerationStats, Passage, Request, SourceKind
from ragspec.errors import InputError
from ragspec.evaluation.datasets import held_out_articles
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import build_index
from ragspec.training.documentation import DocumentationQuestion, documentation_questions

FLOOR = "math.floor returns the floor of x as an integral number."
OPEN = "The mill opens at nine on weekdays and closes at noon."
NAMES = [
    f"Walter {last}"
    for last in ("Abel", "Brook", "Crane", "Dunn", "Eliot", "Frost", "Grant", "Hale", "Irving", "Joyce")
]


def canard_rows() -> list[dict[str, Any]]:
    """Dialogues about people who all did the same in other places: a question without a name says nothing."""
    rows = []
    for number, name in enumerate(NAMES):
        texts = [f"Who was {name}?", f"{name} was a painter of ships.", "Where was he born?"]
        texts += [f"{name} was born in a village by the lake {number}.", "Did he travel?", "I don't know."]
        for turn in range(1, 4):
            history = [name, "Life", *texts[: 2 * turn - 2]]
            question = texts[2 * turn - 2]
            rewrite = question.replace("he", name)
            row = {"QuAC_dialog_id": f"C_{number}", "Question_no": turn, "Question": question, "Rewrite": rewrite}
            rows.append({**row, "History": history})
        last = {"QuAC_dialog_id": f"C_{number}", "Question_no": 4, "Question": "Why?", "Rewrite": "Why?"}
        rows.append({**last, "History": [name, "Life", *texts]})
    return rows


def asked(question: str, quote: str, path: str) -> DocumentationQuestion:
    return DocumentationQuestion(question, quote, quote, "", "definition", path)


def bench_over(folder: Path, texts: dict[str, tuple[str, str]], questions: list[DocumentationQuestion]) -> Any:
    """The parts of a run that measures of retrieval use, over an index of these texts."""
    encoder = Encoder.load(EncoderConfig())
    build_index([Document(name, *text) for name, text in texts.items()], folder / "index", encoder, IndexConfig())
    store = Store.open(folder / "index", encoder.identity)
    return SimpleNamespace(run=Run(TargetConfig(), folder), encoder=encoder, documentation=(store, questions))


def test_questions_with_their_passage_are_found_and_without_it_abstain(tmp_path: Path) -> None:
    """A measure that counts every first passage as gold, or no abstention at all."""
    texts = {"math.rst": (FLOOR, "math"), "mill.md": (OPEN, "The mill"), "sea.md": ("Salt.", "")}
    questions = [
        asked("What does math.floor return?", FLOOR, "math.rst"),
        asked("When does the mill open on weekdays?", OPEN, "mill.md"),
        asked("What does math.floor return?", "Another quote.", "math.rst"),
    ]
    found = answers._retrieved_documentation(bench_over(tmp_path, texts, questions))
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

    max_context_tokens = 2048


def test_an_abstention_of_either_counts_as_one(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that abstains where its passages are close was counted as answering; a lost answer was not counted."""
    monkeypatch.setattr(answers, "CALIBRATED_THRESHOLD", 0.3)
    texts = {"math.rst": (FLOOR, "math"), "mill.md": (OPEN, "The mill"), "mills.md": (OPEN + " Salt.", "Mills")}
    floor = asked("What does math.floor return?", FLOOR, "math.rst")
    mill = asked("When does the mill open on weekdays?", OPEN, "mill.md")
    lone = asked("What opens at nine on weekdays and closes at noon?", OPEN, "mill.md")  # the other file answers it too
    bench = bench_over(tmp_path, texts, [floor, mill, lone])
    bench.engine = Scripted()
    bench.prompts = PromptBuilder(AutoTokenizer.from_pretrained(tiny_dir), bench.engine.max_context_tokens)
    measured = answers._together(bench)
    assert measured["wrongly_answered_together"] == measured["good_answers_lost_together"] == pytest.approx(1 / 3)
    assert measured["wrongly_answered_target"] == pytest.approx(2 / 3)


def test_ranks_and_grades_count_as_in_trec_eval() -> None:
    """A quote that counts wherever its document is; a gain without its discount, or over an ideal of other documents."""
    passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(("Salt.", FLOOR, FLOOR))]
    assert rank_of(asked("?", FLOOR, "d"), passages) == 1 and rank_of(asked("?", OPEN, "d"), passages) == 3
    assert ndcg([3, 0, 1], [1, 3]) == pytest.approx((3 + 1 / 2) / (3 + 1 / 1.5849625))
    assert ndcg([0, 0], [2]) == ndcg([], []) == 0.0


@pytest.mark.slow
@needs_data
def test_alterations_of_the_data_lose_their_label() -> None:
    """The rule's promise: at most five in a hundred alterations keep their label, every quote equals its source."""
    pages = [question.passage for question in documentation_questions(DATA / "docs", evaluation=True)]
    squad = [p["context"] for article in held_out_articles(DATA) for p in article["paragraphs"]]
    measured = measure_alterations(mixed_passages({"squad": squad, "docs": list(dict.fromkeys(pages))}, 1), 60, 1)
    assert measured["num_altered"] >= 60 and measured["altered_still_supported"] <= 0.05
    assert measured["quoted_confirmed"] == measured["invented_marked"] == 1.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "canard").mkdir()
    (tmp_path / "canard" / "dev.json").write_text(json.dumps(canard_rows()))
    return tmp_path


def test_each_question_has_its_own_answer_as_gold_and_not_in_its_history(data: Path) -> None:
    """A history with the answer in it made every rewriting look perfect."""
    canard = read_canard(data / "canard" / "dev.json")
    documents = {document.id: document for document in canard.documents}
    assert len(documents) == 2 * len(NAMES), "answers that say nothing are no passages"
    assert len(canard.questions) == len(NAMES), "the first question is no follow-up, and the third has no answer"
    for each in canard.questions:
        gold = documents[each.gold]
        assert gold.text not in [turn.answer for turn in each.said] and each.said
        assert gold.title in each.said[0].question and gold.title in each.rewrite
        assert gold.title not in each.question


def test_the_halves_share_no_dialogue_and_stay_what_they_are(data: Path) -> None:
    """What the rules were made on was part of what they are reported on."""
    canard = read_canard(data / "canard" / "dev.json")
    by_title = {each.gold: each.half for each in canard.questions}
    titles = {document.id: document.title for document in canard.documents}
    assert all(half == half_of(titles[gold]) for gold, half in by_title.items())
    assert set(by_title.values()) == {"tuned", "held_out"}
    assert [half_of(name) for name in ("Frank Zappa", "sgd:1_00000")] == ["tuned", "held_out"]


def test_rewriting_changes_what_is_found(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that would be the same whatever the rules do."""
    monkeypatch.setattr(answers, "RetrieverConfig", partial(RetrieverConfig, mode="sparse"))
    monkeypatch.setattr(answers, "TOP", 2)
    bench: Any = SimpleNamespace(run=Run(TargetConfig(), data), encoder=LetterEncoder(), data=data)
    found = answers._follow_ups(bench)
    assert found["follow_up_recall"] == 1.0 > found["follow_up_recall_plain"]
    (data / "canard" / "dev.json").unlink()
    with pytest.raises(InputError, match="canard"):
        answers._follow_ups(bench)


def test_fewer_questions_come_from_all_over(data: Path) -> None:
    """The first rows are of one dialogue."""
    questions = read_canard(data / "canard" / "dev.json").questions
    some = spread(questions, 3)
    assert len(some) == 3 and some[0] is questions[0] and some[2] is questions[2 * len(questions) // 3]
    assert spread(questions, None) == list(questions)
