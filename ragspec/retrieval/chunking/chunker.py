"""Chunking: runs of whole sentences of one section become passages.

A section reaches from one title to the next. Passages respect a limit in characters and in the encoder's tokens. An encoder reads
a passage's title, heading and text. Large tables of Markdown, which web pages and Word files become too, and of reStructuredText
are sections of their own, with their header in the heading.

    >>> [passage.text for passage in chunk(document, ChunkingConfig(), limit)]
    >>> list(tables("| Part | Weight |\n|---|---|\n| Disk | 5 kg |\n"))
    [(0, 43, 'Part | Weight')]
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

from ragspec.config import ChunkingConfig
from ragspec.core import BlockKind, Document, Heading, Passage, blocks_in, blocks_reaching
from ragspec.errors import ConfigError
from ragspec.retrieval.chunking.sentence_boundaries import Span, lstrip, rstrip, sentences

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


# Why possessive: a file may be made to stall its reader, and no run of signs is then read in two ways.
_BAR_ROW = r"[^\n|]*+\|[^\n]*+\n"
_MARKDOWN = re.compile(
    rf"^(?P<header>{_BAR_ROW})[ \t]*+\|?[ \t]*+:?-{{2,}}+:?[ \t]*+(?:\|[ \t]*+(?::?-{{2,}}+:?[ \t]*+)?)++\n"
    rf"(?:{_BAR_ROW})*+(?:[ \t]*+\|[^\n]*+\Z)?",
    re.MULTILINE,
)
_GRID = re.compile(
    r"^[ \t]*+\+(?:-++\+)++[ \t]*+\n(?P<header>(?:[ \t]*+\|[^\n]*+\n){1,4}+)[ \t]*+\+(?:=++\+)++[ \t]*+\n"
    r"(?:[ \t]*+[|+][^\n]*+(?:\n|\Z))*+",
    re.MULTILINE,
)
# A table that nothing closes ends at the next rule, whichever that is.
_SIMPLE = re.compile(
    r"^(?P<rule>[ \t]*+=++(?: ++=++)++)[ \t]*+\n(?P<header>(?:[^\n=][^\n]*+\n){1,4}?)(?P=rule)[ \t]*+\n"
    r"(?:(?![ \t]*+=++ ++=)[^\n]*+\n)*+(?P=rule)[ \t]*+(?:\n|\Z)",
    re.MULTILINE,
)
_MARKUP = re.compile(r"\*\*|`+")


def tables(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, str]]:
    """Start, end and header of every table with a header, in order; of overlapping ones the first."""
    end = len(text) if end is None else end
    found = [match for kind in (_MARKDOWN, _GRID, _SIMPLE) for match in kind.finditer(text, start, end)]
    for match in sorted(found, key=lambda each: each.start()):
        if match.start() < start:
            continue
        start = match.end()
        yield match.start(), start, _header(match)


def _header(match: re.Match[str]) -> str:
    """The names of the columns, on one line."""
    lines = match["header"].splitlines()
    if match.re is _SIMPLE:
        columns = [found.span() for found in re.finditer("=+", match["rule"])]
        columns[-1] = (columns[-1][0], max(map(len, lines)))
        cells = [[line[first:last] for first, last in columns] for line in lines]
    else:
        cells = [line.strip().removeprefix("|").removesuffix("|").split("|") for line in lines]
    names = [" ".join(" ".join(column).split()) for column in zip(*cells, strict=False)]
    return _MARKUP.sub("", " | ".join(filter(None, names)))


_TITLE_LINES = re.compile(r"(?:([^\w\s])\1{2,}[ \t]*\n)?[^\n]*(?:\n([^\w\s])\2{2,}[ \t]*(?=\n|\Z))?")
"""A title's line, with the rules above and below it."""
_BY_LINES = frozenset({BlockKind.CODE, BlockKind.TABLE})
_LINE = re.compile(r"\S(?:[^\n]*\S)?")
_JOINERS = frozenset("\u200d\ufe0e\ufe0f")


def chunk(document: Document, config: ChunkingConfig, limit: TokenLimit | None = None) -> list[Passage]:
    """Passages of at most `max_chars` characters, in order, each a run of whole sentences, or of lines of code, of one section.

    With a limit, the `embedded_text` of each passage has at most `limit.max_tokens` tokens, and at most `config.max_tokens`. A
    sentence too long for one passage is cut between words, and a word between characters. Adjacent passages of a section share
    the whole sentences that fit `overlap_chars`.
    Raises: ConfigError if `config.max_tokens` is set without a limit that counts tokens.
    """
    if config.max_tokens is not None:
        if limit is None:
            raise ConfigError("chunking.max_tokens is set, and no encoder is there to count tokens")
        if config.max_tokens < limit.max_tokens:
            limit = replace(limit, max_tokens=config.max_tokens)
    text = document.text
    sections = [part for section in _sections(document) for part in _tables_apart(text, section, config.max_chars)]
    parts = [_part(document, section, config, limit) for section in sections]
    if limit is not None:
        _shorten(document, parts, config, limit)
    runs = [(part, start, end) for part in parts for start, end in part.runs]
    return [
        Passage(
            document_id=document.id,
            ordinal=ordinal,
            text=document.text[start:end],
            start=start,
            end=end,
            title=document.title,
            source=document.source,
            heading=part.heading,
            headings=tuple(each.text for each in part.path if each.text),
            anchor=next((each.anchor for each in reversed(part.path) if each.anchor), ""),
            blocks=blocks_in(document.blocks, start, end),
        )
        for ordinal, (part, start, end) in enumerate(runs)
    ]


class _Section(NamedTuple):
    """`path`: headings from the highest level down. `borders`: offsets that no sentence crosses; the first and last are the
    section's start and end. `header`: of the table that the section is a part of."""

    path: tuple[Heading, ...]
    borders: list[int]
    header: str = ""

    def sentences(self, document: Document, max_chars: int) -> Iterator[Span]:
        """The sentences, and blocks of code and tables: whole if they have at most `max_chars` characters, else their lines."""
        text = document.text
        for start, end in zip(self.borders, self.borders[1:], strict=False):
            at = start
            for block in blocks_reaching(document.blocks, start, end):
                if block.kind in _BY_LINES and at <= block.start and block.end <= end:
                    yield from sentences(text, at, block.start)
                    at = block.end
                    if at - block.start <= max_chars and not _is_blank(text, block.start, at):
                        yield lstrip(text, block.start, at), rstrip(text, block.start, at)
                    else:
                        yield from (line.span() for line in _LINE.finditer(text, block.start, at))
            yield from sentences(text, at, end)


@dataclass(slots=True)
class _SectionRuns:
    """A section's `sentences`, and the `runs` of them that become passages."""

    path: tuple[Heading, ...]
    heading: str
    sentences: list[Span]
    runs: list[Span]


class _RunBudget(NamedTuple):
    """Limits of a run of `spans`. `tokens_before[n]`: tokens of the first n spans."""

    spans: Sequence[Span]
    max_chars: int
    tokens_before: Sequence[int] = ()
    max_tokens: int = 0

    def fits(self, first: int, after: int) -> bool:
        """Whether spans[first:after] is short enough."""
        if self.spans[after - 1][1] - self.spans[first][0] > self.max_chars:
            return False
        return not self.tokens_before or self.tokens_before[after] - self.tokens_before[first] <= self.max_tokens


def _part(document: Document, section: _Section, config: ChunkingConfig, limit: TokenLimit | None) -> _SectionRuns:
    text = document.text
    found = section.sentences(document, config.max_chars)
    spans = [piece for span in found for piece in short_spans(text, span, config.max_chars)]
    titles = [each.text for each in section.path]
    heading = fit_heading(document.title, titles, limit, section.header) if spans else ""
    runs = list(_pack(_RunBudget(spans, config.max_chars), config.overlap_chars))
    return _SectionRuns(section.path, heading, spans, runs)


def _shorten(document: Document, parts: list[_SectionRuns], config: ChunkingConfig, limit: TokenLimit) -> None:
    """Cut sections again that hold a passage with too many tokens. There are rarely any; one call counts all passages."""
    texts = [text for part in parts for text in _embedded_texts(document, part.heading, part.runs)]
    excess = iter(limit.excess(texts, limit.max_tokens))
    for part in parts:
        if max(islice(excess, len(part.runs)), default=0):
            part.runs = _fewer_tokens(document, part, config, limit)


def _embedded_texts(document: Document, heading: str, runs: Sequence[Span]) -> list[str]:
    return [join_passage_text(document.title, heading, document.text[start:end]) for start, end in runs]


def _fewer_tokens(document: Document, part: _SectionRuns, config: ChunkingConfig, limit: TokenLimit) -> list[Span]:
    """Runs packed by the sum of their sentences' tokens. Repeats with less room while a run has more tokens than the sum."""
    text, spans = document.text, part.sentences
    lead = join_passage_text(document.title, part.heading, "")
    room = max(1, limit.max_tokens - limit.count([f"{lead}\n" if lead else ""])[0])
    while True:
        spans, sizes = _small_pieces(text, spans, room, limit)
        sums = [0, *accumulate(sizes)]
        runs = list(_pack(_RunBudget(spans, config.max_chars, sums, room), config.overlap_chars))
        excess = max(limit.excess(_embedded_texts(document, part.heading, runs), limit.max_tokens))
        if not excess or room == 1:
            return runs
        room = max(1, room - excess)


def _small_pieces(text: str, spans: Sequence[Span], max_tokens: int, limit: TokenLimit) -> tuple[list[Span], list[int]]:
    """Spans of at most `max_tokens` tokens, and their numbers of tokens. Single characters stay whole."""
    pieces: list[Span] = []
    sizes: list[int] = []
    for (start, end), counted in zip(spans, limit.count([text[a:b] for a, b in spans]), strict=True):
        size = max(0, counted - limit.num_special)
        inside = [(start, end)]
        if size > max_tokens:
            inside = list(short_spans(text, (start, end), max(1, (end - start) * max_tokens // size)))
        if len(inside) == 1:
            pieces.append((start, end))
            sizes.append(size)
        else:
            cut, cut_sizes = _small_pieces(text, inside, max_tokens, limit)
            pieces += cut
            sizes += cut_sizes
    return pieces, sizes


def _pack(room: _RunBudget, overlap_chars: int) -> Iterator[Span]:
    spans, first = room.spans, 0  # spans[first:after] make the passage
    while first < len(spans):
        after = first + 1
        while after < len(spans) and room.fits(first, after + 1):
            after += 1
        end = spans[after - 1][1]
        yield spans[first][0], end
        if after == len(spans):
            return
        start = after  # the earliest span to repeat; the next passage still gains at least one new span
        while start - 1 > first and end - spans[start - 1][0] <= overlap_chars and room.fits(start - 1, after + 1):
            start -= 1
        first = start


def short_spans(text: str, span: Span, max_chars: int) -> Iterator[Span]:
    """The span in parts of at most `max_chars` characters, cut between lines or else at white space, if there is any."""
    start, end = span
    while end - start > max_chars:
        cut = _cut(text, start, start + max_chars)
        yield start, rstrip(text, start, cut)
        start = lstrip(text, cut, end)
    yield start, end


def _cut(text: str, start: int, limit: int) -> int:
    """Where to cut before `limit`: at the last line end or else the last white space, or else between two whole characters."""
    if (line_end := text.rfind("\n", (start + limit) // 2, limit + 1)) > start:
        return line_end
    if text[limit].isspace():
        return limit
    for position in range(limit - 1, start, -1):
        if text[position].isspace():
            return position
    position = limit
    while position > start + 1 and (_continues(text[position]) or text[position - 1] == "\u200d"):
        position -= 1
    return position if position > start + 1 else limit


def _continues(character: str) -> bool:
    """Whether the character belongs to the one before it (combining marks, joiners, low surrogates)."""
    return character in _JOINERS or "\u0300" <= character <= "\u036f" or "\udc00" <= character <= "\udfff"


def _sections(document: Document) -> Iterator[_Section]:
    """The sections in order, covering the whole text. A title directly above a title of a lower level shares its section."""
    text, path, borders = document.text, list[Heading](), [0]
    headings = sorted(heading for heading in document.headings if heading.start < len(text))
    starts = [max(0, heading.start) for heading in headings] + [len(text)]
    is_bare = _is_blank(text, 0, starts[0])
    for heading, start, end in zip(headings, starts, starts[1:], strict=False):
        if is_bare and (not path or heading.level > path[-1].level):
            borders.append(start)
        else:
            yield _Section(tuple(path), [*borders, start])
            borders = [start]
        while path and path[-1].level >= heading.level:
            path.pop()
        path.append(heading)
        found = _TITLE_LINES.match(text, start, end)
        borders.append(found.end() if found else start)
        is_bare = _is_blank(text, borders[-1], end)
    yield _Section(tuple(path), [*borders, len(text)])


def _tables_apart(text: str, section: _Section, max_chars: int) -> Iterator[_Section]:
    """The section in parts: each table with more than `max_chars` characters is a part with its header."""
    path, borders = section.path, section.borders
    for start, end, header in tables(text, borders[0], borders[-1]):
        if end - start > max_chars:
            yield _Section(path, [*(border for border in borders if border < start), start])
            yield _Section(path, [start, end], header)
            borders = [end, *(border for border in borders if border > end)]
    if borders[0] < borders[-1] or borders == section.borders:
        yield _Section(path, borders)


def _is_blank(text: str, start: int, end: int) -> bool:
    return lstrip(text, start, end) == end
