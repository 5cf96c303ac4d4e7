"""Follow-up questions with the passage that answers each, from CANARD and from Schema-Guided Dialogue.

CANARD (Elgohary et al. 2019) holds questions of dialogues about a section of Wikipedia, their answers, and each question as a
person made it standalone. Its sections are not in the data; their sentences that were given as answers are. So the corpus is
every answer of every dialogue, each a passage with the titles of its article and section, and a question's gold passage is its
own answer. The dialogue opens with its first question as the person made it standalone, for whoever begins a conversation names
what it is about; titles are told to nobody but the index.

Schema-Guided Dialogue (Rastogi et al. 2020) holds dialogues with services; what a service found is not in the data, what it
said of it is. So the corpus has one passage a dialogue, everything its service stated, and a question's gold passage is that of
its own dialogue. Nobody made its questions standalone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragspec.core import Document, Heading
from ragspec.errors import ConfigError
from ragspec.rag.chat.conversations import Said

Half = Literal["tuned", "held_out"]

_NO_ANSWER = re.compile(r"^\W*(i don.?t know|cannotanswer|unknown)\W*$", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.?!]+(?:[.?!](?=\S)[^.?!]*)*[.?!]*")
_FACT = re.compile(r"\d|(?<=[a-z,] )[A-Z]")
_LEAST_WORDS = 3


@dataclass(frozen=True, slots=True)
class FollowUp:
    """`half`: rules were made looking at one half of the dialogues, and are measured on the other. `rewrite`: a person's."""

    question: str
    said: tuple[Said, ...]
    gold: str
    half: Half
    rewrite: str = ""


@dataclass(frozen=True, slots=True)
class FollowUpSet:
    name: str
    documents: tuple[Document, ...]
    questions: tuple[FollowUp, ...]


def read_canard(path: Path) -> FollowUpSet:
    """Raises: ConfigError."""
    dialogues: dict[str, dict[int, dict[str, Any]]] = {}
    for row in _json(path.read_text(encoding="utf-8") if path.exists() else "", path):
        dialogues.setdefault(row["QuAC_dialog_id"], {})[row["Question_no"]] = row
    documents: list[Document] = []
    questions: list[FollowUp] = []
    for name, rows in dialogues.items():
        title, section, *texts = max((row["History"] for row in rows.values()), key=len)
        turns = [Said(*texts[n : n + 2]) for n in range(0, len(texts) - 1, 2)]
        for number, turn in enumerate(turns, 1):
            if _NO_ANSWER.match(turn.answer) or len(turn.answer.split()) < _LEAST_WORDS:
                continue
            gold = f"{name}:{number}"
            documents.append(Document(gold, turn.answer, title, headings=(Heading(0, 1, section),)))
            if number > 1 and 1 in rows and number in rows:
                said = (Said(rows[1]["Rewrite"], turns[0].answer), *turns[1 : number - 1])
                questions.append(FollowUp(turn.question, said, gold, half_of(title), rows[number]["Rewrite"]))
    return FollowUpSet("canard", tuple(documents), tuple(questions))


def read_sgd(path: Path) -> FollowUpSet:
    """Raises: ConfigError."""
    documents: list[Document] = []
    questions: list[FollowUp] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for dialogue in _json("[" + ",".join(lines) + "]" if lines else "", path):
        name, texts = f"sgd:{dialogue['id']}", [text for _, text in dialogue["turns"]]
        turns = [Said(*texts[n : n + 2]) for n in range(0, len(texts) - 1, 2)]
        stated = " ".join(sentence for turn in turns for sentence in _stated(turn.answer))
        if not stated:
            continue
        documents.append(Document(name, stated))
        for number, turn in enumerate(turns):
            if number and "?" in turn.question and any(_stated(turn.answer)):
                questions.append(FollowUp(turn.question, tuple(turns[:number]), name, half_of(name)))
    return FollowUpSet("sgd", tuple(documents), tuple(questions))


def half_of(name: str) -> Half:
    """Fixed for ever: what was looked at stays apart from what is reported."""
    return "tuned" if hashlib.sha256(name.encode()).digest()[0] % 2 else "held_out"


def _stated(answer: str) -> Iterator[str]:
    """The sentences of an answer that state something: no question, and a number or a name in it."""
    for match in _SENTENCE.finditer(answer):
        sentence = match.group().strip()
        if not sentence.endswith("?") and _FACT.search(sentence):
            yield sentence


def _json(text: str, path: Path) -> Any:
    if not text:
        raise ConfigError(f"{path} does not exist")
    try:
        return json.loads(text)
    except ValueError as cause:
        raise ConfigError(f"{path} is not what it should be: {cause}") from cause
