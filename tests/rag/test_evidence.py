"""Evidence for sentences in free words."""

from __future__ import annotations

import pytest

from ragspec.core import Passage
from ragspec.rag import evidence
from ragspec.rag.evidence import Evidence
from ragspec.rag.support import find_support
from ragspec.rag.wording import abstains

TEXT = """Backups

The tool keeps seven daily backups. Older ones are removed every night.

To restore a single file, run:

    dar -x backup -g home/ann/letter.txt

Only the file's owner may do this.

| option | default |
| --- | --- |
| --keep | 7 |
| --limit | 20 MB |
"""
PASSAGES = [Passage("manual", 0, TEXT, 0, len(TEXT)), Passage("other", 0, "Letters are kept in boxes.", 0, 26)]


def found(question: str, statement: str) -> str:
    place = Evidence(PASSAGES, question).find(statement)
    return "" if place is None else place.passage.text[place.start : place.end]


@pytest.mark.parametrize(
    "question, statement, evidence",
    [
        ("How many backups are kept?", "Seven daily backups are kept", "The tool keeps seven daily backups."),
        ("What is the default of --limit?", "The default limit is 20 MB", "| --limit | 20 MB |"),
        (
            "How do I get one file back?",
            "Run dar with -x to restore a single file",
            "To restore a single file, run:\n\n    dar -x backup -g home/ann/letter.txt",
        ),
    ],
)
def test_the_sentence_row_or_announced_block_is_found(question: str, statement: str, evidence: str) -> None:
    """A sentence that ends in a colon without the command that it announces; a whole table; a paragraph."""
    assert found(question, statement) == evidence


@pytest.mark.parametrize(
    "statement",
    ["The default limit is 30 MB", "The tool keeps no daily backups", "Printers need paper", "", "Yes"],
)
def test_another_number_a_negation_and_other_words_have_no_evidence(statement: str) -> None:
    """A wrong answer that is shown beside a passage as if that held it."""
    assert found("What is the default limit?", statement) == ""


def test_a_question_said_back_needs_the_passages_own_words() -> None:
    """Bug guarded: an answer that only repeats the question counts as supported by any passage."""
    assert not found("Does the tool encrypt backups at night?", "The tool encrypts backups at night")
    assert found("Are older backups removed every night?", "Older ones are removed every night")


def test_only_answers_in_free_words_are_related() -> None:
    """A target that quotes first is held to the strict labels; evidence is the passage's own text."""
    answer = "Seven daily backups are kept by the tool [1]. It prints letters."
    strict = [each.label for each in find_support(answer, PASSAGES).sentences]
    assert strict == ["unsupported", "unsupported"]
    related, unsupported = find_support(answer, PASSAGES, "How many backups are kept?").sentences
    assert (related.label, unsupported.label) == ("related", "unsupported")
    assert TEXT[related.passage_start : related.passage_end] == "The tool keeps seven daily backups."


@pytest.mark.parametrize(
    "text, is_abstention",
    [
        ("The passages do not say.", True),
        ("The passages do not say how the mill was built.", True),
        ("The passages do not explicitly state the default.", True),
        ("The provided passages do not contain information about it.", True),
        ("None of the passages mentions a limit.", True),
        ("Sorry, the documents don't mention that.", True),
        ("The passage says that the mill is old.", False),
        ("The passages do not say, but it was built in 1850 by John.", False),
        ("The passages do not mention the mill; it was built in 1850.", False),
        ("The document is not encrypted.", False),
        ("Nothing is kept.", False),
    ],
)
def test_a_model_abstains_in_its_own_words(text: str, is_abstention: bool) -> None:
    """An abstention that was counted as an answer, and an answer as an abstention."""
    assert abstains(text) == is_abstention


def test_a_quote_that_sounds_like_an_abstention_is_labelled() -> None:
    """A quoted sentence without a label, because it begins as a model does that finds no answer."""
    said = "The document does not contain confidential data."
    passage = Passage("rules", 0, said, 0, len(said))
    (sentence,) = find_support(f'"{said}" [1]', [passage]).sentences
    assert sentence.label == "quoted"
    assert find_support("The passages do not say.", [passage], "").sentences == ()


def test_a_claim_behind_an_abstention_is_labelled() -> None:
    """An invented claim that no label marks, because its sentence begins by saying that nothing is known."""
    for answer in (
        "The passages do not say, but it was built in 1850.",
        "The passages do not say. It was built in 1850.",
    ):
        assert [each.label for each in find_support(answer, PASSAGES, "When?").sentences] == ["unsupported"]


def test_many_announced_blocks_take_time_in_proportion() -> None:
    """A list of items that end in colons was read to its end for each item."""
    text = "".join(f"- word{number}:\n" for number in range(3000))
    units = list(evidence._units(text))
    assert sum(end - start for start, end in units) <= len(units) * 2100
