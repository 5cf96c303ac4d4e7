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
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ragspec.config import RetrieverConfig
from ragspec.core import Document, Heading
from ragspec.evaluation.datasets import json_rows, lines_of, parse_json
from ragspec.evaluation.timing import Tick, no_tick
from ragspec.rag.chat.conversations import QaPair
from ragspec.rag.chat.rewrite_rules import rewrite_by_rules
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index

Half = Literal["tuned", "held_out"]

NO_ANSWER = re.compile(r"^\W*(i don.?t know|cannotanswer|unknown)\W*$", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.?!]+(?:[.?!](?=\S)[^.?!]*)*[.?!]*")
_FACT = re.compile(r"\d|(?<=[a-z,] )[A-Z]")
_LEAST_WORDS = 3


class FollowUp(NamedTuple):
    """`half`: the rewriting rules were tuned on one half of the dialogues and are measured on the other.
    `rewrite`: by a person."""

    question: str
    said: tuple[QaPair, ...]
    gold: str
    half: Half
    rewrite: str = ""


class FollowUpSet(NamedTuple):
    name: str
    documents: list[Document]
    questions: list[FollowUp]


def read_canard(path: Path) -> FollowUpSet:
    """Raises: InputError."""
    dialogues: dict[str, dict[int, dict[str, Any]]] = {}
    for row in parse_json("".join(lines_of(path)), path):
        dialogues.setdefault(row["QuAC_dialog_id"], {})[row["Question_no"]] = row
    documents: list[Document] = []
    questions: list[FollowUp] = []
    for name, rows in dialogues.items():
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
    return FollowUpSet("canard", documents, questions)


def read_sgd(path: Path) -> FollowUpSet:
    """Raises: InputError."""
    documents: list[Document] = []
    questions: list[FollowUp] = []
    for _, dialogue in json_rows(path):
        name, texts = f"sgd:{dialogue['id']}", [text for _, text in dialogue["turns"]]
        turns = [QaPair(*texts[n : n + 2]) for n in range(0, len(texts) - 1, 2)]
        stated = " ".join(sentence for turn in turns for sentence in _stated(turn.answer))
        if not stated:
            continue
        documents.append(Document(name, stated))
        for number, turn in enumerate(turns):
            if number and "?" in turn.question and _stated(turn.answer):
                questions.append(FollowUp(turn.question, tuple(turns[:number]), name, half_of(name)))
    return FollowUpSet("sgd", documents, questions)


def half_of(name: str) -> Half:
    """The half of a dialogue, fixed by a hash: tuned and reported dialogues stay apart."""
    return "tuned" if hashlib.sha256(name.encode()).digest()[0] % 2 else "held_out"


def _stated(answer: str) -> list[str]:
    """Sentences of an answer that state something: no questions, with a number or a name."""
    sentences = (match.group().strip() for match in _SENTENCE.finditer(answer))
    return [sentence for sentence in sentences if not sentence.endswith("?") and _FACT.search(sentence)]


AS_ASKED, RULES, PERSON = "as asked", "rules", "person"
_BATCH = 128

Recalls = dict[str, dict[str, float]]
"""By set, then by the writer of the query: the share of questions whose gold passage is among the first ones found."""


def measure_follow_ups(
    data: Path,
    encoder: TextEncoder,
    *,
    num_rows: int | None = None,
    num_passages: int = 3,
    retriever: RetrieverConfig | None = None,
    half: Half = "held_out",
    tick: Tick = no_tick,
) -> Recalls:
    """Recall over one half of each set, at most `num_rows` questions of it; the corpora stay whole.

    `data` holds the folders canard and sgd. Raises: InputError if the data is not there.
    """
    recalls: Recalls = {}
    for each in (read_canard(data / "canard" / "dev.json"), read_sgd(data / "sgd" / "dev.jsonl")):
        questions = spread([question for question in each.questions if question.half == half], num_rows)
        with tempfile.TemporaryDirectory(prefix="ragspec-follow-ups-") as folder:
            index = Path(folder) / "index"
            build_index(each.documents, index, encoder)
            opened = Retriever(encoder, Store.open(index, encoder.identity), retriever or RetrieverConfig())
            recalls[each.name] = _recall(each.name, questions, opened, num_passages, tick)
    return recalls


def _recall(name: str, questions: Sequence[FollowUp], retriever: Retriever, k: int, tick: Tick) -> dict[str, float]:
    queries = {
        AS_ASKED: [each.question for each in questions],
        RULES: [rewrite_by_rules(each.question, each.said) for each in questions],
    }
    if all(each.rewrite for each in questions):
        queries[PERSON] = [each.rewrite for each in questions]
    recall = {}
    for number, (writer, texts) in enumerate(queries.items()):
        num_found = 0
        for first in range(0, len(texts), _BATCH):
            passages = retriever.retrieve(texts[first : first + _BATCH], k).passages
            pairs = zip(questions[first : first + _BATCH], passages, strict=True)
            num_found += sum(any(p.document_id == each.gold for p in best) for each, best in pairs)
            done = number * len(texts) + min(first + _BATCH, len(texts))
            tick(f"follow-ups, {name}", done, len(queries) * len(texts))
        recall[writer] = num_found / max(len(texts), 1)
    return recall


def spread(questions: Sequence[FollowUp], most: int | None) -> list[FollowUp]:
    """At most so many questions, evenly spaced over the list."""
    count = len(questions) if most is None else min(most, len(questions))
    return [questions[number * len(questions) // count] for number in range(count)]
