"""What is not corrected, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
from rewriting import rewriting

from ragspec.errors import InputError
from ragspec.rag.grammar.edit_filters import EditFilter
from ragspec.rag.grammar.edits import EditKind
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.grammar.markup import TextPart

ANYTHING = EditFilter(1.0)


def writing(text: str) -> Grammar:
    return rewriting(lambda _: text)[0]


def outcome(
    before: str | list[TextPart], after: str, edit_filter: EditFilter = ANYTHING
) -> tuple[str, list[tuple[str, str]]]:
    correction = writing(after).correct(before, edit_filter=edit_filter)
    return correction.corrected, [(each.edit.original, each.reason.value) for each in correction.withheld]


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("He pay 5 coins.", "He paid 6 coins.", [("5", "number")]),
        ("He pay 1,500.25 coins.", "He paid 1,500.52 coins.", [("25", "number")]),
        ("He see two mill.", "He saw three mills.", [("two", "number")]),
        ("He see a mill.", "He saw seven mills.", [("a", "number")]),
        ("He see John Smith.", "He saw Jon Smith.", [("John", "name")]),
        ("He see Marsh there.", "He saw March there.", [("Marsh", "name")]),
        ("He see Jon in Paris.", "He saw him in Rome.", [("Jon", "name"), ("Paris", "name")]),
        ("He use an iPhone here.", "He used an Iphone here.", [("iPhone", "name")]),
        ("Ann come. I see Ann.", "Anne comes.", [("Ann", "name"), ("Ann", "name")]),
    ],
)
def test_numbers_and_names_stay(before: str, after: str, kept: list[tuple[str, str]]) -> None:
    """A fluent correction that says something else; a change that is dropped without a word."""
    corrected, withheld = outcome(before, after)
    assert withheld == kept
    for word, _ in kept:
        assert word in corrected
    assert corrected != before, "everything was withheld"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("I see tow mills.", "I see two mills."),
        ("I see Anns mill.", "I see Ann's mill."),
        ("i like london.", "I like London."),
        ("We meet on monday.", "We met on Monday."),
        ("We like The mill and the river.", "We like the mill and the river."),
        ("HE GO TO THE MILL.", "HE GOES TO THE MILL."),
    ],
)
def test_what_only_looks_like_a_name_or_number_is_corrected(before: str, after: str) -> None:
    """Guards so wide that nothing with a capital is ever corrected."""
    assert outcome(before, after) == (after, [])


def test_more_than_a_share_of_the_words_is_not_changed() -> None:
    """A sentence that the target writes anew: it may be better, but it is not a correction."""
    before, after = "one a b c d e f g h i.", "one a b c d v w x y z."
    assert outcome(before, after, EditFilter(0.5))[0] == after
    corrected, withheld = outcome(before, after, EditFilter(0.4))
    assert corrected == before and {why for _, why in withheld} == {"ratio"} and len(withheld) == 5
    assert outcome("Teh.", "The.", EditFilter(0.1))[0] == "The.", "one word may always be changed"
    assert outcome("Teh.", "The.", EditFilter(0.0))[0] == "Teh."


def test_words_that_the_writer_knows_better_stay() -> None:
    """A product's name that is corrected again and again; one that is found inside another word."""
    edit_filter = EditFilter(1.0, ignore=frozenset(["teh mill", "e-mial"]), dictionary=frozenset(["Ragspek"]))
    before = "we ragspek teh mill by e-mial, and teh ragspeks."
    after = "we respect the mill by e-mail, and the respects."
    corrected, withheld = outcome(before, after, edit_filter)
    assert corrected == "we ragspek teh mill by e-mial, and the respects."
    assert withheld == [("ragspek", "dictionary"), ("teh", "ignored"), ("mial", "ignored")]


def test_a_dictionary_knows_words_whose_case_changes_their_length() -> None:
    """A name "Weißkopf" was folded to "weisskopf", which is in no text."""
    edit_filter = EditFilter(1.0, dictionary=frozenset(["Weißkopf", "İzmir"]), names=False)
    before = "we saw weißkopf and WEIßKOPF in İzmir."
    assert outcome(before, "we saw weiskopf and WEISKOPF in Izmir.", edit_filter)[0] == before


def test_only_wanted_kinds_are_made() -> None:
    """A switched-off rule that goes on."""
    edit_filter = EditFilter(1.0, kinds=frozenset([EditKind.ARTICLE]))
    corrected, withheld = outcome("He go to a old mill.", "He goes to an old mill.", edit_filter)
    assert (corrected, withheld) == ("He go to an old mill.", [("go", "kind")])


@pytest.mark.parametrize(
    ("before", "after", "expected", "why"),
    [
        ("Call `fooo bar` now now.", "Call `foo bar` now.", "Call `fooo bar` now.", "code"),
        ("See http://a.org/teh now now.", "See http://a.org/the now.", "See http://a.org/teh now.", "code"),
        ("Ask teh@a.org about teh mill.", "Ask the@a.org about the mill.", "Ask teh@a.org about the mill.", "code"),
        ("See [teh](teh.md) now.", "See [the](the.md) now.", "See [the](teh.md) now.", "code"),
    ],
)
def test_code_and_addresses_stay(before: str, after: str, expected: str, why: str) -> None:
    """A link that leads nowhere after a correction, an option of a command that is spelt right at last."""
    corrected, withheld = outcome(before, after)
    assert corrected == expected and {reason for _, reason in withheld} == {why}


def test_markup_is_neither_read_nor_touched() -> None:
    """A tag that a correction swallows, or that the target has to make sense of."""
    text = "<p>He <b>go</b> to a&nbsp;old mill.</p>\n```py\nhe go\n```\n<!-- he go -->"
    grammar, engine = rewriting(lambda sentence: sentence.replace("go", "goes").replace("a old", "an old"))
    correction = grammar.correct(text)
    assert [request.sources[0].text for request in engine.requests] == ["He go to a old mill."]
    assert correction.corrected == text.replace("<b>go</b> to a", "<b>goes</b> to an")
    parts = [TextPart("He g"), TextPart("<i>", True), TextPart("o ho"), TextPart("\\x", True, "me"), TextPart(" now.")]
    corrected, withheld = outcome(parts, "He goes house now.")
    assert corrected == "He g<i>oes ho\\x now."
    assert withheld == [("ho\\x", "markup")] or withheld == [("ho", "markup")]


@pytest.mark.parametrize(
    "wrong",
    [{"max_edit_ratio": 1.5}, {"max_edit_ratio": True}, {"ignore": "word"}, {"ignore": [" "]}, {"dictionary": [1]}],
)
def test_guards_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    """A word given as a list of its letters: nothing with an a in it is corrected any more."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        EditFilter(**wrong)
