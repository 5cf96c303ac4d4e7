"""Questions that a model writes: kept only if a part of the passage answers, as two samples and a judgement say."""

from collections.abc import Sequence
from typing import Any

import pytest

from ragspec.core import Block, BlockKind, Document, Passage
from ragspec.training.documentation_rows import PackageFile
from ragspec.training.question_writer import QuestionWriter, Reading, readings_of, tells_something

SENTENCES = (
    "The pumpd daemon reads its settings from the file /etc/pumpd.conf when it starts.",
    "The option --speed sets the speed of the pump in turns a minute, and the default is 40.",
    "This is why the old pumps that nobody uses any more were removed from the hall last year.",
)
TEXT = " ".join(SENTENCES)
FILE = PackageFile("pump-doc", "1", "usr/share/doc/pump.html", "", "MIT")
DOCUMENT = Document("pump", TEXT, title="pumpd", blocks=(Block(0, len(TEXT), BlockKind.PARAGRAPH),))
GOOD = "Where does the pumpd daemon read settings from?"


class Scripted(QuestionWriter):
    """Replies for each kind of wish, in the order of the parts that are asked about."""

    def __init__(self, *scripts: Sequence[str]) -> None:
        self.scripts, self.wishes = list(scripts), list[list[str]]()

    def _replies(self, wishes: Sequence[tuple[Reading, str]], params: Any) -> list[str]:
        self.wishes.append([wish for _, wish in wishes])
        return list(self.scripts.pop(0))


@pytest.mark.parametrize(
    ("scripts", "kept"),
    [
        (([GOOD, "What does it do?"], ["1"], ["Yes."]), [GOOD]),
        (([GOOD, "no question"], ["2"], []), []),
        (([GOOD, "no question"], ["1"], ["No"]), []),
    ],
)
def test_a_question_is_kept_if_both_samples_and_the_judgement_agree(
    scripts: tuple[list[str], ...], kept: list[str]
) -> None:
    """A question without a subject, one that another part answers, or one whose answer is half."""
    (reading,) = readings_of(FILE, DOCUMENT)
    writer = Scripted(*scripts)
    ((_, questions),) = writer.write([reading])
    assert [each.question for each in questions] == kept
    assert all(reading.text_of(each.part) == SENTENCES[0] for each in questions)
    assert len(writer.wishes[0]) == 2 and "part [1]" in writer.wishes[0][0]  # none of "This is why"


def test_an_answer_says_more_of_the_same_things() -> None:
    """An answer about other things, or the question again as an answer."""
    assert tells_something(GOOD, SENTENCES[0])
    assert not tells_something(GOOD, SENTENCES[2])
    assert not tells_something("Does the old pump in the hall run?", "The old pump in the hall runs.")


def test_passages_with_little_to_ask_about_are_not_read() -> None:
    """Hours of reading over navigation and tables of contents."""
    assert [type(each.passage) for each in readings_of(FILE, DOCUMENT)] == [Passage]
    menu = Document("menu", "Home\n\nSearch\n\nIndex", blocks=(Block(0, 4, BlockKind.PARAGRAPH),))
    assert not list(readings_of(FILE, menu))
