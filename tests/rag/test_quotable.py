"""What may be quoted: whole sentences, items, rows and lines of code, and never what only announces them."""

from pathlib import Path

import pytest
from language_examples import EXAMPLES

from ragspec.config import ChunkingConfig
from ragspec.core import Block, BlockKind, Passage
from ragspec.rag.quotable import quotable_runs
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.reading import read_file
from ragspec.retrieval.reading.markup import read_markdown, read_plain


@pytest.fixture(scope="module")
def runs() -> list[list[str]]:
    (document,) = read_file(Path(__file__).with_name("quotable.md"), "page.md")
    passages = chunk(document, ChunkingConfig(), None)
    return [[p.text[start:end] for start, end in run] for p in passages for run in quotable_runs(p)]


def test_no_heading_question_or_announcement_stands_alone(runs: list[list[str]]) -> None:
    """Quotes were headings, entries of a table of contents, the question again, or a sentence that ends in a colon alone."""
    spans = [span for run in runs for span in run]
    assert not [span for span in spans if span.rstrip("*`").endswith((":", "?"))]
    assert not [span for span in spans if "#" in span or "sluice" in span or "grind" in span]
    assert not [span for span in spans if span in ("9", "Default value:", "| Part | Weight |")]


@pytest.mark.parametrize("whole", EXAMPLES["whole sentences items rows and what is announced may be quoted"])
def test_whole_sentences_items_rows_and_what_is_announced_may_be_quoted(runs: list[list[str]], whole: str) -> None:
    """A rule that forbids headings forbids an answer, too."""
    assert any(whole in run for run in runs), runs


def test_a_passage_without_blocks_is_a_paragraph_whose_titles_are_known() -> None:
    """Indexes of earlier versions know no headings but the passage's own."""
    text = "7.8 What is a package\n\nA package holds files. It is one file."
    passage = Passage("d", 0, text, 0, len(text), heading="7 Basics > 7.8 What is a package")
    assert [[text[start:end] for start, end in run] for run in quotable_runs(passage)] == [
        ["A package holds files.", "It is one file."]
    ]
    assert quotable_runs(Passage("d", 0, "What is it?", 0, 11)) == quotable_runs(Passage("d", 0, "", 0, 0)) == []


def test_texts_that_are_left_out_are_not_quoted_and_end_a_run() -> None:
    """A quote just given was given again as the answer to the next question."""
    text = "It opens at nine. It closes at ten. It rests on Sundays."
    runs = quotable_runs(Passage("d", 0, text, 0, len(text)), {"It closes at ten."})
    quoted = [[text[start:end] for start, end in run] for run in runs]
    assert quoted == [["It opens at nine."], ["It rests on Sundays."]]


@pytest.mark.parametrize("text", ["- word:\n" * 3000 + "It is so.", "word:\n\nIt is so.\n\n" * 2000, "| a |\n" * 3000])
def test_many_announced_blocks_take_space_in_proportion(text: str) -> None:
    """A list of items that end in colons was read to its end for each item."""
    runs = quotable_runs(Passage("d", 0, text, 0, len(text)))
    assert runs and sum(end - start for run in runs for start, end in run) <= 2 * len(text)


@pytest.mark.parametrize(("text", "runs"), EXAMPLES["borders of blocks"])
def test_a_run_ends_at_a_table_and_before_a_term_and_nested_lines_are_announced(
    text: str, runs: list[list[str]]
) -> None:
    """Rows with the paragraph below them, and settings of four sections, were one quote; `max: 14` stood without `autoscale:`."""
    passage = Passage(
        "d", 0, text, 0, len(text), blocks=(read_markdown if "`" in text or "|" in text else read_plain)(text).blocks
    )
    assert [[" ".join(text[start:end].split()) for start, end in run] for run in quotable_runs(passage)] == runs


def test_earlier_jobs_go_on_without_these_borders() -> None:
    """A begun job whose second half may not quote as its first half."""
    text, blocks = "| a | 1 |\n\nIt is so.", (Block(0, 9, BlockKind.TABLE), Block(11, 20, BlockKind.PARAGRAPH))
    assert quotable_runs(Passage("d", 0, text, 0, 20, blocks=blocks), by_blocks=False) == [[(0, 9), (11, 20)]]
