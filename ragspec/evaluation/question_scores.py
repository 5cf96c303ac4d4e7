"""Counts over judged questions: what was shown, right, quoted and abstained, with 95 % intervals, and two configurations.

Pure functions of results. An opening counts among the questions; follow-ups, which need the conversation before them, count apart
where they are right.

    >>> wilson(8, 10)
    (0.490..., 0.943...)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ragspec.evaluation.questions import AskedQuestion, CheckedSentence, RoutedText, Verdict
from ragspec.rag.answer import Answer

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
        return self.message.passes(self.searched)

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
    return [
        *(
            Share(f"sentences_{name}", f"sentences {name}", labels[name], labels.total())
            for name in ("quoted", "supported", "related")
        ),
        Share("sentences_unsupported", "sentences unsupported", labels["unsupported"], labels.total()),
        Share.over("all_supported", "answers, no sentence unsupported", (not own["unsupported"] for own in said)),
    ]


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
