"""The lists are fixed, and nothing in them was trained on."""

import json
from pathlib import Path

import pytest

from ragspec.errors import InputError
from ragspec.evaluation.datasets import CLEAN, JFLEG, LONG, grammar_list, squad_list, stdlib_list
from ragspec.training.reference.mixture import NUM_EVAL_ARTICLES, NUM_TRAIN_ARTICLES
from ragspec.training.sentences import normalise
from ragspec.training.stdlib_corpus import is_held_out


def test_questions_come_from_held_out_articles_only(small_data: Path) -> None:
    """Bug guarded: scores on questions the target was trained on."""
    assert {q.id for q in squad_list(small_data).questions} == {f"q{n}" for n in range(4, 14)}


def test_real_questions_come_from_held_out_articles_only(shared_data: Path) -> None:
    """The same on the real files, against the articles that training reads."""
    articles = json.loads((shared_data / "squad/dev-v1.1.json").read_text())["data"]
    trained = {
        normalise(qa["question"]) for a in articles[:NUM_TRAIN_ARTICLES] for p in a["paragraphs"] for qa in p["qas"]
    }
    titles = {a["title"].replace("_", " ") for a in articles[-NUM_EVAL_ARTICLES:]}
    listed = squad_list(shared_data)
    gold = {document.id: document.title for document in listed.documents}
    assert len(listed.questions) == 200
    assert {gold[q.gold].replace("_", " ") for q in listed.questions} <= titles
    assert not trained & {q.text for q in listed.questions}


@pytest.mark.slow
def test_short_lists_begin_long_ones_and_repeat(shared_data: Path) -> None:
    """Bug guarded: a quick run that measures other prompts than the full one, or other ones every time."""
    assert squad_list(shared_data, 40).questions == squad_list(shared_data).questions[:40]
    whole, quick = grammar_list(shared_data), grammar_list(shared_data, 20)
    assert whole == grammar_list(shared_data)
    for part in (JFLEG, LONG, CLEAN):
        own = [s for s in whole if s.part == part]
        assert [s for s in quick if s.part == part] == own[:20]


def test_grammar_parts_are_what_they_are_called(shared_data: Path) -> None:
    """Bug guarded: "long" sentences that are short or correct, "clean" ones that are not."""
    sentences = grammar_list(shared_data)
    long = [s for s in sentences if s.part == LONG]
    clean = [s for s in sentences if s.part == CLEAN]
    assert [len([s for s in sentences if s.part == part]) for part in (JFLEG, LONG, CLEAN)] == [200, 100, 100]
    assert all(20 <= len(s.references[0].split()) <= 40 for s in long)
    assert sum(s.text != s.references[0] for s in long) >= 95
    assert all(s.text == s.references[0] for s in clean)


def test_standard_library_questions_ask_for_held_out_names() -> None:
    """Bug guarded: the embedded corpus asked about names whose documentation was trained on."""
    listed = stdlib_list(30)
    assert len(listed.questions) == 30
    assert all(is_held_out(q.gold) for q in listed.questions)
    assert {q.gold for q in listed.questions} <= {document.id for document in listed.documents}


def test_missing_files_are_named(tmp_path: Path) -> None:
    """Bug guarded: a traceback where a folder is not the data folder."""
    with pytest.raises(InputError, match=r"dev-v1\.1\.json"):
        squad_list(tmp_path)
