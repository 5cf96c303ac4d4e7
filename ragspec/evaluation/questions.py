"""A user's own questions: reads them from JSON lines, and judges the answers.

Owns the format of the lines and the judgement of one answer; asks nothing. A line is one of

    {"question": "When was the mill built?", "fact": "187[34]"}      answered right if the fact stands in the answer
    {"question": "Who sold it?", "answerable": false}                right if the answer says that no document tells
    {"turns": [{"question": ...}, ...]}                              a conversation: each turn may need the earlier turns
    {"text": "He go home.", "wrong": "He go\\\\b", "corrected": "He goes"}    a sentence to correct
    {"text": "He goes home.", "right": true}                         a sentence to leave as it is
    {"text": "Hello!", "route": "chat"}                              a message that needs no document; "search": one that does

and may have an `id`. `answer` is a fact given as plain text; `document` is the end of the path or id of the document that holds
the answer. Regular expressions are searched, of facts without regard to case and to the kind of white space.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ragspec.core import Passage, check_text
from ragspec.errors import InputError, did_you_mean
from ragspec.rag.answer import Answer
from ragspec.rag.wording import abstains


class _Line(BaseModel):
    """`evidence` is for people."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str | int = ""
    evidence: Any = None


class AskedQuestion(_Line):
    question: str
    fact: str = ""
    answer: str = ""
    answerable: bool = True
    document: str = ""

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """What a right answer holds; None if the line does not say."""
        if self.fact or not self.answer:
            return re.compile(self.fact, re.IGNORECASE) if self.fact else None
        # Why the borders: "no" stands in "know", and 12 in 1912
        literal = r"\s+".join(re.escape(word) for word in self.answer.split())
        return re.compile(rf"(?<![a-z0-9]){literal}(?![a-z0-9])", re.IGNORECASE)

    @model_validator(mode="after")
    def _agrees(self) -> AskedQuestion:
        _check(self.question, "question")
        _compiled(self.fact, "fact")
        if not self.answerable and (given := [name for name in ("fact", "answer", "document") if getattr(self, name)]):
            raise ValueError(f"a question that is not answerable has no {given[0]}")
        return self


class Dialogue(_Line):
    """Questions of one conversation; the turns after the first are follow-ups."""

    turns: tuple[AskedQuestion, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _has_turns(self) -> Dialogue:
        if not self.turns:
            raise ValueError("turns: a conversation has at least one question")
        return self


class CheckedSentence(_Line):
    """A sentence to correct, or one that is `right`. `answer`, a right correction, is for people, too."""

    text: str
    answer: str = ""
    wrong: str = ""
    corrected: str = ""
    right: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> CheckedSentence:
        _check(self.text, "text")
        _compiled(self.corrected, "corrected")
        if self.right == bool(self.wrong or self.corrected) or bool(self.wrong) != bool(self.corrected):
            raise ValueError('a text comes with "wrong" and "corrected", or with "right": true, or with "route"')
        if not _compiled(self.wrong, "wrong").search(self.text):
            raise ValueError("wrong: the expression matches nothing in the text")
        return self

    def passes(self, output: str) -> bool:
        """Whether the mistake is corrected, or a right sentence unchanged."""
        if self.right:
            return output == self.text
        return bool(re.search(self.corrected, output)) and not re.search(self.wrong, output)


class RoutedText(_Line):
    text: str
    route: Literal["chat", "search"]

    def passes(self, searched: bool) -> bool:
        return searched == (self.route == "search")


Line = AskedQuestion | Dialogue | CheckedSentence | RoutedText


def _check(text: str, name: str) -> None:
    try:
        check_text(text, name)
    except InputError as cause:
        raise ValueError(str(cause)) from cause


def _compiled(expression: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as cause:
        raise ValueError(f"{name}: {expression!r} is no regular expression ({cause})") from cause


def read_lines(paths: Sequence[Path]) -> list[Line]:
    """The lines of all files, each with an id: its own or, by default, its number, behind the file's name if there are several.

    Raises: InputError that names file and line.
    """
    lines: list[Line] = []
    seen = Counter[str]()
    paths = list(dict.fromkeys(paths))
    stems = Counter(path.stem for path in paths)
    for path in paths:
        file = path.stem if stems[path.stem] == 1 else str(path)
        for number, text in _numbered_lines(path):
            where = f"{path}, line {number}"
            line = parse_line(text, where)
            name = str(line.id) if line.id != "" else f"{file}:{number}" if len(paths) > 1 else str(number)
            seen[name] += 1
            if seen[name] > 1:
                raise InputError(f"{where}: an earlier line has the id {name!r}, too")
            lines.append(line.model_copy(update={"id": name}))
    return lines


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else f"not UTF-8 ({cause})"
        raise InputError(f"cannot read {path}: {reason}") from cause
    # Why not splitlines: JSON strings may hold U+2028
    yield from ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def parse_line(text: str, where: str) -> Line:
    """`where`: the line's place, for messages. Raises: InputError."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise InputError(f"{where}: not JSON ({cause})") from cause
    kind = _kind_of(row, where)
    try:
        return kind.model_validate({name: value for name, value in row.items() if value is not None})
    except ValidationError as cause:
        raise InputError(f"{where}: {'; '.join(_reasons(kind, cause))}") from cause


def _kind_of(row: Any, where: str) -> type[Line]:
    kinds: dict[str, type[Line]] = {"question": AskedQuestion, "turns": Dialogue, "text": CheckedSentence}
    if not isinstance(row, dict):
        raise InputError(f"{where}: not a JSON object")
    given = [name for name in kinds if row.get(name) is not None]
    if len(given) != 1:
        near = next((hint for name in row if (hint := did_you_mean(name, kinds))), "") if not given else ""
        raise InputError(
            f"{where}: a line has one of question, turns and text, not {' and '.join(given) or 'none'}{near}"
        )
    return RoutedText if "route" in row else kinds[given[0]]


def _reasons(kind: type[Line], error: ValidationError) -> Iterator[str]:
    for each in error.errors():
        place = each["loc"]
        known = AskedQuestion if len(place) > 1 else kind
        reason = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            reason = f"unknown field{did_you_mean(place[-1], known.model_fields)}"
        yield ": ".join([*([".".join(map(str, place))] if place else []), reason])


def questions_of(lines: Sequence[Line]) -> list[AskedQuestion]:
    """All questions, the turns of conversations among them."""
    found: list[AskedQuestion] = []
    for line in lines:
        found += line.turns if isinstance(line, Dialogue) else [line] if isinstance(line, AskedQuestion) else []
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """None where the line does not tell. `shown`: the prompt had a passage with the fact or, without a fact, of the document.
    `right`: the answer holds the fact; for a question that is not answerable: it abstains. `quoted`: an exact quote of the
    answer holds the fact. `labels`: of the answer's sentences.
    """

    shown: bool | None
    right: bool | None
    quoted: bool | None
    abstained: bool
    labels: Counter[str]


def holds_answer(question: AskedQuestion, passage: Passage, text: str) -> bool:
    """Whether a piece of a passage's text answers; False where the line does not tell a fact."""
    pattern, document = question.pattern, question.document
    return pattern is not None and (not document or _is_of(passage, document)) and _holds(pattern, text)


def judge(question: AskedQuestion, answer: Answer | None) -> Verdict:
    """`answer` None: the question was refused, which is not right."""
    pattern, passages = question.pattern, answer.passages if answer else ()
    says_no = answer is not None and abstains(answer.text)
    labels = Counter[str](sentence.label for sentence in answer.sentences) if answer else Counter[str]()
    if not question.answerable:
        return Verdict(None, says_no, None, says_no, labels)
    if pattern is None:
        shown = any(_is_of(passage, question.document) for passage in passages) if question.document else None
        return Verdict(shown, None, None, says_no, labels)
    return Verdict(
        any(_holds(pattern, passage.text) for passage in passages),
        answer is not None and not says_no and _holds(pattern, answer.text),
        answer is not None and any(_holds(pattern, quote) for quote in exact_quotes(answer)),
        says_no,
        labels,
    )


def exact_quotes(answer: Answer) -> Iterator[str]:
    """The words of passages that an answer points at: its citations, and sentences that are quoted or support one of its own."""
    texts = {passage.id: passage.text for passage in answer.passages}
    spans = [(each.passage_id, each.passage_start, each.passage_end) for each in answer.citations]
    spans += [(s.passage_id, s.passage_start, s.passage_end) for s in answer.sentences if s.label != "unsupported"]
    yield from (texts[passage][start:end] for passage, start, end in spans)


def _holds(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.search(" ".join(text.split())) is not None


def _is_of(passage: Passage, document: str) -> bool:
    """Whether `document` is the id or path of the passage's document, or the last parts of it."""
    return any(f"/{name}".endswith(f"/{document.lstrip('/')}") for name in (passage.document_id, passage.source))
