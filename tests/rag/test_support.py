"""Labels of sentences: what is quoted is equal to its source, what is supported survives no alteration."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    ("sentence", "label"),
    [
        ('"The old mill, which was built in 1874, opens at nine on weekdays." [1]', "quoted"),
        ("It does not open on Sundays [1].", "quoted"),
        ("- It does not open on Sundays.", "quoted"),
        ('According to passage 1, "It does not open on Sundays."', "quoted"),
        ("“川は深くない。” [2]", "quoted"),
        ("The mill opens at nine [1].", "supported"),
        ("The mill was built in 1874.", "unsupported"),  # true, but "which was built" hangs on another word
        ("Mill opens at nine on weekdays", "supported"),
        ("The river flows past the mill [2].", "supported"),
        ("The river flows past the old mill [1].", "unsupported"),  # the wrong passage
        ("The mill opens at ten.", "unsupported"),
        ("The mill opens on Sundays.", "unsupported"),
        ("It opens on Sundays.", "unsupported"),
        ("The river is deep.", "unsupported"),
        ("Bert bought the mill from Anna.", "unsupported"),
        ("Anna bought the mill in 1990.", "unsupported"),  # leaves a name out
        ("Carol feared heights.", "unsupported"),
        ("Visitors may enter a yard.", "unsupported"),  # leaves the condition out
        ("Visitors enter the yard if the gate is open.", "unsupported"),  # leaves the permission out
        ("It rained.", "unsupported"),
    ],
)
def test_a_sentence_is_supported_if_its_words_stand_in_one_sentence(sentence: str, label: str) -> None:
    """Words of two sentences that are read as one; a condition or negation that is lost."""
    ((_, found),) = labelled(sentence)
    assert found == label


@pytest.mark.parametrize(
    ("source", "restated", "changed"),
    [
        ("A few rooms of the mill were dry.", "A few rooms of mill were dry.", "Few rooms of mill were dry."),
        ("Then read the next len(b or c) bytes.", "Read next len(b or c) bytes.", "Read next len bytes."),
        (
            "It pays if the mill turns, and the river flows.",
            "Pays if the mill turns, and river flows",
            "It pays if mill turns.",
        ),
    ],
)
def test_words_that_change_a_sentence_are_not_left_out(source: str, restated: str, changed: str) -> None:
    """ "Few rooms" was called supported by "a few rooms", a call without its argument, and a condition without its half."""
    passage = Passage("mill", 0, source, 0, len(source))
    labels = [find_support(text, [passage]).sentences[0].label for text in (restated, changed)]
    assert labels == ["supported", "unsupported"]


@pytest.mark.parametrize(
    ("source", "negation"),
    [
        ("Die alte Mühle ist seit 1874 nicht offen.", "nicht "),
        ("Le vieux moulin n'est pas ouvert depuis 1874.", "pas "),
        ("El viejo molino no está abierto desde 1874.", "no "),
        ("Старая мельница не работает с 1874 года.", "не "),
        ("Ο παλιός μύλος δεν λειτουργεί από το 1874.", "δεν "),
        ("A velha moagem não está aberta desde 1874.", "não "),
        ("那座老磨坊自1874年起不开放。", "不"),
        ("그 방앗간은 1874년부터 안 열었다.", "안 "),
        ("그 방앗간은 문을 열지 않는다 1874년부터 지금까지.", "않는다 "),
        ("Ο παλιός μύλος λειτουργεί χωρίς ρεύμα από το 1874.", "χωρίς "),
        ("यह पुरानी चक्की 1874 से नहीं चलती है।", "नहीं "),
        ("Le vieux moulin tourne sans courant depuis 1874.", "sans "),
        ("The old mill denies visitors entry since 1874.", "denies "),
    ],
)
def test_negations_of_other_languages_cannot_be_left_out(source: str, negation: str) -> None:
    """Greek and Chinese sentences without their "not" were called supported by the sentence that has it."""
    assert negation in source
    passage = Passage("mill", 0, source, 0, len(source))
    (altered,) = find_support(source.replace(negation, ""), [passage]).sentences
    (kept,) = find_support(source, [passage]).sentences
    assert (altered.label, kept.label) == ("unsupported", "quoted")


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


@pytest.mark.parametrize(
    ("answer", "unknown"),
    [
        ('He said "the door is blue".', []),
        ('He said "the gate is red" and "the door is blue".', ["the gate is red"]),
        ('"He said "the door is blue" to her." [1]', []),
        ('It is "Red".', ["Red"]),
        ('She says:"No."', ["No."]),
        (
            "“the river flows” and „der Fluss“ and «la rivière» 他说「不知道」",
            ["the river flows", "der Fluss", "la rivière", "不知道"],
        ),
        ('"The old mill, which was bu', []),  # cut off
        ('"The new mill, which was bu', ["The new mill, which was bu"]),
        ('"mil"', ["mil"]),
        ('5" wide and 6" long', []),
        ('""" " "', []),
    ],
)
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


MANUAL_TEXT = """Backups

The tool keeps seven daily backups. Older ones are removed every night.

To restore a single file, run:

    dar -x backup -g home/ann/letter.txt

Only the file's owner may do this.

| option | default |
| --- | --- |
| --keep | 7 |
| --limit | 20 MB |
"""
MANUAL = [
    Passage("manual", 0, MANUAL_TEXT, 0, len(MANUAL_TEXT)),
    Passage("other", 0, "Letters are kept in boxes.", 0, 26),
]


def evidence_for(question: str, statement: str) -> str:
    place = Evidence(MANUAL, question).find(statement)
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
        # no evidence was found where a window that repeats more of the question holds no answer, or the answer is an option
        ("How many daily backups does the tool keep?", "The tool keeps 7 daily backups", "| --keep | 7 |"),
        (
            "Which option restores a single file from a backup?",
            "The option that restores a single file from a backup is -x",
            "To restore a single file, run:\n\n    dar -x backup -g home/ann/letter.txt",
        ),
    ],
)
def test_the_sentence_row_or_announced_block_is_found(question: str, statement: str, evidence: str) -> None:
    """A sentence that ends in a colon without the command that it announces; a whole table; a paragraph."""
    assert evidence_for(question, statement) == evidence


@pytest.mark.parametrize(
    "statement",
    [
        "The default limit is 30 MB",
        "The option of the default limit is -l",
        "The tool keeps no daily backups",
        "Printers need paper",
        "",
        "Yes",
    ],
)
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
        assert [each.label for each in find_support(answer, MANUAL, "When?").sentences] == ["unsupported"]
