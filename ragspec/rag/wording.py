"""Every string that prompts and the adapter's training must agree on, and the format of answers.

Owns wording and order; the target's chat template owns the control tokens. The instruction stands in the system message, so a
conversation reads it once. Passages stand before their question, so many questions share one reading of them:

    system     Answer from the numbered passages. ...
    user       [1] first passage

               [2] second passage

               Question: Who wrote it?
    assistant  "The sentence." [1] – short answer.

The caller's own system message stands before the instruction. A conversation without passages has no instruction.

A target without an adapter answers in the layout "free": one sentence of its own, to which `ragspec.rag.support` adds the exact
words of a passage.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from ragspec.config import DEFAULT_ADAPTER, TargetConfig
from ragspec.core import Message
from ragspec.errors import ModelError
from ragspec.rag.languages import ENGLISH

INSTRUCTION = (
    "Answer from the numbered passages. Quote the sentence that answers, word for word, then give the number of its passage "
    "and the short answer. If no passage answers the question, say: The passages do not say."
)
ABSTENTION = "The passages do not say."
FREE_INSTRUCTION = (
    "Answer the question from the numbered passages, in one or two short sentences. Name exact values, options and commands as "
    "the passages write them."
)
"""Why nothing on passages without an answer: a model of 1.5 B then refused 17 of 39 questions that its passages answer."""
DOUBTS = {
    "stated": "\n\nFirst decide: is the answer to this question stated in the passages? Reply only Yes or No.",
    "contained": "\n\nDo the passages contain the information that answers this question? Reply only Yes or No.",
}
"""Behind a question, for targets that answer in their own words. "stated": of earlier versions."""
UNKNOWN_CLOSENESS = {"stated": 0.5, "contained": 0.9}
"""Stands for that of a follow-up's passages. Of 47 follow-ups, which documents answer, a model of 1.5 B doubts 6 with 0.5, one of
them answered right otherwise, and 2 with 0.9, neither of them right."""
SHORT_INSTRUCTION = (
    "You answer questions about documents. Use only the passages. Answer in one short sentence. If the passages do not contain "
    f"the answer, reply: {ABSTENTION}"
)
NOTHING_CLOSE = "Nothing in your documents is close to this question."
OTHER_LANGUAGE = "This question seems to be in a language that the model in use does not know"
NOT_SUPPORTED = "Nothing in your documents supports an answer to this question."
GRAMMAR_REQUEST = "Correct the grammar: "
QUESTION = "Question: "
LEAST_FOUND = 0.5
"""Calibrated score of the best passage from which a quote counts as the answer."""
DASH = "–"
"""Before a short answer: the answer then begins with a space and has the same tokens as in the middle of its sentence."""

FollowUps = Literal["carried", "cited"]
Doubt = Literal["", "stated", "contained"]
TODAYS_DOUBT: Doubt = "contained"

_ABSTAINS = re.compile(
    r"(?i)(?:(?:sorry|unfortunately|i'm sorry),? )?(?:(?:none|neither) of )?(?:the |these |your )?(?:given |provided |numbered )?"
    r"(?:passages?|documents?|sources?|context)(?: \[?\d+\]?)?(?: provided| given)? "
    r"(?:(?:do(?:es)?|did)(?: not|n't)(?: \w+ly)? (?:say|contain|mention|provide|specify|state|include|give|answer|indicate|"
    r"describe|discuss|address|explain|hold|have|list|cover|define|name|refer)|(?:says?|contains?|mentions?|provides?|states?|answers?)\b)"
)
"""A model's own words for `ABSTENTION`; "the passage says" counts behind "none of" alone."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s")
_GOES_ON = re.compile(r"\b(?:but|however|though|although|yet)\b|[;:]", re.IGNORECASE)
"""Behind these a sentence may claim what no passage says."""

_ANSWER = re.compile(rf'^"(?P<quote>.*)" \[(?P<passage>\d+)\](?:\s*{DASH})?\s*(?P<short>.*)$', re.DOTALL)


class QuotedAnswer(NamedTuple):
    """`passage`: the number of the quoted passage, from 1. `short`: the short answer, or an empty text."""

    quote: str
    passage: int
    short: str


def abstains(text: str) -> bool:
    """Whether an answer's first sentence says that the passages hold no answer, and nothing else, in any known words."""
    text = text.strip()
    if text.startswith((NOTHING_CLOSE, NOT_SUPPORTED, OTHER_LANGUAGE)):
        return True
    sentence = _SENTENCE_END.split(text, 1)[0]
    if _GOES_ON.search(sentence):
        return False
    if text.startswith(ABSTENTION.rstrip(".")):
        return True
    found = _ABSTAINS.match(text)
    return found is not None and re.search(r"\b(?:not|none|neither)\b|n't", found.group(), re.IGNORECASE) is not None


def nothing_close(titles: Sequence[str]) -> str:
    """What is said in place of an answer where no passage is close to the question."""
    nearest = "; ".join(dict.fromkeys(filter(None, titles)))
    return f"{NOTHING_CLOSE} The nearest: {nearest}." if nearest else NOTHING_CLOSE


def other_language(name: str) -> str:
    """What is said in place of an answer to a question in a language that the target does not know."""
    return f"{OTHER_LANGUAGE}: {name}. It answers in English; ragspec models lists models that know more languages."


def found_words(closeness: float | None) -> str:
    """How a quote is introduced, by the calibrated score of the best passage; empty without one."""
    if closeness is None:
        return ""
    return "found in" if closeness >= LEAST_FOUND else "closest passage"


def system_text(own: str = "", instruction: str = INSTRUCTION) -> str:
    """The system message of a conversation with passages; `own`: the caller's."""
    return f"{own}\n\n{instruction}" if own.strip() else instruction


def numbered(texts: Sequence[str]) -> str:
    """`[1] text`, one after another."""
    return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1))


def user_text(question: str, numbered_passages: str, *, question_first: bool = False, label: str = QUESTION) -> str:
    """The user's message: numbered passages and their question, behind its `label`."""
    parts = [numbered_passages, label + question]
    return "\n\n".join(reversed(parts) if question_first else parts)


def question_messages(question: str, passages: Sequence[str], own_system: str = "") -> list[Message]:
    """The conversation of one question over passages, for the tokenizer's chat template."""
    return [Message("system", system_text(own_system)), Message("user", user_text(question, numbered(passages)))]


def grammar_messages(sentence: str) -> list[Message]:
    """The conversation that asks for a corrected sentence."""
    return [Message("user", GRAMMAR_REQUEST + sentence)]


def quoted_answer(quote: str, passage: int, short: str = "") -> str:
    """Evidence first: the quoted sentence, its passage's number, then the short answer, if there is one."""
    answer = f'"{quote}" [{passage}]'
    return f"{answer} {DASH} {short.rstrip('.')}." if short else answer


def parse_answer(text: str) -> QuotedAnswer | None:
    """The parts of an answer in the format of `quoted_answer`, or None."""
    match = _ANSWER.match(text.strip())
    if match is None:
        return None
    return QuotedAnswer(match["quote"], int(match["passage"]), match["short"].strip().rstrip("."))


def _doubt(given: Any) -> Any:
    """Earlier versions knew one doubt."""
    return ("stated" if given else "") if given in (True, False) else given


class AnswerFit(NamedTuple):
    """The biases of a target's answers, in logits. Fitted to the adapter in whose folder it stands, or to a model of the
    catalogue.

    ABSTENTION's first token, or the "No" to a doubt, gets `intercept + slope * logit(closeness)`. `quote_weight`: the bias of a
    certain quote, see `ragspec.rag.quote_choice`. `mark`: the bias of a quotation mark as the first token. `doubts`: the key in
    DOUBTS of what a target that answers in its own words is asked first, or empty. `retrieval_head`: layer and head that look at
    the text which answers, see `ragspec.rag.retrieval_head`; `attention_weight`: of the logarithm of a span's share of its
    attention, beside `SpanFeatures`.
    """

    intercept: float = 0.0
    slope: float = 0.0
    quote_weight: float = 0.0
    mark: float = 0.0
    doubts: Annotated[Doubt, BeforeValidator(_doubt)] = ""
    retrieval_head: tuple[int, int] | None = None
    attention_weight: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Self:
        """The fit of a file; zero if there is none. Raises: ModelError."""
        if not path.is_file():
            return cls()
        try:
            return TypeAdapter(cls).validate_python({**json.loads(path.read_text(encoding="utf-8"))})
        except (OSError, ValueError, TypeError) as cause:
            raise ModelError(f"{path} does not hold {', '.join(cls._fields)}: {cause}") from cause

    def abstention_bias(self, closeness: float) -> float:
        """From -100 to 100. `closeness`: between 0 and 1, as in `SearchResult`."""
        odds = math.log(max(closeness, 1e-9) / max(1.0 - closeness, 1e-9))
        return max(-100.0, min(100.0, self.intercept + self.slope * odds))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TextRules:
    """What decides texts from passages beside the configuration. Jobs and conversations go on by the rules they were begun with.

    `quotes`: "blocks", as `ragspec.rag.quotable` says; "sentences", without borders at tables and terms, and without nested
    lines; or "words": any run of whole words. `languages`: codes of the
    languages that the target answers in; empty: not known. `routing`: "signs": as `ragspec.rag.chat.routing` says; "none": each
    message is searched for. `target`: whose fit and languages these are. `layout`: as in `PromptConfig`; empty: of an earlier
    version. `symbols`: whether a question's options, variables and paths count as written where likely quotes are chosen.
    `places`: whether a span's place in its document counts there: the words of the nearest heading are the span's, and the answer
    to a follow-up likely stands behind the latest quote. A default then counts where one is asked for, and no likely quote ends
    in a question.
    `follow_ups`: "cited": a follow-up's own words find a further passage in the documents that the latest answer cites, and
    choose the likely quotes; "carried": it keeps a passage that the latest answers cite, and the names that it lacks choose too.
    `says_none_found`: whether NOTHING_CLOSE is said where the search finds no passage; else the target answers from memory.
    `short_answers`: behind a quote; "quoted": words of that quote; "free": any text.
    """

    quotes: Literal["blocks", "sentences", "words"] = "sentences"
    fit: AnswerFit = AnswerFit()
    languages: tuple[str, ...] = ()
    routing: Literal["signs", "none"] = "signs"
    target: str = ""
    layout: str = ""
    symbols: bool = False
    places: bool = False
    follow_ups: FollowUps = "carried"
    says_none_found: bool = False
    short_answers: Literal["quoted", "free"] = "free"

    @classmethod
    def of(cls, target: TargetConfig, layout: str) -> Self:
        """Today's rules for a target. Raises: ModelError."""
        adapter = target.adapter_dir
        languages = (ENGLISH,) if adapter == DEFAULT_ADAPTER else ()
        name = f"{target.model}, adapter {target.adapter}"
        fit = AnswerFit.read(target.fit_file)
        newer: Any = {"symbols": True, "places": True, "follow_ups": "cited", "says_none_found": True,
            "short_answers": "quoted"}  # fmt: skip
        return cls("blocks", fit, languages=languages, target=name, layout=layout, **newer)

    def with_target_of(self, own: TextRules) -> TextRules:
        """These rules in a conversation that goes on with the target of `own`, which may be another than it was begun with."""
        if self.target == own.target or self == FORMER_RULES:
            return self
        kept = ("quotes", "routing", "symbols", "places", "follow_ups", "says_none_found", "short_answers")
        return replace(own, **{name: getattr(self, name) for name in kept})

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises: ValueError for rules of a later version."""
        return TypeAdapter(cls).validate_python(value)

    def to_json(self) -> dict[str, Any]:
        return dict(TypeAdapter(type(self)).dump_python(self, mode="json"))


FORMER_RULES = TextRules(quotes="words", routing="none")
"""Of jobs and conversations that name none: earlier versions knew no others."""
