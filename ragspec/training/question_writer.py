"""A model writes questions about passages of documentation, each answered by one part of its passage.

The model reads a passage as numbered parts, and writes a question for each of some parts. A question is kept if it names its
subject, if a second sample of the model, which sees the passage but not the number, gives the same number, and if the model then
holds the part for a whole answer. So every answer is a slice of its passage. All that is asked about a passage shares one
reading.

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
from ragspec.training.documentation_rows import PackageFile
from ragspec.training.sentences import Part, normalise, quotable_parts

READINGS_AT_ONCE, QUESTIONS_A_READING = 8, 4
_LEAST_WORDS = 7
"""Of a part that is asked about."""
_LEAST_PARTS, _LEAST_PROSE = 3, 25
"""Parts of a passage that is read, and words of its sentences."""
_SYSTEM = (
    "You help to test a search engine for software documentation. You read one passage, cut into numbered parts. Questions are "
    "such as users type who have never seen the passage: how to do something, what something is or does, a default or limit, "
    'why or when. A question names the program, option, file or idea that it is about, never says "this", "it" or "the '
    'passage", and does not repeat the words of the answer.'
)
_WRITE = (
    'The passage is from "{heading}". Write one short question in plain English that part [{number}] alone answers completely. '
    "Reply with the question alone."
)
_FIND = (
    "Question: {question}\nWhich part answers this question? Reply with its number alone, or with 0 if no part does."
)
_JUDGE = (
    "Question: {question}\nAnswer: {answer}\nIs the question clear to a person who has not seen the passage, and does the answer "
    "alone answer all of it? Reply with yes or no."
)
_QUESTION = re.compile(r"\W{0,3}(?P<question>[A-Z][^\n?]{10,160}\?)")
_VAGUE = re.compile(
    r"\b(?:this|these|those|that (?:command|option|file|value|section|method|case)|it|its|they|them|passage|text|part|above|below"
    r"|following|mentioned|described|given|example)\b",
    re.IGNORECASE,
)
_LEANS = re.compile(r"(?:He|She|It|They|This|These|That|Those|Such|Here|There|See|Note|However|Also|But|And|So|Then)\b")
"""The first word of a part that cannot stand alone."""
_LEAST_SHARED, _LEAST_NEW = 0.5, 4
"""Of a question's stems the share that its answer holds, and the stems that the answer adds."""
_COMMON = frozenset(
    "what when where which who why how does did can could shoul the for with and you your are was were has have from that this "
    "will would into not any all use used using one than then".split()
)
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40)
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

    def number(self, part: Part) -> int:
        """From 1 on."""
        return self.parts.index(part) + 1

    def wish(self, part: Part) -> str:
        heading = self.passage.heading or self.passage.title
        return _WRITE.format(heading=heading, number=self.number(part))

    @property
    def asked_parts(self) -> list[Part]:
        """The longest parts, in their order."""
        long = [part for part in self.parts if part.num_words(self.document.text) >= _LEAST_WORDS]
        long = [part for part in long if not _LEANS.match(self.document.text, part.start)]
        most = sorted(long, key=lambda part: part.start - part.end)[:QUESTIONS_A_READING]
        return sorted(most)


class WrittenQuestion(NamedTuple):
    question: str
    part: Part


def readings_of(file: PackageFile, document: Document) -> Iterator[Reading]:
    """The passages, as the product cuts them, that have enough to ask about."""
    for passage in chunk(document, ChunkingConfig()):
        parts = list(quotable_parts(passage))
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
            wanted = [(each, part) for each in some for part in each.asked_parts]
            texts = self._replies([(each, each.wish(part)) for each, part in wanted], _SAMPLED)
            written = [
                (each, WrittenQuestion(_question(text), part)) for (each, part), text in zip(wanted, texts, strict=True)
            ]
            asked = [(each, q) for each, q in written if tells_something(q.question, each.text_of(q.part))]
            found = self._replies([(each, _FIND.format(question=q.question)) for each, q in asked], _NUMBER)
            agreed = [
                pair for pair, text in zip(asked, found, strict=True) if _number(text) == pair[0].number(pair[1].part)
            ]
            wishes = [_JUDGE.format(question=q.question, answer=each.text_of(q.part)) for each, q in agreed]
            judged = self._replies([(each, wish) for (each, _), wish in zip(agreed, wishes, strict=True)], _YES)
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


def _question(text: str) -> str:
    """The question of a reply; empty if it does not name its subject."""
    match = _QUESTION.match(text.strip())
    return normalise(match["question"]) if match and not _VAGUE.search(match["question"]) else ""


def tells_something(question: str, answer: str) -> bool:
    """Whether the answer speaks of the question's things, and says more of them than the question does."""
    asked, told = (
        frozenset(word[:5] for word in re.findall(r"[a-z\d]{3,}", text.lower())) - _COMMON
        for text in (question, answer)
    )
    return bool(asked) and len(asked & told) >= _LEAST_SHARED * len(asked) and len(told - asked) >= _LEAST_NEW


def _number(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0
