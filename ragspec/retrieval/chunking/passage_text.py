"""The text that an encoder reads of a passage: title, heading and text; and the limit of its tokens.

>>> embedded_text(passage)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragspec.core import Passage

SEPARATOR = " > "
_CUT = "…"
_MAX_CHARS_PER_TOKEN = 64
"""Titles are cut at this length before tokens are counted: tokenising a megabyte takes seconds."""


@dataclass(frozen=True)
class TokenLimit:
    """How many tokens an encoder reads of a text, special tokens included.

    `count` returns the tokens of every text, uncut. Build a limit once: it caches the number of special tokens.
    """

    max_tokens: int
    count: Callable[[Sequence[str]], list[int]]

    @cached_property
    def num_special(self) -> int:
        """Tokens of a text without any characters."""
        return self.count([""])[0]

    def excess(self, texts: Sequence[str], max_tokens: int) -> list[int]:
        """By how many tokens each text is too long, or 0. Counts all texts in one call."""
        doubtful = [number for number, text in enumerate(texts) if not self._surely_fits(text, max_tokens)]
        excess = [0] * len(texts)
        if doubtful:
            for number, num_tokens in zip(doubtful, self.count([texts[n] for n in doubtful]), strict=True):
                excess[number] = max(0, num_tokens - max_tokens)
        return excess

    def _surely_fits(self, text: str, max_tokens: int) -> bool:
        """True if the text fits for certain: a token has at least one byte, except a mark that some tokenizers put first."""
        if len(text) >= max_tokens:
            return False
        return len(text.encode("utf-8", "surrogatepass")) + 1 + self.num_special <= max_tokens


def embedded_text(passage: Passage) -> str:
    """Title, heading and text, one line each. Why: in the middle of a document a passage does not name its subject.

    The title is left out where the heading begins with it, whole or shortened.
    """
    return join_passage_text(passage.title, passage.heading, passage.text)


def join_passage_text(title: str, heading: str, text: str) -> str:
    shortened = heading.endswith(_CUT) and title.startswith(heading.removesuffix(_CUT))
    if shortened or heading == title or heading.startswith(title + SEPARATOR):
        title = ""
    return "\n".join(filter(None, (title, heading, text)))


def fit_heading(title: str, path: Sequence[str], limit: TokenLimit | None, header: str = "") -> str:
    """The titles of the path as a heading, and behind them a table's header.

    First the header, then upper levels are dropped until title and heading take at most half of the limit.

    If the title alone takes more, the heading is the beginning of the title with "…", and replaces the title.
    """
    if limit is None:
        return SEPARATOR.join(filter(None, (*path, header)))
    half = limit.max_tokens // 2
    for titles in ((*path, header), *(path[first:] for first in range(0 if header else 1, len(path) + 1))):
        heading = SEPARATOR.join(filter(None, titles))
        lead = join_passage_text(title, heading, "")
        if not lead or _fits(lead, limit, half):
            return heading
    return _cut_title(title, limit, half)


def _fits(lead: str, limit: TokenLimit, max_tokens: int) -> bool:
    return len(lead) <= max_tokens * _MAX_CHARS_PER_TOKEN and not limit.excess([lead], max_tokens)[0]


def _cut_title(title: str, limit: TokenLimit, max_tokens: int) -> str:
    """The longest beginning of the title that fits with "…": whole words if possible, else characters."""
    num_chars = min(len(title), max_tokens * _MAX_CHARS_PER_TOKEN)
    while num_chars > 0:
        num_chars -= 1
        beginning = title[:num_chars]
        beginning = (beginning if title[num_chars].isspace() else beginning.rpartition(" ")[0] or beginning).rstrip()
        excess = limit.excess([beginning + _CUT], max_tokens)[0]
        if not excess:
            return beginning + _CUT
        num_chars = min(num_chars, len(beginning)) * max_tokens // (max_tokens + excess)
    return _CUT
