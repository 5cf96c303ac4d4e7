"""A follow-up question becomes one that stands alone, by rules: what it leaves out is taken from the turns before it.

>>> standalone("Why did it fail?", [Said("What was the Apollo Guidance Computer?", "A computer.")])
'Why did it fail? (Apollo Guidance Computer)'

The question's own words stay as they are, so a wrong guess adds a little noise and loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ragspec.rag.conversations import Said

_NAME = re.compile(r"\b[A-Z][\w'’.-]*(?:\s+(?:(?:of|the|and|de|la|von|van|for|in)\s+){0,2}[A-Z0-9][\w'’.-]*)*")
_QUESTION_WORDS = frozenset(
    "what who whom whose when where why how which is are was were do does did has have had can could will would should "
    "the a an in on at of to for and or but if any there this that these those it its he she they his her their him them "
    "i you we me my your our us tell please also so yes no ok".split()
)
_MAX_TOPICS = 3


def standalone(question: str, said: Sequence[Said]) -> str:
    """The question with what it speaks of; as it is where nothing came before it, or nothing is missing."""
    missing = [topic for topic in topics(said) if topic.lower() not in question.lower()]
    return f"{question} ({'; '.join(missing[:_MAX_TOPICS])})" if missing else question


def topics(said: Sequence[Said]) -> list[str]:
    """Names in the turns, those of the latest questions first."""
    found: dict[str, None] = {}
    for turn in reversed(said):
        for text in turn:
            found |= dict.fromkeys(names(text))
    return list(found)


def names(text: str) -> list[str]:
    """Runs of capitalised words, without the words that begin a sentence."""
    found = []
    for match in _NAME.finditer(text):
        words = match.group().split()
        while words and words[0].lower() in _QUESTION_WORDS:
            words.pop(0)
        if words:
            found.append(" ".join(words).rstrip(".'’-"))
    return found
