"""What of a passage an encoder reads: its title, where it stands, and its text; and how many tokens that may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragspec.core import Passage

SEPARATOR = " > "
_CUT = "…"
_MAX_CHARS_PER_TOKEN = 64
"""A title is cut there before anything is counted: a megabyte takes seconds to tokenise."""


@dataclass(frozen=True)
class TokenLimit:
    """How much an encoder reads of a text, in its own tokens, special ones included.

    `count` gives the tokens of every text as the encoder would read it, but not cut. Build it once: it remembers what it learns.
    """

    max_tokens: int
    count: Callable[[Sequence[str]], list[int]]

    @cached_property
    def num_special(self) -> int:
        """Tokens of a text without any characters."""
        return self.count([""])[0]

    def excess(self, texts: Sequence[str], max_tokens: int) -> list[int]:
        """For every text by how many tokens it is too long, or 0; all are counted in one call."""
        doubtful = [number for number, text in enumerate(texts) if not self._surely_fits(text, max_tokens)]
        excess = [0] * len(texts)
        if doubtful:
            for number, num_tokens in zip(doubtful, self.count([texts[n] for n in doubtful]), strict=True):
                excess[number] = max(0, num_tokens - max_tokens)
        return excess

    def _surely_fits(self, text: str, max_tokens: int) -> bool:
        """A token is at least one byte long, but for a mark that some tokenizers put first. False may mean either."""
        if len(text) >= max_tokens:
            return False
        return len(text.encode("utf-8", "surrogatepass")) + 1 + self.num_special <= max_tokens


def embedded_text(passage: Passage) -> str:
    """Title, heading and text, a line each: in the middle of a document a passage does not name its subject.

    The title is left out where the heading begins with it, whole or shortened.
    """
    return join_passage_text(passage.title, passage.heading, passage.text)


def join_passage_text(title: str, heading: str, text: str) -> str:
    shortened = heading.endswith(_CUT) and title.startswith(heading.removesuffix(_CUT))
    if shortened or heading == title or heading.startswith(title + SEPARATOR):
        title = ""
    return "\n".join(filter(None, (title, heading, text)))


def fit_heading(title: str, path: Sequence[str], limit: TokenLimit | None) -> str:
    """The path as a heading; one that with the title takes more than half of the limit loses levels from the top.

    Where the title alone does, the heading is the title's beginning with "…", which is then embedded in its place.
    """
    if limit is None:
        return SEPARATOR.join(filter(None, path))
    half = limit.max_tokens // 2
    for first in range(len(path) + 1):
        heading = SEPARATOR.join(filter(None, path[first:]))
        lead = join_passage_text(title, heading, "")
        if not lead or _fits(lead, limit, half):
            return heading
    return _cut_title(title, limit, half)


def _fits(lead: str, limit: TokenLimit, max_tokens: int) -> bool:
    return len(lead) <= max_tokens * _MAX_CHARS_PER_TOKEN and not limit.excess([lead], max_tokens)[0]


def _cut_title(title: str, limit: TokenLimit, max_tokens: int) -> str:
    """Whole words of the title if any fit, else characters, with "…"."""
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
