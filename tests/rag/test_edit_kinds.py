"""Kinds of edits, and what is said of them."""

from __future__ import annotations

import pytest

from ragspec.rag.grammar.edit_kinds import classify_edits, edit_message
from ragspec.rag.grammar.edits import Edit, EditKind, apply_edits, word_edits


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ("I recieve teh letter", "I receive the letter", "spelling spelling"),
        ("i like london", "I like London", "spelling spelling"),
        ("I saw alot of it", "I saw a lot of it", "spelling"),
        ("a class room", "a classroom", "spelling"),
        ("two citys", "two cities", "spelling"),
        ("He go home", "He goes home", "agreement"),
        ("They was here", "They were here", "agreement"),
        ("this books", "these books", "agreement"),
        ("three mill", "three mills", "agreement"),
        ("She have a mill", "She has a mill", "agreement"),
        ("a old mill", "an old mill", "article"),
        ("I saw dog", "I saw the dog", "article"),
        ("in the nature", "in nature", "article"),
        ("a apple and an pear", "an apple and a pear", "article article"),
        ("I is old and he are too", "I are old and he is too", "agreement agreement"),
        ("on June and in Monday", "in June and on Monday", "preposition preposition"),
        ("depend of it", "depend on it", "preposition"),
        ("discuss about it", "discuss it", "preposition"),
        ("He has go home", "He has gone home", "verb_form"),
        ("He buyed it", "He bought it", "verb_form"),
        ("I going home", "I am going home", "verb_form"),
        ("I enjoy to swim", "I enjoy swimming", "preposition verb_form"),
        ("She always is late", "She is always late", "word_order"),
        ("He went yesterday home", "He went home yesterday", "word_order"),
        ("Yes he did", "Yes, he did", "punctuation"),
        ("Its late", "It's late", "punctuation"),
        ("the end .", "the end.", "punctuation"),
        ("a big mill", "a nice mill", "other"),
    ],
)
def test_edits_are_of_the_kind_that_people_would_say(before: str, after: str, kinds: str) -> None:
    """Everything that is called spelling; a word that moves and counts as two mistakes."""
    edits = classify_edits(before, word_edits(before, after))
    assert apply_edits(before, edits) == after
    assert " ".join(edit.kind for edit in edits) == kinds


def test_a_reason_names_what_changes() -> None:
    """A line under a missing comma that says no more than "error"."""
    assert (
        edit_message(Edit(0, 1, "a", "an", EditKind.ARTICLE)) == "The article does not fit here: “an” instead of “a”."
    )
    assert edit_message(Edit(0, 0, "", "the ", EditKind.ARTICLE)).endswith("put in “the”.")
    assert edit_message(Edit(0, 4, "the ", "", EditKind.ARTICLE)).endswith("leave out “the”.")
    assert edit_message(Edit(0, 1, " ", "", EditKind.PUNCTUATION)).endswith("no space here.")
    assert edit_message(Edit(0, 0, "", " ", EditKind.PUNCTUATION)).endswith("a space here.")
