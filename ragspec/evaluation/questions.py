"""A user's own questions: reads them from JSON lines, judges the answers, and counts over judged questions.

Owns the format of the lines and the judgement of one answer; asks nothing. A line is one of

    {"question": "When was the mill built?", "fact": "187[34]"}      answered right if the fact stands in the answer
    {"question": "Who sold it?", "answerable": false}                right if the answer says that no document tells
    {"turns": [{"question": ...}, ...]}                              a conversation: each turn may need the earlier turns
    {"text": "He go home.", "wrong": "He go\\\\b", "corrected": "He goes"}    a sentence to correct
    {"text": "He goes home.", "right": true}                         a sentence to leave as it is
    {"text": "Hello!", "route": "chat"}                              a message that needs no document; "search": one that does

and may have an `id`. `answer` is a fact given as plain text; `document` is the end of the path or id of the document that holds
the answer. Regular expressions are searched, of facts without regard to case and to the kind of white space.

Counts are what was shown, right, quoted and abstained, with 95 % intervals, and two configurations. An opening counts among the
questions; follow-ups, which need the conversation before them, count apart where they are right.

    >>> wilson(8, 10)
    (0.490..., 0.943...)
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

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


_NORMAL_95 = 1.959964


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """`seconds` from the question to the last token. `answer` None: the question was refused, for the reason `refused`."""

    id: str
    question: AskedQuestion
    is_follow_up: bool
    answer: Answer | None
    verdict: Verdict
    seconds: float
    refused: str = ""

    @property
    def is_right(self) -> bool:
        return bool(self.verdict.right)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a line of JSON."""
        verdict, answer = self.verdict, self.answer
        judged = {name: getattr(verdict, name) for name in ("shown", "right", "quoted", "abstained")}
        row = {"id": self.id, "question": self.question.question, "follow_up": self.is_follow_up, **judged}
        row |= {"seconds": round(self.seconds, 3)}
        if answer is None:
            return row | {"error": self.refused}
        whole = answer.to_dict()
        kept = {name: whole[name] for name in ("citations", "sentences", "unknown_quotations", "finish_reason")}
        return row | {"text": answer.text, **kept, "passages": [passage.id for passage in answer.passages]}


@dataclass(frozen=True, slots=True)
class CorrectedSentence:
    """`output` None: the sentence was refused, for the reason `refused`."""

    id: str
    sentence: CheckedSentence
    output: str | None
    seconds: float
    refused: str = ""

    @property
    def is_right(self) -> bool:
        return self.output is not None and self.sentence.passes(self.output)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a line of JSON."""
        row = {"id": self.id, "text": self.sentence.text, "right": self.is_right, "seconds": round(self.seconds, 3)}
        return row | ({"error": self.refused} if self.output is None else {"corrected": self.output})


@dataclass(frozen=True, slots=True)
class RoutedMessage:
    """`searched`: whether a chat searches for the message."""

    id: str
    message: RoutedText
    searched: bool
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.searched == (self.message.route == "search")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a line of JSON."""
        return {"id": self.id, "text": self.message.text, "searched": self.searched, "right": self.is_right}


LineResult = AnsweredQuestion | CorrectedSentence | RoutedMessage


class Share(NamedTuple):
    """`num` of `of`. `key`: in the JSON line, where `of` stands under `<key>_of`."""

    key: str
    meaning: str
    num: int
    of: int

    @classmethod
    def over(cls, key: str, meaning: str, values: Iterable[bool | None]) -> Share:
        """None counts neither way."""
        told = [value for value in values if value is not None]
        return cls(key, meaning, sum(told), len(told))


def shares(results: Sequence[LineResult]) -> list[Share]:
    """Every share of which there is at least one case, in the order of the table."""
    asked = [each for each in results if isinstance(each, AnsweredQuestion)]
    answerable = [each for each in asked if each.question.answerable]
    first, later = ([each.verdict for each in answerable if each.is_follow_up is late] for late in (False, True))
    sentences = [each for each in results if isinstance(each, CorrectedSentence)]
    refusable: list[AnsweredQuestion | CorrectedSentence] = [*asked, *sentences]
    counts = [
        Share.over("shown", "passage shown", (each.shown for each in first)),
        Share.over("right", "answers right", (each.right for each in first)),
        Share.over("follow_up_shown", "follow-ups, passage shown", (each.shown for each in later)),
        Share.over("follow_up_right", "follow-ups right", (each.right for each in later)),
        Share.over("right_quoted", "right answers with a quote", (v.quoted for v in [*first, *later] if v.right)),
        Share.over("abstained", "unanswerable, abstained", (e.is_right for e in asked if not e.question.answerable)),
        Share.over("wrongly_abstained", "answerable, abstained", (each.verdict.abstained for each in answerable)),
        *_label_shares(asked),
        Share.over("corrected", "mistakes corrected", (e.is_right for e in sentences if not e.sentence.right)),
        Share.over("changed", "right sentences changed", (not e.is_right for e in sentences if e.sentence.right)),
        Share.over("routed", "messages routed right", (e.is_right for e in results if isinstance(e, RoutedMessage))),
        Share("refused", "refused", sum(bool(each.refused) for each in refusable), len(refusable)),
    ]
    return [share for share in counts if share.of and (share.num or share.key != "refused")]


def _label_shares(asked: Sequence[AnsweredQuestion]) -> list[Share]:
    labels = sum((each.verdict.labels for each in asked), Counter[str]())
    said = [each.verdict.labels for each in asked if each.verdict.labels]
    names = ("quoted", "supported", "related", "unsupported")
    shares = [Share(f"sentences_{name}", f"sentences {name}", labels[name], labels.total()) for name in names]
    all_supported = (not own["unsupported"] for own in said)
    return [*shares, Share.over("all_supported", "answers, no sentence unsupported", all_supported)]


_LEAST_CASES = 5
_MOST_LOST = 0.05


def proposed_threshold(results: Sequence[LineResult]) -> float | None:
    """The highest `retriever.abstain_below` that loses 1 in 20 questions whose passage was shown at most; None if it catches no
    unanswerable question, or if there are fewer than 5 of either kind."""
    asked = [each for each in results if isinstance(each, AnsweredQuestion) and not each.is_follow_up]
    scored = [(each, each.answer.closeness) for each in asked if each.answer is not None]
    good = sorted(close for each, close in scored if close is not None and each.verdict.shown)
    bad = [close for each, close in scored if close is not None and not each.question.answerable]
    if min(len(good), len(bad)) < _LEAST_CASES:
        return None
    threshold = math.floor(1000 * good[int(_MOST_LOST * len(good))]) / 1000
    return threshold if any(close < threshold for close in bad) else None


def wilson(num: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share. Source: Wilson 1927, the score interval."""
    if not of:
        return 0.0, 1.0
    z2, share = _NORMAL_95**2, num / of
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return max(0.0, middle - half), min(1.0, middle + half)


def p50_s(results: Sequence[LineResult]) -> float | None:
    """The median answer's seconds; None without answers."""
    seconds = [each.seconds for each in results if isinstance(each, AnsweredQuestion) and each.answer is not None]
    return median(seconds) if seconds else None


def only_right(first: Sequence[LineResult], second: Sequence[LineResult]) -> tuple[int, int]:
    """How many questions and sentences only the first configuration got right, and only the second."""
    pairs = [(a.is_right, b.is_right) for a, b in zip(first, second, strict=True)]
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
