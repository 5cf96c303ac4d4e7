"""What the target is given to answer: a function of the origin and the number, on made-up sources."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.heads.target_answers import PromptSource
from ragspec.training.heads.training_texts import AnswerEncoder
from ragspec.training.reference import examples as target_examples
from ragspec.training.reference.sources import Paragraph, Question, Sources
from ragspec.training.reference.tokenizer import train_tokenizer

SENTENCES = ["The grey cat sat on the mat at noon.", "A brown dog ran home to Berlin.", "It rained in 1977."]
TEXTS = [field.name for field in fields(Sources) if isinstance(getattr(Sources(), field.name), list)]


def made_up_sources() -> Sources:
    """At least one text of every kind, each time as new objects."""
    paragraph = Paragraph(list(SENTENCES), "animals", "Animals")
    questions = [Question("Where did the cat sit?", paragraph, 0, "mat"), Question("Who ran?", paragraph, 1, "dog")]
    turns = [("USER", "A table for two?"), ("SYSTEM", "At noon."), ("USER", "Yes."), ("SYSTEM", "Done.")]
    talk = [("Who is it?", "It is the grey cat of the house."), ("Where?", "It sat on the old mat at noon.")]
    return Sources(
        squad=questions,
        other_questions=questions[:1],
        nqg=questions[1:],
        unanswerable=[("Who sang?", paragraph)],
        prose=[paragraph],
        plain_sentences=list(SENTENCES),
        book_paragraphs=[" ".join(SENTENCES * n) for n in (3, 4, 5)],
        stdlib=[(name, f"{name}(x, /): Return the {name} of x as an Integral.") for name in ("ceil", "floor")],
        dialogues=[turns],
        conversations=[talk],
        by_group={"animals": [paragraph]},
        by_paragraph={id(paragraph): questions},
    )


@pytest.fixture
def prompts(tmp_path: Path) -> PromptSource:
    (tmp_path / "pie_errorify").mkdir()
    (tmp_path / "pie_errorify/verbs.json").write_text(json.dumps({"ran": ["run", "running"]}))
    (tmp_path / "pie_errorify/common_replaces.json").write_text(json.dumps({"their": {"there": 999}}))
    encoder = AnswerEncoder(train_tokenizer(SENTENCES * 9, 320))
    return PromptSource(made_up_sources(), GrammarErrors(tmp_path), encoder, max_tokens=400, seed=0)


def test_a_prompt_is_a_function_of_its_number(prompts: PromptSource) -> None:
    """A job that goes on behind a kill, or wants more answers, starts at another number than the one before."""
    again = replace(prompts, sources=made_up_sources())
    forward = [prompts(number) for number in range(40)]
    assert forward == [again(number) for number in reversed(range(40))][::-1]
    assert len({tuple(prompt.ids) for prompt in forward}) > 10
    assert {prompt.is_prose for prompt in forward} == {True, False}
    assert forward != [replace(prompts, seed=1)(number) for number in range(40)]


def test_prompts_are_short_enough_to_be_answered(prompts: PromptSource) -> None:
    """Why the longest text belongs to the origin: another limit passes over other prompts."""
    short = replace(prompts, max_tokens=160)
    assert all(len(short(number).ids) <= 160 - 48 for number in range(40))
    assert [short(number) for number in range(40)] != [prompts(number) for number in range(40)]
    assert short.origin("target")[:3] == ("target", 0, 160)


def test_equal_texts_have_equal_origins(prompts: PromptSource) -> None:
    """A hash of addresses, or of unordered sets, refuses the cache of the same run."""
    again = replace(prompts, sources=made_up_sources())
    assert again.origin("target") == prompts.origin("target")


def another(text: Any) -> Any:
    """One like it that says something else."""
    if isinstance(text, str):
        return f"another {text}"
    if isinstance(text, Question):
        return replace(text, text="Who else?")
    if isinstance(text, Paragraph):
        return replace(text, title="Other animals")
    return type(text)([*text[:-1], another(text[-1])])


@pytest.mark.parametrize("name", TEXTS)
def test_any_other_text_is_another_origin(name: str, prompts: PromptSource) -> None:
    """Answers to old data that are taken for answers to new data."""
    *others, last = getattr(prompts.sources, name)
    texts: Any = [*others, another(last)]
    changed = replace(prompts, sources=replace(prompts.sources, **{name: texts}))
    assert changed.origin("target").data != prompts.origin("target").data


def test_another_way_to_draw_is_another_origin(prompts: PromptSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of an older release, continued with prompts of another mixture as if they were of one run."""
    before = prompts.origin("target").data
    monkeypatch.setattr(target_examples, "CLEAN_SHARE", 0.9)
    assert prompts.origin("target").data != before


def test_other_grammar_errors_are_another_origin(prompts: PromptSource) -> None:
    """The tables of errors are texts of prompts too."""
    before = prompts.origin("target").data
    prompts.errors.verbs["sat"] = ["sit"]
    assert prompts.origin("target").data != before
