"""The scores of the target suite on made-up outputs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_target import chat_tokenizer

from pipelines.benchmarks import answers
from pipelines.benchmarks.cases.follow_ups import follow_up_cases
from pipelines.benchmarks.harness import Run
from ragspec.config import TargetConfig
from ragspec.core import Message, Passage
from ragspec.evaluation.target_scores import QuestionCase, abstention_scores, answer_f1, passage_with, question_scores
from ragspec.rag.chat.history import PastTurn, build_chat_prompt
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION, quoted_answer
from ragspec.training.documentation import is_for_evaluation
from ragspec.training.reference.mixture import answers_of, canard_pages

CASE = QuestionCase("Who sat?", ["A dog ran.", "The cat sat. It rained."], 2, ["cat", "The cat"])


def test_scores_tell_exact_quotes_from_invented_ones() -> None:
    """A quote counts only as a substring; its number only where the quote is right."""
    outputs = [
        quoted_answer("The cat sat.", 2, "The cat"),
        quoted_answer("A dog ran.", 2, "a dog"),
        quoted_answer("The cat slept.", 2, "cat"),
        "no format at all",
    ]
    scores = question_scores([CASE] * 4, outputs)
    assert scores["quote_exact"] == 0.5
    assert scores["quote_has_answer"] == 0.25
    assert scores["em"] == 0.5
    assert scores["citation_correct"] == 0.5


def test_abstention_counts_both_ways() -> None:
    """Precision over all abstentions, recall over all unanswerable questions."""
    none = QuestionCase("Who flew?", CASE.passages, 1, [])
    scores = abstention_scores([CASE, CASE, none, none], [ABSTENTION, "x", ABSTENTION, "x"])
    assert scores == {"abstain_precision": 0.5, "abstain_recall": 0.5}


def test_f1_ignores_articles_and_case() -> None:
    """As in SQuAD's own script."""
    assert answer_f1("the Cat", "a cat") == 1.0
    assert answer_f1("black cat", "cat") == pytest.approx(2 / 3)
    assert answer_f1("dog", "cat") == 0.0


def test_passages_keep_the_answer_when_cut() -> None:
    """A long paragraph cut at its beginning would make its question unanswerable."""
    text = " ".join(f"Sentence number {i} says a few words more." for i in range(60)) + " The end is near."
    passage = passage_with(text, "What is near?", ["The end"])
    assert "The end is near." in passage and len(passage.split()) <= 120


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Dialogues about twenty towns, some of them for evaluation."""
    rows = []
    for n in range(20):
        asked = ["Who built it?", "Is it old?", "Who crosses it?", "What else?"]
        answers = [
            f"The bridge of Town{n} was built by its people.",
            "I don't know.",
            f"Sheep of Town{n} cross it in May.",
        ]
        turns = [text for pair in zip(asked, [*answers, ""], strict=True) for text in pair]
        for number, question in enumerate(asked, start=1):
            row = {"QuAC_dialog_id": f"C_{n}", "Question_no": number, "Question": question}
            history = [f"Town{n}", "History", *turns[: 2 * number - 2]]
            rows.append({**row, "Rewrite": f"{question} In Town{n}.", "History": history})
    (tmp_path / "canard").mkdir()
    (tmp_path / "canard/dev.json").write_text(json.dumps(rows))
    return tmp_path


def test_follow_ups_are_asked_as_the_chat_asks_them(data: Path) -> None:
    """A gap between two layouts says nothing about follow-ups."""
    prompts = PromptBuilder(chat_tokenizer(), 8192)
    cases = follow_up_cases(data / "canard/dev.json", 9, 0)
    for case, followed in cases:
        passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(case.passages)]
        town = case.question.split()[-1].strip(".")
        said = [
            (f"Who built it? In {town}.", quoted_answer(f"The bridge of {town} was built by its people.", case.gold))
        ]
        history = [PastTurn(*pair, tuple(passages)) for pair in [*said, ("Is it old?", ABSTENTION)]]
        chat = build_chat_prompt(prompts, "", history, "Who crosses it?", passages, 8)
        asked = [*followed.said, Message("user", followed.question)]
        assert chat.prompt_ids == prompts.build(asked, passages, 8).prompt_ids
        assert case.answers[0] in case.passages[case.gold - 1]
    assert len(cases) == sum(is_for_evaluation(f"Town{n}") for n in range(20)) >= 3


def test_no_article_is_both_trained_and_evaluated_on(data: Path) -> None:
    """Remembered answers would pass for understood follow-ups."""
    trained = {answer for _, turns in canard_pages(data) for answer in answers_of(turns)}
    evaluated = {case.answers[0] for case, _ in follow_up_cases(data / "canard/dev.json", 99, 0)}
    assert trained and evaluated and not trained & evaluated


def test_a_target_that_ignores_the_dialogue_has_the_whole_gap(data: Path) -> None:
    """A gap of the wrong sign would make the worst target look best."""

    def reply(cases: list[QuestionCase]) -> list[str]:
        return ["Which one?" if case.said else quoted_answer(case.answers[0], case.gold) for case in cases]

    bench: Any = SimpleNamespace(run=Run(TargetConfig(), data, num_prompts=3), data=data, answers=reply)
    found = answers._answered_follow_ups(bench)
    assert (found["standalone_right"], found["followup_right"], found["followup_gap"]) == (1.0, 0.0, 100.0)
