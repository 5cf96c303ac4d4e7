"""What needs no document is not searched for, and everything else is."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.rag.chat.routing import needs_documents

TUNING = Path(__file__).parents[2] / "pipelines/benchmarks/documentation/tuning/routing.jsonl"


def test_the_messages_that_the_weights_were_fitted_to_are_told_apart() -> None:
    """ "Hi!" was answered with a quotation. A weight that moves shows here."""
    rows = [json.loads(line) for line in TUNING.read_text(encoding="utf-8").splitlines()]
    wrong = [row["route"] for row in rows if needs_documents(row["text"]) != (row["route"] == "search")]
    # a question about cats or dinner may be one about the documents, so it is searched
    assert len(rows) >= 300 and "search" not in wrong and len(wrong) <= 11
    assert needs_documents("How many cats does the keeper own?")


@pytest.mark.parametrize("text", ["Fix the grammar: The server have a big config file.", "...", "OK!! :)"])
def test_a_text_to_correct_is_not_searched_for_whatever_it_is_about(text: str) -> None:
    """The words of the sentence itself sent it to the index."""
    assert not needs_documents(text)


@given(st.text(max_size=300))
def test_any_text_is_routed(text: str) -> None:
    """A message nobody had thought of broke the request."""
    assert needs_documents(text) in (True, False)


def test_a_long_message_takes_no_longer_than_its_beginning() -> None:
    """A regular expression that backtracks over a megabyte holds the service up."""
    assert needs_documents("how many words " * 100_000)
    assert not needs_documents("thanks! " * 100_000)
