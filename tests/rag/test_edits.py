"""Edits: applied they give the corrected text, exactly; and they are few."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragspec.evaluation.metrics import edit_distance
from ragspec.rag.grammar.edits import Edit, apply_edits, word_edits

WORDS = st.lists(
    st.sampled_from(["the", "mill", "it's", "a", " ", "  ", "\n", ".", ",", "é", "水", "e\u0301", "\U0001f600"])
)
TEXTS = st.one_of(st.text(max_size=30), WORDS.map("".join))


@settings(max_examples=400, deadline=None)
@given(TEXTS, TEXTS, st.integers(0, 5))
@example("", "", 0)
@example("a b", "", 2)
@example("", "a b", 1)
def test_edits_lead_from_one_text_to_the_other(before: str, after: str, start: int) -> None:
    """An offset that is one character off: a client applies the edits and gets another text."""
    whole = "x" * start + before
    edits = word_edits(before, after, start)
    assert apply_edits(whole, edits) == "x" * start + after
    for edit in edits:
        assert whole[edit.start : edit.end] == edit.original != edit.replacement
    ends = [0, *(edit.end for edit in edits)]
    assert all(end <= edit.start for end, edit in zip(ends, edits, strict=False)), "edits overlap or are out of order"


@settings(max_examples=200, deadline=None)
@given(st.text(".,;!", max_size=14), st.text(".,;!", max_size=14))
def test_no_more_is_changed_than_must_be(before: str, after: str) -> None:
    """A whole sentence marked as wrong because of one word in it; of marks every one is a piece by itself."""
    changed = sum(edit_distance([*edit.original], [*edit.replacement]) for edit in word_edits(before, after))
    assert changed == edit_distance([*before], [*after])


def test_a_wrong_word_is_one_edit() -> None:
    """Edits of letters ("es" put behind "go"), or of half the sentence."""
    before, after = "He go to school and and eat a apple .", "He goes to school and eats an apple."
    assert [(edit.original, edit.replacement) for edit in word_edits(before, after)] == [
        ("go", "goes"),
        ("and ", ""),
        ("eat", "eats"),
        ("a", "an"),
        (" ", ""),
    ]
    assert word_edits(before, before) == []
    assert word_edits("a mill", "the mill", start=4) == [Edit(4, 5, "a", "the")]
