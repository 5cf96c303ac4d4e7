"""Labels of sentences: what is quoted is equal to its source, what is supported survives no alteration."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_examples import EXAMPLES

from pipelines.benchmarks.cases.labels import alterations, is_equal, measure_alterations, statements
from ragspec.core import Passage
from ragspec.rag.support import Evidence, find_support
from ragspec.rag.wording import abstains

MILL = (
    "The old mill, which was built in 1874, opens at nine on weekdays. It does not open on Sundays. "
    'Anna bought the mill from Bert in 1990. He said "the door is blue" to her. '
    "Visitors may enter the yard if the gate is open; the tower was closed after Carol met Dora, who feared heights."
)
RIVER = "The river, in spring, flows past the old mill. It isn't deep. 川は深くない。"
PASSAGES = [Passage("mill", 0, MILL, 0, len(MILL)), Passage("river", 0, RIVER, 0, len(RIVER))]


def labelled(answer: str) -> list[tuple[str, str]]:
    return [(answer[s.start : s.end], s.label) for s in find_support(answer, PASSAGES).sentences]


@pytest.mark.parametrize(
    ("sentence", "label", "why"), EXAMPLES["a sentence is supported if its words stand in one sentence"]
)
def test_a_sentence_is_supported_if_its_words_stand_in_one_sentence(sentence: str, label: str, why: str) -> None:
    """Words of two sentences that are read as one; a condition or negation that is lost."""
    ((_, found),) = labelled(sentence)
    assert found == label, why


@pytest.mark.parametrize(("source", "restated", "changed"), EXAMPLES["words that change a sentence are not left out"])
def test_words_that_change_a_sentence_are_not_left_out(source: str, restated: str, changed: str) -> None:
    """ "Few rooms" was called supported by "a few rooms", a call without its argument, and a condition without its half."""
    passage = Passage("mill", 0, source, 0, len(source))
    labels = [find_support(text, [passage]).sentences[0].label for text in (restated, changed)]
    assert labels == ["supported", "unsupported"]


@pytest.mark.parametrize(("source", "negation"), EXAMPLES["negations of other languages cannot be left out"])
def test_negations_of_other_languages_cannot_be_left_out(source: str, negation: str) -> None:
    """Greek and Chinese sentences without their "not" were called supported by the sentence that has it."""
    assert negation in source
    passage = Passage("mill", 0, source, 0, len(source))
    (altered,) = find_support(source.replace(negation, ""), [passage]).sentences
    (kept,) = find_support(source, [passage]).sentences
    assert (altered.label, kept.label) == ("unsupported", "quoted")


def test_a_negation_behind_a_short_answer_is_read_with_the_quote() -> None:
    """ "15 characters" was called not found in "Passwords have 15 characters and never expire", which stood above it."""
    found = {}
    for quote in (
        "Keys have 15 characters and never expire.",
        "Keys never have 15 characters.",
        "Keys have no 15 characters.",
    ):
        (_, short) = find_support(f'"{quote}" [1] – 15 characters.', [Passage("k", 0, quote, 0, len(quote))]).sentences
        found[short.label] = found.get(short.label, 0) + 1
    assert found == {"supported": 1, "unsupported": 2}


def test_a_short_answer_is_looked_up_in_its_quote() -> None:
    """A short answer without a citation; a number of another sentence that passes for the answer."""
    quote = '"The old mill, which was built in 1874, opens at nine on weekdays." [1] – '
    assert [label for _, label in labelled(f"{quote}nine.")] == ["quoted", "supported"]
    assert labelled(f"{quote}1990.")[1] == ("1990.", "unsupported")


def test_words_before_a_quote_are_a_sentence_of_their_own() -> None:
    """A quote that counts as unsupported because of what leads to it; a lead-in that passes for quoted."""
    quote = '"It does not open on Sundays." [1]'
    assert labelled(f"It is sad: {quote}") == [("It is sad:", "unsupported"), (quote[:-4], "quoted")]
    assert labelled(f"The document says: {quote}") == [(quote[:-4], "quoted")]


def test_an_abstention_and_an_answer_without_passages_have_no_labels() -> None:
    """A service that says nothing was found, marked as a claim that is not supported."""
    assert labelled("The passages do not say.") == []
    assert find_support("It rained.", []).sentences == ()


@pytest.mark.parametrize(("answer", "unknown"), EXAMPLES["invented quotations are found"])
def test_invented_quotations_are_found(answer: str, unknown: list[str]) -> None:
    """Text in quotation marks that nobody wrote, shown like a quote."""
    assert [answer[start:end] for start, end in find_support(answer, PASSAGES).unknown_quotations] == unknown


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from([*MILL.split(), *RIVER.split(), '"', "[1]", "[2].", "–", "not", "1990", "🌊"]), max_size=24
    )
)
def test_what_is_called_quoted_is_equal_to_its_source(words: list[str]) -> None:
    """A sentence that is called a quote and differs from its source by a character."""
    answer, by_id = " ".join(words), {passage.id: passage for passage in PASSAGES}
    support = find_support(answer, PASSAGES)
    for sentence in support.sentences:
        if sentence.label == "quoted":
            assert is_equal(answer, sentence, by_id[sentence.passage_id])
    spans = [(sentence.start, sentence.end) for sentence in support.sentences]
    assert spans == sorted(spans) and all(start < end <= len(answer) for start, end in spans)


TEXTS = (
    "In 1887, the engineer Nikola Tesla developed an induction motor that ran on alternating current. "
    "Westinghouse did not license the small motor before 1888.",
    "The Amazon River, in the northern part of South America, is longer than the Rhine by a wide margin.",
    "The harbour of Sydney has a very large bridge. It was opened by Jack Lang in 1932.",
)


def test_alterations_of_supported_sentences_are_unsupported() -> None:
    """A rule that counts words: the altered number, name, negation or order keeps its label."""
    passages = [Passage(f"t{n}", 0, text, 0, len(text)) for n, text in enumerate(TEXTS)]
    made = list(statements(passages))
    assert len(made) == 3
    kinds = {each.kind for statement in made for each in alterations(statement, random.Random(0))}
    assert kinds == {"number", "name", "negation", "exchange"}
    measured = measure_alterations(passages, 500, 0)
    assert measured["num_altered"] >= 8 and measured["altered_still_supported"] == 0.0
    assert measured["invented_marked"] == measured["quoted_confirmed"] == 1.0


MANUAL_TEXT = Path(__file__).with_name("manual.md").read_text()
MANUAL = [
    Passage("manual", 0, MANUAL_TEXT, 0, len(MANUAL_TEXT)),
    Passage("other", 0, "Letters are kept in boxes.", 0, 26),
]


def evidence_for(question: str, statement: str) -> str:
    place = Evidence(MANUAL, question).find(statement)
    return "" if place is None else place.passage.text[place.start : place.end]


@pytest.mark.parametrize("question, statement, evidence", EXAMPLES["the sentence row or announced block is found"])
def test_the_sentence_row_or_announced_block_is_found(question: str, statement: str, evidence: str) -> None:
    """A sentence that ends in a colon without the command that it announces; a whole table; a paragraph. No evidence was found
    where a window that repeats more of the question holds no answer, or where the answer is an option."""
    assert evidence_for(question, statement) == evidence


@pytest.mark.parametrize("statement", EXAMPLES["statements without evidence"])
def test_another_number_a_negation_and_other_words_have_no_evidence(statement: str) -> None:
    """A wrong answer that is shown beside a passage as if that held it."""
    assert evidence_for("What is the default limit?", statement) == ""


def test_a_question_said_back_needs_the_passages_own_words() -> None:
    """Bug guarded: an answer that only repeats the question counts as supported by any passage."""
    assert not evidence_for("Does the tool encrypt backups at night?", "The tool encrypts backups at night")
    assert evidence_for("Are older backups removed every night?", "Older ones are removed every night")


def test_only_answers_in_free_words_are_related() -> None:
    """A target that quotes first is held to the strict labels; evidence is the passage's own text."""
    answer = "Seven daily backups are kept by the tool [1]. It prints letters."
    strict = [each.label for each in find_support(answer, MANUAL).sentences]
    assert strict == ["unsupported", "unsupported"]
    related, unsupported = find_support(answer, MANUAL, "How many backups are kept?").sentences
    assert (related.label, unsupported.label) == ("related", "unsupported")
    assert MANUAL_TEXT[related.passage_start : related.passage_end] == "The tool keeps seven daily backups."


@pytest.mark.parametrize("text, is_abstention", EXAMPLES["a model abstains in its own words"])
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
        assert [each.label for each in find_support(answer, MANUAL, "When?").sentences] == ["unsupported"]
