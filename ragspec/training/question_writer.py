"""A model writes questions about passages of documentation, each answered by one part of its passage.

The model reads a passage as numbered parts and writes several questions, each with the number of the part that answers it. A
question is kept if it names its subject, if a second sample of the model, which sees the passage but not the number, gives the
same number, and if the model then holds the part for a whole answer. So every answer is a slice of its passage.

    >>> writer = QuestionWriter(engine, PromptBuilder(engine.target.tokenizer, engine.max_context_tokens))
    >>> for reading, questions in writer.write(readings): ...
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from ragspec.config import ChunkingConfig
from ragspec.core import BlockKind, Document, Message, Passage, Request, SamplingParams
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike
from ragspec.retrieval.chunking import chunk
from ragspec.training.packages import PackageFile
from ragspec.training.quotable import Part, quotable_parts
from ragspec.training.sentences import normalise

READINGS_AT_ONCE, QUESTIONS_A_READING = 8, 4
_LEAST_PARTS, _LEAST_PROSE = 3, 25
"""Parts of a passage that is read, and words of its sentences."""
_SYSTEM = (
    "You help to test a search engine for software documentation. You read one passage, cut into numbered parts, and work on "
    "questions that users who have never seen the passage may type."
)
_WRITE = (
    'The passage is from "{heading}". Write {count} different questions, each answered completely by exactly one part. A '
    'question names the program, option, file or idea that it is about, never says "this", "it" or "the passage", and does '
    "not repeat the words of the answer. Ask as users do: how to do something, what something is or does, a default or limit, "
    "why or when. Write one question a line, with the number of its part in brackets behind the question mark: QUESTION? [NUMBER]"
)
_FIND = (
    "Question: {question}\nWhich part answers this question? Reply with its number alone, or with 0 if no part does."
)
_JUDGE = (
    "Question: {question}\nAnswer: {answer}\nIs the question clear to a person who has not seen the passage, and does the answer "
    "alone answer all of it? Reply with yes or no."
)
_LINE = re.compile(r"^\W*(?:\d+[.)]\s*)?(?P<question>[A-Z][^\n]{10,160}?\?)\W*\[(?P<number>\d+)\]", re.MULTILINE)
_VAGUE = re.compile(
    r"\b(?:this|these|those|that (?:command|option|file|value|section|method|case)|it|its|they|them|passage|text|part|above|below"
    r"|following|mentioned|described|given|example)\b",
    re.IGNORECASE,
)
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=160)
_NUMBER = SamplingParams(temperature=0.3, max_tokens=4)
_YES = SamplingParams(temperature=0.0, max_tokens=2)


class Reading(NamedTuple):
    """A passage with the parts that may answer."""

    file: PackageFile
    document: Document
    passage: Passage
    parts: Sequence[Part]

    def text_of(self, part: Part) -> str:
        return self.document.text[part.start : part.end]


class WrittenQuestion(NamedTuple):
    question: str
    part: Part


def readings_of(file: PackageFile, document: Document) -> Iterator[Reading]:
    """The passages, as the product cuts them, that have enough to ask about."""
    for passage in chunk(document, ChunkingConfig()):
        parts = list(quotable_parts(document, passage.start, passage.end))
        prose = [part for part in parts if part.kind is not BlockKind.TABLE]
        if len(parts) >= _LEAST_PARTS and sum(part.num_words(document.text) for part in prose) >= _LEAST_PROSE:
            yield Reading(file, document, passage, parts)


class QuestionWriter:
    """`seed`: with equal seeds, readings and models, the questions are equal."""

    def __init__(self, engine: EngineLike, prompts: PromptBuilder, seed: int = 0) -> None:
        self._engine, self._prompts, self._seed = engine, prompts, seed

    def write(self, readings: Iterable[Reading]) -> Iterator[tuple[Reading, list[WrittenQuestion]]]:
        """Every reading with the questions that were kept. Raises: EngineError."""
        left = iter(readings)
        while some := list(islice(left, READINGS_AT_ONCE)):
            texts = self._replies([(each, _wish(each)) for each in some], _SAMPLED)
            asked = [
                (each, question) for each, text in zip(some, texts, strict=True) for question in _parsed(each, text)
            ]
            found = self._replies([(each, _FIND.format(question=q.question)) for each, q in asked], _NUMBER)
            agreed = [
                (each, q) for (each, q), text in zip(asked, found, strict=True) if _number(text) == _number_of(each, q)
            ]
            judged = self._replies(
                [(each, _JUDGE.format(question=q.question, answer=each.text_of(q.part))) for each, q in agreed], _YES
            )
            kept = [pair for pair, text in zip(agreed, judged, strict=True) if text.strip().lower().startswith("yes")]
            for reading in some:
                yield reading, [question for each, question in kept if each is reading]

    def _replies(self, wishes: Sequence[tuple[Reading, str]], params: SamplingParams) -> list[str]:
        """Why the passage comes first: all that is asked about it shares one reading of it."""
        requests = []
        for reading, wish in wishes:
            numbered = "\n".join(f"[{n}] {reading.text_of(part)}" for n, part in enumerate(reading.parts, start=1))
            user = f"Passage:\n{numbered}\n\n{wish}"
            ids = self._prompts.tokens([Message("system", _SYSTEM), Message("user", user)])
            key = f"{self._seed} {reading.passage.id} {wish}"
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
            requests.append(Request(f"{seed:x}", ids, replace(params, seed=seed)))
        return [completion.text for completion in self._engine.generate(requests)] if requests else []


def _wish(reading: Reading) -> str:
    heading = reading.passage.heading or reading.passage.title
    return _WRITE.format(heading=heading, count=min(QUESTIONS_A_READING, len(reading.parts)))


def _parsed(reading: Reading, text: str) -> Iterator[WrittenQuestion]:
    """The questions of a reply that name a part and their subject; of one part the first."""
    taken = set[int]()
    for match in _LINE.finditer(text):
        number, question = int(match["number"]), normalise(match["question"])
        if 1 <= number <= len(reading.parts) and number not in taken and not _VAGUE.search(question):
            taken.add(number)
            yield WrittenQuestion(question, reading.parts[number - 1])


def _number_of(reading: Reading, question: WrittenQuestion) -> int:
    return reading.parts.index(question.part) + 1


def _number(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0
