"""The prompts of the suite `drafters` are fixed, and nothing in them was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from drafters_data import with_chat
from transformers import AutoTokenizer

from ragspec.core import SourceKind
from ragspec.errors import InputError
from ragspec.evaluation.cases import Case
from ragspec.evaluation.datasets import held_out_articles
from ragspec.evaluation.suites.drafters.prompts import (
    PROSE_PROMPT_TOKENS,
    chat_cases,
    chat_list,
    mixed_sentences,
    prose_cases,
)
from ragspec.rag.prompt import PromptBuilder
from ragspec.training.sentences import normalise


@pytest.fixture
def prompts(tiny_dir: Path) -> Iterator[PromptBuilder]:
    yield PromptBuilder(AutoTokenizer.from_pretrained(tiny_dir), 2048)


def prose(folder: Path, prompts: PromptBuilder, count: int) -> list[Case]:
    found = prose_cases(folder, prompts.tokenizer)
    return [case for case, _ in zip(found, range(count), strict=False)]


def test_prose_begins_paragraphs_of_held_out_articles(shared_data: Path, prompts: PromptBuilder) -> None:
    """Bug guarded: a head measured on text it was trained on, or on whole paragraphs with nothing left to continue."""
    held_out = [normalise(p["context"]) for a in held_out_articles(shared_data) for p in a["paragraphs"]]
    cases = prose(shared_data, prompts, 12)
    assert len({case.prompt_ids for case in cases}) == 12
    for case in cases:
        text = prompts.tokenizer.decode(list(case.prompt_ids))
        (whole,) = {paragraph for paragraph in held_out if paragraph.startswith(text[:-3])}
        assert len(case.prompt_ids) == PROSE_PROMPT_TOKENS and len(whole) > len(text) and case.sources == ()


def test_chat_is_test_data_that_ends_with_the_user(shared_data: Path) -> None:
    """Bug guarded: dialogues of SGD's training part; a conversation that waits for no answer."""
    conversations = chat_list(shared_data, 10)
    trained, tested = ((shared_data / f"sgd/{name}.jsonl").read_text() for name in ("train", "test"))
    assert [len(messages) for messages in conversations] == [1, 5] * 5
    for messages in conversations:
        assert [message.role for message in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
    whole = [[message.content for message in messages] for messages in conversations[1::2]]
    assert all(texts[2] in normalise(tested) for texts in whole)
    assert not all(texts[2] in normalise(trained) for texts in whole)


@pytest.mark.slow
def test_short_lists_begin_long_ones_and_repeat(shared_data: Path, prompts: PromptBuilder) -> None:
    """Bug guarded: a quick run that measures other prompts than the full one, or other ones every time."""
    assert chat_list(shared_data, 4) == chat_list(shared_data, 12)[:4]
    assert mixed_sentences(shared_data, 4) == mixed_sentences(shared_data, 12)[:4]
    assert [s.part for s in mixed_sentences(shared_data, 4)] == ["jfleg", "long", "clean", "jfleg"]
    assert prose(shared_data, prompts, 3) == prose(shared_data, prompts, 6)[:3]


def test_the_whole_conversation_may_be_copied_from(small_data: Path, tmp_path: Path, prompts: PromptBuilder) -> None:
    """Bug guarded: a merged draft measured without its history, so that copying has nothing to add."""
    single, dialogue = chat_cases(chat_list(with_chat(small_data, tmp_path / "data"), 2), prompts)
    assert [source.text for source in dialogue.sources][:2] == ["Is there a mill?", "Yes, there is."]
    assert {source.kind for source in (*single.sources, *dialogue.sources)} == {SourceKind.HISTORY}
    assert (len(single.sources), len(dialogue.sources)) == (1, 5)
    assert len(dialogue.prompt_ids) > len(single.prompt_ids) > 0


def test_a_short_list_of_dialogues_gives_what_there_is(small_data: Path, tmp_path: Path) -> None:
    """Bug guarded: the shorter of two lists deciding for both; a dialogue of two turns cut to five."""
    found = chat_list(with_chat(small_data, tmp_path / "data"), 50)
    assert [len(messages) for messages in found] == [1, 5] * 5


def test_missing_files_are_named(small_data: Path) -> None:
    """Bug guarded: a traceback for a data folder without the dialogues."""
    with pytest.raises(InputError, match=r"question\.jsonl"):
        chat_list(small_data, 2)
