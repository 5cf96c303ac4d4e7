"""The measurement of follow-up questions: what counts as found, and that no question sees its own answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import RetrieverConfig
from ragspec.errors import InputError
from ragspec.evaluation.suites.follow_ups import (
    AS_ASKED,
    PERSON,
    RULES,
    half_of,
    measure_follow_ups,
    read_canard,
    read_sgd,
    spread,
)

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


def sgd_lines() -> list[str]:
    lines = []
    for number, name in enumerate(NAMES):
        turns = [
            ["USER", "I want to eat something."],
            ["SYSTEM", f"How do you like the restaurant {name} in San Jose?"],
            ["USER", "Good. What is their address?"],
            ["SYSTEM", f"{name} is at {number} Lake Street. Anything else?"],
        ]
        lines.append(json.dumps({"id": f"1_{number}", "services": [], "turns": turns}))
    return lines


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("canard", "sgd"):
        (tmp_path / name).mkdir()
    (tmp_path / "canard" / "dev.json").write_text(json.dumps(canard_rows()))
    (tmp_path / "sgd" / "dev.jsonl").write_text("\n".join(sgd_lines()))
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
    sgd = read_sgd(data / "sgd" / "dev.jsonl")
    texts = {document.id: document.text for document in sgd.documents}
    for each in sgd.questions:
        assert "Lake Street" in texts[each.gold] and not any("Lake Street" in turn.answer for turn in each.said)
        assert "?" not in texts[each.gold]


def test_the_halves_share_no_dialogue_and_stay_what_they_are(data: Path) -> None:
    """What the rules were made on was part of what they are reported on."""
    canard = read_canard(data / "canard" / "dev.json")
    by_title = {each.gold: each.half for each in canard.questions}
    titles = {document.id: document.title for document in canard.documents}
    assert all(half == half_of(titles[gold]) for gold, half in by_title.items())
    assert set(by_title.values()) == {"tuned", "held_out"}
    assert [half_of(name) for name in ("Frank Zappa", "sgd:1_00000")] == ["tuned", "held_out"]


def test_what_is_found_with_rewriting_and_without_is_counted(data: Path) -> None:
    """A figure that would be the same whatever the rules do."""
    asked: list[tuple[str, int, int]] = []
    config = RetrieverConfig(mode="sparse")
    for half in ("tuned", "held_out"):
        found = measure_follow_ups(
            data,
            LetterEncoder(),
            num_passages=2,
            retriever=config,
            half=half,  # type: ignore[arg-type]
            tick=lambda *seen: asked.append(seen),
        )
        assert set(found) == {"canard", "sgd"}
        for name, recall in found.items():
            assert recall[RULES] == 1.0 and recall[AS_ASKED] < 1.0
            assert (PERSON in recall) == (name == "canard")
    assert all(done <= total for _, done, total in asked) and asked[-1][1] == asked[-1][2]


def test_fewer_questions_come_from_all_over(data: Path) -> None:
    """The first rows are of one dialogue."""
    questions = read_canard(data / "canard" / "dev.json").questions
    some = spread(questions, 3)
    assert len(some) == 3 and some[0] is questions[0] and some[2] is questions[2 * len(questions) // 3]
    assert spread(questions, None) == list(questions)


def test_missing_data_is_named(tmp_path: Path) -> None:
    """A suite that measured nothing reported nothing wrong."""
    with pytest.raises(InputError, match="canard"):
        measure_follow_ups(tmp_path, LetterEncoder())
