"""The scores of the target suite on made-up outputs."""

import json
import math
from pathlib import Path

import pytest
from ragspec.evaluation.suites import target
from ragspec.evaluation.suites.chat_pairs import chat_requests, shuffled_pairs, verdict_scores, write_pairs
from ragspec.evaluation.suites.target import abstention_scores, follow_up_scores, question_scores
from ragspec.evaluation.suites.target_cases import QuestionCase, follow_up_cases, passage_with
from tiny_target import chat_tokenizer

from ragspec.core import Message, Passage
from ragspec.errors import InputError
from ragspec.evaluation.datasets import Sentence
from ragspec.evaluation.metrics import answer_f1
from ragspec.rag.chat.prompt import PastTurn, build_chat_prompt
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.wording import ABSTENTION, quoted_answer
from ragspec.training import conversations
from ragspec.training.documentation import is_for_evaluation
from ragspec.training.reference.sources import answers_of, canard_pages

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
    """Dialogues about twenty towns, some of them for evaluation, and three requests."""
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
    for folder, name, text in (
        ("canard", "dev.json", json.dumps(rows)),
        ("mt_bench", "vicuna_bench_question.jsonl", "".join(f'{{"turns": ["Request {n}."]}}\n' for n in range(3))),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    return tmp_path


def test_few_sentences_bring_few_clean_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick run of six sentences that corrected two hundred clean ones besides, most of its time."""
    monkeypatch.setattr(
        target, "jfleg_sentences", lambda _, count: [Sentence(f"s{n}", "jfleg", "A", ("A",)) for n in range(count)]
    )
    monkeypatch.setattr(target, "clean_sentences", lambda _, count: ["It rained."] * count)
    monkeypatch.setattr(target, "jfleg_gleu", lambda sentences, outputs: (0.0, 0.0))
    sizes: list[int] = []

    def generate(prompts: list[list[conversations.Message]], passages: object = ()) -> list[str]:
        sizes.append(len(prompts))
        return ["It rained."] * len(prompts)

    target.grammar_scores(Path(), generate, 6)
    target.grammar_scores(Path(), generate, 754)
    assert sizes == [6, 6, 754, 200]


def test_follow_ups_are_asked_as_the_chat_asks_them(data: Path) -> None:
    """A gap between two layouts says nothing about follow-ups."""
    prompts = PromptBuilder(chat_tokenizer(), 8192)
    cases = follow_up_cases(data / "canard/dev.json", 9, 0)
    for case, dialogue in cases:
        passages = [Passage("d", n, text, 0, len(text)) for n, text in enumerate(case.passages)]
        town = case.question.split()[-1].strip(".")
        said = [
            (f"Who built it? In {town}.", quoted_answer(f"The bridge of {town} was built by its people.", case.gold))
        ]
        history = [PastTurn(*pair, tuple(passages)) for pair in [*said, ("Is it old?", ABSTENTION)]]
        chat = build_chat_prompt(prompts, "", history, "Who crosses it?", passages, 8)
        assert chat.prompt_ids == prompts.tokens([Message(m["role"], m["content"]) for m in dialogue])
        assert case.answers[0] in case.passages[case.gold - 1]
    assert len(cases) == sum(is_for_evaluation(f"Town{n}") for n in range(20)) >= 3


def test_no_article_is_both_trained_and_evaluated_on(data: Path) -> None:
    """Remembered answers would pass for understood follow-ups."""
    trained = {answer for _, turns in canard_pages(data) for answer in answers_of(turns)}
    evaluated = {case.answers[0] for case, _ in follow_up_cases(data / "canard/dev.json", 99, 0)}
    assert trained and evaluated and not trained & evaluated


def test_a_target_that_ignores_the_dialogue_has_the_whole_gap(data: Path) -> None:
    """A gap of the wrong sign would make the worst target look best."""

    def generate(prompts: list[list[conversations.Message]], passages: object) -> list[str]:
        golds = [case for case, _ in follow_up_cases(data / "canard/dev.json", 3, 0)]
        right = [quoted_answer(case.answers[0], case.gold) for case in golds]
        return [text if len(prompt) == 2 else "Which one?" for prompt, text in zip(prompts, right, strict=True)]

    path = data / "canard/dev.json"
    expected = {"standalone_right": 1.0, "followup_right": 0.0, "followup_gap": 100.0}
    assert follow_up_scores(path, generate, 3, 0) == expected
    assert math.isnan(follow_up_scores(data / "none", generate, 3, 0)["followup_gap"])


def test_verdicts_count_for_the_answers_that_were_read(data: Path, tmp_path: Path) -> None:
    """Old verdicts praised new answers; a reader who prefers side A praised the adapter."""
    requests, verdicts = chat_requests(data, 99, 0), tmp_path / "verdicts.jsonl"
    adapted, unadapted = ["good"] * 3, ["bad"] * 3
    pairs = shuffled_pairs(requests, (adapted, unadapted), 0)
    assert sorted(requests) == ["Request 0.", "Request 1.", "Request 2."]
    assert math.isnan(verdict_scores(pairs, verdicts)["chat_not_worse"])
    write_pairs(pairs, tmp_path)
    key = json.loads((tmp_path / "chat_key.json").read_text())
    text = (tmp_path / "chat_pairs.md").read_text()
    assert all(name in text for name in key) and text.count("good") == 3
    other = {"A": "B", "B": "A"}
    given = [key[pairs[0].name], other[key[pairs[1].name]], "same"]
    lines = [json.dumps({"pair": pair.name, "verdict": each}) for pair, each in zip(pairs, given, strict=True)]
    verdicts.write_text("\n".join(lines))
    assert verdict_scores(pairs, verdicts) == {"chat_not_worse": pytest.approx(2 / 3), "chat_judged": 3}
    renewed = shuffled_pairs(requests, (["good", "new", "good"], unadapted), 0)
    assert verdict_scores(renewed, verdicts) == {"chat_not_worse": 1.0, "chat_judged": 2}
    verdicts.write_text('{"pair": "x", "verdict": "C"}')
    with pytest.raises(InputError, match="'C'"):
        verdict_scores(pairs, verdicts)
