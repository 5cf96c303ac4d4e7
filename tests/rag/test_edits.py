"""Edits: applied they give the corrected text, exactly; and they are few."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from language_examples import EXAMPLES
from rewriting import rewriting

from ragspec.errors import InputError
from ragspec.evaluation.target_scores import edit_distance
from ragspec.rag.grammar.edit_filters import EditFilter
from ragspec.rag.grammar.edits import Edit, EditKind, apply_edits, classify_edits, edit_message, word_edits
from ragspec.rag.grammar.markup import TextPart

WORDS = st.lists(
    st.sampled_from(["the", "mill", "it's", "a", " ", "  ", "\n", ".", ",", "é", "水", "e\u0301", "\U0001f600"])
)
TEXTS = st.one_of(st.text(max_size=30), WORDS.map("".join))


@settings(max_examples=400, deadline=None)
@given(TEXTS, TEXTS)
@example("", "")
@example("a b", "")
@example("", "a b")
def test_edits_lead_from_one_text_to_the_other(before: str, after: str) -> None:
    """An offset that is one character off: a client applies the edits and gets another text."""
    edits = word_edits(before, after)
    assert apply_edits(before, edits) == after
    for edit in edits:
        assert before[edit.start : edit.end] == edit.original != edit.replacement
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
    found = [(edit.original, edit.replacement) for edit in word_edits(before, after)]
    assert found == [("go", "goes"), ("and ", ""), ("eat", "eats"), ("a", "an"), (" ", "")]
    assert word_edits(before, before) == []
    assert word_edits("a mill", "the mill") == [Edit(0, 1, "a", "the")]


@pytest.mark.parametrize(("before", "after", "kinds"), EXAMPLES["edits are of the kind that people would say"])
def test_edits_are_of_the_kind_that_people_would_say(before: str, after: str, kinds: str) -> None:
    """Everything that is called spelling; a word that moves and counts as two mistakes."""
    edits = classify_edits(before, word_edits(before, after))
    assert apply_edits(before, edits) == after
    assert " ".join(edit.kind for edit in edits) == kinds


def test_a_reason_names_what_changes() -> None:
    """A line under a missing comma that says no more than "error"."""
    message = edit_message(Edit(0, 1, "a", "an", EditKind.ARTICLE))
    assert message == "The article does not fit here: “an” instead of “a”."
    assert edit_message(Edit(0, 0, "", "the ", EditKind.ARTICLE)).endswith("put in “the”.")
    assert edit_message(Edit(0, 4, "the ", "", EditKind.ARTICLE)).endswith("leave out “the”.")
    assert edit_message(Edit(0, 1, " ", "", EditKind.PUNCTUATION)).endswith("no space here.")
    assert edit_message(Edit(0, 0, "", " ", EditKind.PUNCTUATION)).endswith("a space here.")


ANYTHING = EditFilter(1.0)


def outcome(
    before: str | list[TextPart], after: str, edit_filter: EditFilter = ANYTHING
) -> tuple[str, list[tuple[str, str]]]:
    grammar, _ = rewriting(lambda _: after)
    correction = grammar.correct(before, edit_filter=edit_filter)
    return correction.corrected, [(each.edit.original, each.reason.value) for each in correction.withheld]


@pytest.mark.parametrize(("before", "after", "kept"), EXAMPLES["numbers and names stay"])
def test_numbers_and_names_stay(before: str, after: str, kept: list[list[str]]) -> None:
    """A fluent correction that says something else; a change that is dropped without a word."""
    corrected, withheld = outcome(before, after)
    assert [list(each) for each in withheld] == kept
    for word, _ in kept:
        assert word in corrected
    assert corrected != before, "everything was withheld"


@pytest.mark.parametrize(("before", "after"), EXAMPLES["what only looks like a name or number"])
def test_what_only_looks_like_a_name_or_number_is_corrected(before: str, after: str) -> None:
    """Guards so wide that nothing with a capital is ever corrected."""
    assert outcome(before, after) == (after, [])


def test_the_mark_that_ends_a_sentence_stays() -> None:
    """Full stops behind code in the line were lost: a correct sentence came back without its end."""
    assert outcome("Type `ls`.", "Type `ls`") == ("Type `ls`.", [(".", "markup")])
    assert outcome("Is it open.", "Is it open?") == ("Is it open?", [])


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


@pytest.mark.parametrize(("before", "after", "expected", "why"), EXAMPLES["code and addresses"])
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
