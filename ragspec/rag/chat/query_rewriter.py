"""Rewrites follow-up questions into standalone questions, with the target or with rules.

The rules append the names from earlier turns that a question refers to. They also replace an unusable output of the target. Time
and load play no role in the choice, so the same conversation always retrieves with the same question.

    >>> QueryRewriter(ChatConfig(), prompts, engine).standalone("Who designed it?", asked)
    >>> rewrite_by_rules("Why did it fail?", [AskedBefore("What was the Apollo Guidance Computer?")])
    'Why did it fail? (Apollo Guidance Computer)'

The question's own words stay, so a wrong guess adds a little noise and loses nothing. The added names are the topic: names in
the user's questions, the opening question first, or else the titles of the passages that were quoted. Words of answers are never
added, because an answer may be wrong. The suite `answers` measures the rules on `pipelines.benchmarks.cases.follow_ups`.
"""

import re
import tomllib
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ragspec.config import ChatConfig
from ragspec.core import FinishReason, Message, Request, SamplingParams
from ragspec.errors import InputError
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, copy_sources

_SYSTEM = (
    "Rewrite the last question so that it can be understood alone: put names in place of pronouns and add what it leaves out. "
    "Keep its own words. Do not answer it."
)
_TASK = "Rewrite the last question so that it can be understood alone."
_LATEST_TURNS = 3
MAX_TOKENS = 64
"""Of a rewritten question."""
_MAX_CHARS = 400
"""Characters of each earlier text, and of the rewritten question beyond the original."""


class AskedBefore(NamedTuple):
    """An earlier question, and the titles of the passages that its answer quoted, if they are close to it."""

    question: str
    titles: tuple[str, ...] = ()


class QueryRewriter:
    """Without an `engine` only the rules rewrite."""

    def __init__(self, config: ChatConfig, prompts: PromptBuilder, engine: EngineLike | None = None) -> None:
        self._config, self._prompts = config, prompts
        self._engine = engine if config.rewriter == "model" else None

    def standalone(self, question: str, asked: Sequence[AskedBefore], salt: str = "") -> str:
        """The question to retrieve with, given the earlier ones. Raises: EngineError if the target fails."""
        if not asked or self._config.rewriter == "off":
            return question
        written = self._rewrite(question, asked, salt) if self._engine is not None else ""
        return written or rewrite_by_rules(question, asked)

    def _rewrite(self, question: str, asked: Sequence[AskedBefore], salt: str) -> str:
        """The target's question; empty if the output is unusable, or if its context or template does not take the turns."""
        assert self._engine is not None
        try:
            request = self._request(question, asked, salt)
        except InputError:
            return ""
        (completion,) = self._engine.generate([request])
        text = completion.text.strip()
        ended = completion.finish_reason is FinishReason.STOP
        is_line = bool(text) and not {"\n", "\0"} & set(text)
        return text if ended and is_line and len(text) <= _MAX_CHARS + len(question) else ""

    def _request(self, question: str, asked: Sequence[AskedBefore], salt: str) -> Request:
        said = [(turn.question, *turn.titles) for turn in asked[-_LATEST_TURNS:]]
        turns = [f"- {'; '.join(text[:_MAX_CHARS] for text in texts)}" for texts in said]
        task = "\n".join(["Earlier questions:", *turns, "", f"Last question: {question}", "", _TASK])
        prompt = self._prompts.build([Message("system", _SYSTEM), Message("user", task)], (), MAX_TOKENS)
        params = SamplingParams(max_tokens=MAX_TOKENS)
        return Request(uuid.uuid4().hex, prompt.prompt_ids, params, copy_sources(question, (), turns), salt)


_WORD = re.compile(r"[^\W_](?:[\w'’.&/+#-]*[\w+#])?")
_NAME = re.compile(
    r"(?:[A-Z]|(?<!\d)\d+(?=[A-Z]))[\w'’.&-]*"  # begins with a capital
    r"(?:\s+(?:(?:of|the|and|de|la|le|von|van|der|for|in|on)\s+){0,2}[A-Z][\w'’.&-]*|\s+\d+\b)*"
    r"|(?<![\w-])[\w-]*[a-z0-9](?:[._:/]+\w+)+(?:\(\))?"  # json.dumps, snake_case
    r"|\b[a-z]+[A-Z]\w*"  # camelCase
)
_COMMON = frozenset(
    tomllib.loads(Path(__file__).with_name("rewriting.toml").read_text(encoding="utf-8"))["common"].split()
)
_LEANS = re.compile(
    r"(?i)\b(?:he|she|it|they|him|her|them|his|hers|its|their|theirs|himself|herself|itself|themselves|this|these|those|there|then|"
    r"one|ones|others?|else|another|same|such|former|latter|more|"
    r"that(?!\s+(?:is|are|was|were|has|have|had|can|could|will|would|may|might|must|should|do|does|did|\w+s|\w+ed)\b))\b"
)
_PERSON = re.compile(r"\b(?:he|she|him|her|his|hers|himself|herself)\b", re.IGNORECASE)
_GOES_ON = re.compile(r"\W*(?:and|or|but|also|so|then|(?:what|how) about|what of|such as|like)\b", re.IGNORECASE)
_SHORT_WORDS = 2
_MAX_NAMES = 2
_MAX_READ_CHARS, _MAX_TURNS = 2_000, 100
"""Characters of each text and number of turns that are read: texts may be megabytes, and conversations long."""


def rewrite_by_rules(question: str, asked: Sequence[AskedBefore]) -> str:
    """The question with the names it refers to; unchanged if it is the first or stands alone."""
    asked = [
        AskedBefore(turn.question[:_MAX_READ_CHARS], tuple(title[:_MAX_CHARS] for title in turn.titles))
        for turn in asked[-_MAX_TURNS:]
    ]
    seen = question[:_MAX_READ_CHARS]
    if not asked or _stands_alone(seen):
        return question
    terms = _without_known(_topics(seen, asked[_opening(asked) :]), seen)
    return f"{question} ({'; '.join(terms)})" if terms else question


def extract_names(text: str) -> list[str]:
    """Capitalised runs of words, and identifiers; each once, without common words at either end."""
    terms: dict[str, None] = {}
    for match in _NAME.finditer(text):
        words = match.group().split()
        while words and _bare(words[0]) in _COMMON:
            words.pop(0)
        while words and _bare(words[-1]) in _COMMON:
            words.pop()
        name = " ".join(words).removesuffix("'s").removesuffix("’s").rstrip(".'’&-").lstrip("-")
        if name:
            terms[name] = None
    return list(terms)


def extract_phrases(text: str) -> list[str]:
    """Runs of uncommon words: the topic of a text without names."""
    runs: list[list[str]] = [[]]
    for piece in re.split(r"[\s,;:?!()\"“”]+", text):
        word = piece.strip(".'’-")
        if word and word.lower() not in _COMMON:
            runs[-1].append(word)
        elif runs[-1]:
            runs.append([])
    return list(dict.fromkeys(" ".join(run) for run in runs if run))


def _stands_alone(question: str) -> bool:
    """Whether the question has a name, no pronoun, and more than a few words."""
    whole = len(question.split()) > _SHORT_WORDS and not _GOES_ON.match(question)
    return whole and bool(extract_names(question)) and not _LEANS.search(question)


def _opening(asked: Sequence[AskedBefore]) -> int:
    """The index of the turn that began the current topic: the latest turn whose question stands alone and shares no word with
    earlier turns, or else the first."""
    known: set[str] = set()
    opening = 0
    for number, turn in enumerate(asked):
        words = set(_content(turn.question))
        if _stands_alone(turn.question) and not words & known:
            opening = number
        known |= words.union(*map(_content, turn.titles))
    return opening


def _topics(question: str, asked: Sequence[AskedBefore]) -> list[str]:
    opening = extract_names(asked[0].question)
    latest = [name for turn in reversed(asked) for name in extract_names(turn.question)]
    titles = [title for turn in reversed(asked) for title in turn.titles]
    topics = list(dict.fromkeys(opening or latest or titles))[:_MAX_NAMES] or extract_phrases(asked[0].question)
    of_a_person = bool(_PERSON.search(question))
    if _GOES_ON.match(question) or (len(_content(question)) <= _SHORT_WORDS and not of_a_person):
        topics += extract_phrases(asked[-1].question)
    return topics


def _without_known(terms: Iterable[str], question: str) -> list[str]:
    """The terms with a word that neither the question nor earlier terms have."""
    known, kept = set(_content(question)), []
    for term in terms:
        words = set(_content(term)) or {term.lower()}
        if not words <= known:
            kept.append(term)
            known |= words
    return kept


def _content(text: str) -> list[str]:
    return [word for word in map(_bare, _WORD.findall(text)) if word not in _COMMON]


def _bare(word: str) -> str:
    return re.sub(r"['’]s$", "", word.lower()).strip(".'’-")
