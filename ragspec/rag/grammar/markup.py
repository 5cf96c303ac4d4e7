"""Texts with markup: the plain text that a reader sees, its offsets in the whole text, and its sentences.

Markup is given as parts, as editors send it, or detected here: HTML tags and comments, scripts, fenced code, front matter; of
Markdown also headings, rules, tables, marks of quotations and definitions of links. Inline code, addresses, images, formulas,
commands and template fields are plain text but protected from edits. Code that is only
indented is not detected, since paragraphs may be indented, too. Sentences are split so that the target can correct each: none is
too long, and none without letters.

    >>> text = MarkedText([TextPart("A "), TextPart("<b>", is_markup=True), TextPart("mill")])
    >>> text.plain, text.locate(Edit(2, 6, "mill", "house"))
    ('A mill', Edit(start=5, end=9, original='mill', replacement='house', kind=<EditKind.OTHER: 'other'>))
"""

from __future__ import annotations

import html
import itertools
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ragspec.rag.grammar.edits import Edit, common_ends
from ragspec.retrieval.chunking import Span, sentences
from ragspec.retrieval.chunking.chunker import short_spans

_VALUE = r"""(?:"[^"<]*+"|'[^'<]*+'|[^\s"'<>=`]++)"""
_ATTRIBUTE = (
    rf"(?:[\w:@.-]++\s*+=\s*+{_VALUE}|(?:allowfullscreen|async|autofocus|autoplay|checked|controls|default|defer|disabled|download|"
    r"hidden|inert|ismap|itemscope|loop|multiple|muted|nomodule|novalidate|open|playsinline|readonly|required|reversed|selected|"
    r"(?:aria|data|hx|ng|v|x)-[\w:.-]++)(?![\w:.-]))"
)
_BEGIN = r"(?:\A|(?<=\A\ufeff))"  # or after a byte order mark
_MARKUP = (
    rf"\A\ufeff|(?P<comment><!--)|(?P<program><\?(?=[a-z=]))|{_BEGIN}(?P<front>---)[ \t]*+\r?\n(?=[\w-]++[ \t]*+:)"
    rf"|(?:^|{_BEGIN})(?P<quoted>[ \t>]*+)(?:(?:[-*+]|\d{{1,9}}[.)])[ \t]++)?+(?P<fence>`{{3,}}+|~{{3,}}+)(?![^\n`]*+`)"
    r"|<(?P<raw>script|style|pre|code|math)\b[^<>]*+>"
    rf"|</?[a-z][\w:-]*+(?:\s++{_ATTRIBUTE})*+\s*+/?>|<![a-z][^<>]*+>|&(?:\#\d{{1,7}}|\#x[\da-f]{{1,6}}|[a-z]+\d*);"
)
_HAS_BAR = r"(?=[^\n|]*+\|)"
_STRUCTURE = (
    rf"|(?:^|{_BEGIN})(?:(?P<line>(?![^\n]*?<(?:!--|(?:pre|script|style|math)\b))"
    rf"(?:[ \t]*+(?:[ \t>]*+\#{{1,6}}|>>>)[ \t][^\n]*+"  # heading
    r"|(?:(?![ \t]*+(?:[-*+>]|\d++[.)]))[^\r\n]{1,120}+(?<![\s.!?:;,\"”’')\]])\r?\n)?"
    r"[ \t>]*+(?:={3,}+|-{3,}+)[ \t\r]*+$"  # its rule
    r"|[ \t>]*+(?:(?:\*[ \t]*+){3,}+|_{3,}+)[ \t\r]*+$"  # rule
    rf"|{_HAS_BAR}[^\n]*+\n{_HAS_BAR}(?=[^\n-]*+-)[-:| \t>]++\r?$(?:\n{_HAS_BAR}[^\n]*+)*+"  # table
    r"|[ \t>]*+\[(?!\^)[^\]\n]++\]:[ \t]++(?=\S*?[/.\#])\S++(?:[ \t]++\"[^\"\n]*+\")?[ \t\r]*+$))"  # definition of a link
    r"|(?P<mark>[ \t]*+(?:>[ \t]?)++))"
)
_MARKUP_OF = {with_lines: re.compile(f"(?im){_MARKUP}{_STRUCTURE * with_lines}") for with_lines in (False, True)}
_NAMING = (
    "(?:auto|[cC]|eq|name|page|v)?ref|(?:auto|foot|full|paren|no|short|text)?cite[a-z]*|label|input|include[a-z]*|bibliography[a-z]*|"
    "usepackage|documentclass|begin|end|url|href|bibitem|gls|vspace|hspace"
)
_PROTECTED = (
    r"(?P<ticks>(?<!`)`++)[^`\n]++(?P=ticks)"  # inline code
    r"|(?<![\w.+-])[\w.+-]++@[\w-]++(?:\.[\w-]++)++"  # e-mail
    r"|(?<!\w)(?:(?:https?|ftp|file|mailto|git|ssh):/{0,2}|www\.)[^\s<>\"”’»]*[\w/]"  # address
    r"|(?<=\])\([^()\s]*+\)"  # link target
    r"|(?<![\\\w$])\$(?![\s$])[^$\n]++(?<![\s\\])\$(?!\d)"  # formula
    r"|\{\{[^\n{}]*+\}\}|\{%[^\n%]*+%\}"  # template field
    rf"|\\(?:{_NAMING})\*?+(?:\[[^\]\n\\]{{0,80}}+\])*+\{{[^{{}}\n]*+\}}"  # command with a name
    r"|\\[a-zA-Z]++\*?+(?:\[[^\]\n\\]{0,80}+\])?+"  # command
    r"|(?<!\w)[@#]\w++"  # user, tag
)
_LINKS = (
    r"|!\[[^\]\n]{0,500}+\](?:\([^()\n]*+\))?|(?<=\])\([^()\s]*+[ \t]++\"[^\"\n]*+\"\)"  # image, target with a title
)
_PROTECTED_OF = {with_links: re.compile(_PROTECTED + _LINKS * with_links) for with_links in (False, True)}
_BLOCKS = frozenset(
    "p div br hr li ul ol table tr td th h1 h2 h3 h4 h5 h6 blockquote section article header footer".split()
)
_NAME = re.compile(r"</?([a-z][\w-]*)", re.IGNORECASE)
_BREAK = "\n\n"


class TextPart(NamedTuple):
    """Plain text or markup. A reader sees `read_as` in place of markup."""

    text: str
    is_markup: bool = False
    read_as: str = ""

    @property
    def plain(self) -> str:
        return self.read_as if self.is_markup else self.text


class MarkedText:
    """`whole`: all parts joined. `plain`: the text that a reader sees. `protected`: spans of `plain` that must not change, with
    `has_structure` also images and titles of links."""

    def __init__(self, parts: Sequence[TextPart], *, has_structure: bool = True) -> None:
        self.parts = tuple(parts)
        self.whole = "".join(part.text for part in self.parts)
        self.plain = "".join(part.plain for part in self.parts)
        self.protected: tuple[Span, ...] = tuple(
            match.span() for match in _PROTECTED_OF[has_structure].finditer(self.plain)
        )
        self._places = array("q")  # in `whole`, of each character of `plain`; -1: it stands for markup
        self._behind = array("q", [0])  # in `whole`, the end of the text before each character, and of all text
        at = 0
        for part in self.parts:
            if part.is_markup:
                self._places.extend([-1] * len(part.plain))
                self._behind.extend([self._behind[-1]] * len(part.plain))
            else:
                self._places.extend(range(at, at + len(part.text)))
                self._behind.extend(range(at + 1, at + len(part.text) + 1))
            at += len(part.text)

    @classmethod
    def read(cls, text: str, *, has_structure: bool = True) -> MarkedText:
        """A text whose markup is detected where it is unambiguous. `has_structure`: also that of Markdown."""
        return cls(list(_split_markup(text, _MARKUP_OF[has_structure])), has_structure=has_structure)

    def text_spans(self) -> list[Span]:
        """The spans of `whole` that are not markup, in order."""
        ends = list(itertools.accumulate(len(part.text) for part in self.parts))
        parts = zip(self.parts, ends, strict=True)
        return [(end - len(part.text), end) for part, end in parts if part.text and not part.is_markup]

    def locate(self, edit: Edit) -> Edit | None:
        """An edit of `plain` as an edit of `whole`; None if it would touch markup."""
        for each in (edit, _trim_common_ends(edit)):
            place = self._locate_insertion(each) if each.start == each.end else self._locate_span(each.start, each.end)
            if place is not None:
                return replace(each, start=place[0], end=place[1])
        return None

    def span(self, start: int, end: int) -> Span:
        """The smallest span of `whole` with all text of `plain[start:end]`, without markup at its ends."""
        own = [at for at in self._places[start:end] if at >= 0]
        if own:
            return own[0], own[-1] + 1
        after = self._at(start) if start == end else None
        between = self._behind[start] if after is None else after
        return between, between

    def _at(self, index: int) -> int | None:
        """The offset in `whole` of a character of `plain`; None if it stands for markup, or if there is none."""
        at = self._places[index] if 0 <= index < len(self._places) else -1
        return at if at >= 0 else None

    def _locate_span(self, start: int, end: int) -> Span | None:
        """The span in `whole` of `plain[start:end]` if it is one text there, too."""
        first = self._at(start)
        if first is None or self._places[start:end] != array("q", range(first, first + end - start)):
            return None
        return first, first + end - start

    def _locate_insertion(self, edit: Edit) -> Span | None:
        """The place of an insertion: before the next character if it begins with a letter, else after the previous one."""
        before, after = self._at(edit.start - 1), self._at(edit.start)
        places = [at for at in (None if before is None else before + 1, after) if at is not None]
        if not places:
            return None
        chosen = places[-1 if edit.replacement[:1].isalnum() else 0]
        return chosen, chosen


def _trim_common_ends(edit: Edit) -> Edit:
    """The edit without the characters that stay at both ends."""
    old, new = edit.original, edit.replacement
    first, last = common_ends(old, new)
    original, replacement = (text[first : len(text) - last] for text in (old, new))
    return replace(edit, start=edit.start + first, end=edit.end - last, original=original, replacement=replacement)


def _split_markup(text: str, markup: re.Pattern[str]) -> Iterator[TextPart]:
    """Alternating text and markup. Time is linear: a missing closing tag is searched for once."""
    at, unclosed = 0, set[str]()
    while match := markup.search(text, at):
        end, read_as = _markup_end(text, match, unclosed)
        if match.start() > at:
            yield TextPart(text[at : match.start()])
        yield TextPart(text[match.start() : end], True, read_as)
        at = end
    if at < len(text):
        yield TextPart(text[at:])


def _markup_end(text: str, match: re.Match[str], unclosed: set[str]) -> tuple[int, str]:
    """The end of the markup, and the text that a reader sees in its place."""
    if match["comment"]:
        return _find_end(text, match.end(), "-->", unclosed) or len(text), ""
    if match["program"]:
        end = _find_end(text, match.end(), r"\?>", unclosed)
        return (end, "") if end else (match.end(), match.group())
    if match["front"]:
        return _find_end(text, match.end(), r"^---[ \t\r]*+$", unclosed) or match.end(), _BREAK
    if fence := match["fence"]:
        closing = rf"^[ \t>]*+{fence[0]}{{{len(fence)},}}+[ \t\r]*+$"
        if ">" in match["quoted"]:
            closing += r"|^(?![ \t]*+>)"  # code in a quotation ends with the quotation
        return _find_end(text, match.end(), closing, unclosed) or len(text), _BREAK
    if (kind := match.lastgroup) in ("line", "mark"):
        return match.end(), _BREAK if kind == "line" else ""
    if match["raw"] and (end := _find_end(text, match.end(), rf"</{match['raw'].lower()}\b[^<>]*+>", unclosed)):
        return end, "" if match["raw"].lower() == "code" else _BREAK
    if match.group().startswith("&"):
        return match.end(), html.unescape(match.group())
    name = _NAME.match(match.group())
    return match.end(), _BREAK if name and name[1].lower() in _BLOCKS else ""


def _find_end(text: str, at: int, closing: str, unclosed: set[str]) -> int | None:
    """The end of the first match of a pattern from `at` on; None, remembered in `unclosed`, if there is none."""
    found = None if closing in unclosed else re.compile(closing, re.MULTILINE | re.IGNORECASE).search(text, at)
    if found is None:
        unclosed.add(closing)
        return None
    return found.end()


_MAX_CHARS_PER_TOKEN = 16
"""A sentence with more characters per allowed token is split before its tokens are counted."""

_WHITE = re.compile(r"\s+")
_WORD = re.compile(r"[^\W\d_]+")


EncodeTexts = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Maps texts to token ids, as in a prompt."""


class SentenceSpan(NamedTuple):
    """A span of plain text. `begins`: False for the second and later parts of a sentence that was too long."""

    start: int
    end: int
    begins: bool
    num_tokens: int


def split_sentences(
    marked: MarkedText, encode: EncodeTexts, max_tokens: int, *, single_words: bool = False
) -> list[SentenceSpan]:
    """Sentences with a letter outside protected spans, in parts of at most `max_tokens` tokens, but at least one character.

    `single_words`: also those of one word beside other sentences.
    """
    text, fitting = marked.plain, list[SentenceSpan]()
    whole = [span for span in sentences(text) if _holds_letters(text, *span, marked.protected)]
    if not single_words and len(whole) > 1:
        whole = [span for span in whole if len(_WORD.findall(text, *span)) > 1]
    begins = {start for start, _ in whole}
    spans = [part for span in whole for part in short_spans(text, span, max_tokens * _MAX_CHARS_PER_TOKEN)]
    while spans:
        encoded = encode([one_line(text[slice(*span)]) for span in spans])
        too_long = []
        for (start, end), ids in zip(spans, encoded, strict=True):
            if len(ids) <= max_tokens or end - start == 1:
                fitting.append(SentenceSpan(start, end, start in begins, len(ids)))
            else:
                too_long.append((start, end))
        spans = [half for span in too_long for half in _halves(text, *span)]
    return sorted(fitting)


def one_line(sentence: str) -> str:
    """The sentence in one line: line breaks inside it only fit a page."""
    return _WHITE.sub(" ", sentence)


def _holds_letters(text: str, start: int, end: int, protected: Sequence[Span]) -> bool:
    outside, at = list[str](), start
    for left, right in protected[bisect_right(protected, start, key=lambda span: span[1]) :]:
        if left >= end:
            break
        outside.append(text[at : max(at, left)])
        at = max(at, right)
    return any(map(str.isalpha, "".join([*outside, text[at:end]])))


def _halves(text: str, start: int, end: int) -> Iterator[Span]:
    """The parts before and after the white space nearest to the middle, or after the middle itself."""
    middle = (start + end) // 2
    breaks = [match.span() for match in _WHITE.finditer(text, start, end)]
    left, right = min(breaks, key=lambda span: abs(span[0] - middle), default=(middle, middle))
    yield start, left
    yield right, end
