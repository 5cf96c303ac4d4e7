"""Follow-up questions of CANARD with the passage that answers each.

CANARD (Elgohary et al. 2019) holds questions of dialogues about a section of Wikipedia, their answers, and each question as a
person made it standalone. The corpus is every answer of every dialogue, each a passage with the titles of its article and
section; a question's gold passage is its own answer. A dialogue opens with its first question in the person's standalone form,
because whoever begins a conversation names its subject.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from ragspec.core import Document, Heading, Message
from ragspec.evaluation.datasets import lines_of, parse_json
from ragspec.evaluation.target_scores import QuestionCase
from ragspec.rag.chat.conversations import QaPair
from ragspec.rag.wording import ABSTENTION, numbered, quoted_answer
from ragspec.training.documentation import is_for_evaluation
from ragspec.training.reference.mixture import canard_dialogues
from ragspec.training.sentences import normalise, split_sentences

NUM_OTHER_PAGES = 2
FOLLOW_UP_ANSWER_WORDS = range(6, 50)
Half = Literal["tuned", "held_out"]

NO_ANSWER = re.compile(r"^\W*(i don.?t know|cannotanswer|unknown)\W*$", re.IGNORECASE)
_LEAST_WORDS = 3


class FollowUp(NamedTuple):
    """`half`: the rewriting rules were tuned on one half of the dialogues and are measured on the other.
    `rewrite`: by a person."""

    question: str
    said: tuple[QaPair, ...]
    gold: str
    half: Half
    rewrite: str


class FollowUpSet(NamedTuple):
    documents: list[Document]
    questions: list[FollowUp]


def read_canard(path: Path) -> FollowUpSet:
    """Raises: InputError."""
    documents: list[Document] = []
    questions: list[FollowUp] = []
    for name, rows in canard_dialogues(parse_json("".join(lines_of(path)), path)).items():
        title, section, *texts = max((row["History"] for row in rows.values()), key=len)
        turns = [QaPair(*texts[n : n + 2]) for n in range(0, len(texts) - 1, 2)]
        for number, turn in enumerate(turns, 1):
            if NO_ANSWER.match(turn.answer) or len(turn.answer.split()) < _LEAST_WORDS:
                continue
            gold = f"{name}:{number}"
            documents.append(Document(gold, turn.answer, title, headings=(Heading(0, 1, section),)))
            if number > 1 and 1 in rows and number in rows:
                said = (QaPair(rows[1]["Rewrite"], turns[0].answer), *turns[1 : number - 1])
                questions.append(FollowUp(turn.question, said, gold, half_of(title), rows[number]["Rewrite"]))
    return FollowUpSet(documents, questions)


def half_of(name: str) -> Half:
    """The half of a dialogue, fixed by a hash: tuned and reported dialogues stay apart."""
    return "tuned" if hashlib.sha256(name.encode()).digest()[0] % 2 else "held_out"


def spread(questions: Sequence[FollowUp], max_count: int | None) -> list[FollowUp]:
    """At most so many questions, evenly spaced over the list."""
    count = len(questions) if max_count is None else min(max_count, len(questions))
    return [questions[number * len(questions) // count] for number in range(count)]


def follow_up_cases(path: Path, count: int, seed: int) -> list[tuple[QuestionCase, QuestionCase]]:
    """Follow-up questions of CANARD's evaluation articles: made standalone by a person, and as the end of their dialogue.

    Both come with the same passages: the page of the dialogue, which is all its answers in random order, and the pages of two
    other articles. Questions whose answer is not part of one sentence are left out.
    """
    canard, rng = read_canard(path), random.Random(seed)
    golds = {document.id: document for document in canard.documents if is_for_evaluation(document.title)}
    questions = [asked for asked in canard.questions if asked.gold in golds]
    dialogues = [list(turns) for _, turns in groupby(questions, lambda asked: asked.gold.partition(":")[0])]
    pages = [(golds[turns[0].gold].title, _page(turns, golds, rng), turns) for turns in dialogues]
    cases = []
    for title, page, turns in pages:
        others = [other for other_title, other, _ in pages if other_title != title]
        passages = rng.sample([page, *rng.sample(others, NUM_OTHER_PAGES)], 1 + NUM_OTHER_PAGES)
        gold = passages.index(page) + 1
        for asked in turns:
            answer = normalise(golds[asked.gold].text)
            if len(answer.split()) in FOLLOW_UP_ANSWER_WORDS and any(answer in s for s in split_sentences(page)):
                case = QuestionCase(asked.rewrite, passages, gold, [answer])
                cases.append((case, replace(case, question=asked.question, said=_said(asked, passages, gold))))
    return rng.sample(cases, min(count, len(cases)))


def _page(turns: list[FollowUp], golds: dict[str, Document], rng: random.Random) -> str:
    """Why shuffled: in the dialogue's order, the answer would be whatever stands behind the previous quote."""
    answers = [turn.answer for turn in turns[-1].said if not NO_ANSWER.match(turn.answer)]
    texts = list(dict.fromkeys(map(normalise, [*answers, golds[turns[-1].gold].text])))
    return " ".join(rng.sample(texts, len(texts)))


def _said(asked: FollowUp, passages: list[str], gold: int) -> tuple[Message, ...]:
    """The turns as the product's chat shows them: each question with its passages, each answer as a quote."""
    messages, shown = list[Message](), Message("context", numbered(passages))
    for turn in asked.said:
        told = ABSTENTION if NO_ANSWER.match(turn.answer) else quoted_answer(normalise(turn.answer), gold)
        messages += [Message("user", turn.question), shown, Message("assistant", told)]
    return tuple(messages)
