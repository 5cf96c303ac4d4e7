"""Edits that are withheld: of numbers, names, code, dictionary words, unwanted kinds, or too many words at once.

>>> sentence = "Then Ann saw 5 mill."
>>> edits = word_edits(sentence, "Then Bob saw 6 mills.")
>>> [each.reason.value for each in filter_edits(sentence, edits, EditFilter(1.0), TextContext())[1]]
['name', 'number']
"""

from __future__ import annotations

import enum
import functools
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragspec.errors import InputError
from ragspec.rag.grammar.edits import ENGLISH, Edit, EditKind, edit_kind
from ragspec.retrieval.chunking import Span

_WORD = re.compile(r"[^\W\d_](?:\w|['’](?=\w))*")
_NAME = re.compile(r"(?<=[^\W\d_A-Z] )[A-Z](?:\w|['’](?=\w))*")
_DIGITS = re.compile(r"\d(?:[\d.,:/-]*\d)?")
_UNIT = re.compile(r"\w+(?:['’]\w+)*")
_NUMBER_WORDS, _CALENDAR = (frozenset(ENGLISH[name].split()) for name in ("numbers", "calendar"))
_ENDS, _CLOSING = frozenset(".!?…。！？"), ")]}\"'’”» "
_QUOTATION_MARKS = frozenset('"“”„‟«»‹›')


class WithholdReason(enum.StrEnum):
    """`RATIO`: the correction changes too many words of its sentence. `KIND`: edits of this kind are not wanted. `MARKUP`: also
    double quotation marks and the mark that ends a sentence."""

    NUMBER = "number"
    NAME = "name"
    CODE = "code"
    MARKUP = "markup"
    DICTIONARY = "dictionary"
    IGNORED = "ignored"
    KIND = "kind"
    RATIO = "ratio"


@dataclass(frozen=True, slots=True)
class WithheldEdit:
    """An edit of the target that was not applied."""

    edit: Edit
    reason: WithholdReason


@dataclass(frozen=True, slots=True)
class EditFilter:
    """Which edits are withheld.

    `max_edit_ratio`: the share of a sentence's words that its correction may change; at least one word, unless it is 0; 1 means
    no limit. `ignore`: words or phrases that are never changed, case-sensitive; `dictionary`: the same, in any case. `kinds`: the
    kinds that are corrected; None: all. `structure`: whether headings, tables, quotation marks and ends of sentences stay, and
    text in another language than English; jobs of earlier versions go on without. Raises: InputError.
    """

    max_edit_ratio: float = 0.5
    ignore: frozenset[str] = frozenset()
    dictionary: frozenset[str] = frozenset()
    kinds: frozenset[EditKind] | None = None
    numbers: bool = True
    names: bool = True
    structure: bool = True

    def __post_init__(self) -> None:
        ratio: Any = self.max_edit_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
            raise InputError(f"max_edit_ratio must be a number from 0 to 1, not {ratio!r}")
        for name in ("ignore", "dictionary"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(word, str) and word.strip() for word in given):
                raise InputError(f"{name} must be a list of words, none of them empty")
            object.__setattr__(self, name, frozenset(word.strip() for word in given))
        if self.kinds is not None:
            object.__setattr__(self, "kinds", frozenset(map(EditKind, self.kinds)))


DEFAULT_FILTER = EditFilter()


@dataclass(frozen=True, slots=True)
class TextContext:
    """The text around a sentence. `protected`: spans, in order; `common`: words that occur in lower case; `names`: words that
    occur capitalised inside a sentence."""

    protected: Sequence[Span] = ()
    common: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, text: str, protected: Sequence[Span]) -> TextContext:
        common = frozenset(word for word in _WORD.findall(text) if word.islower())
        return cls(protected, common, frozenset(_NAME.findall(text)))


def filter_edits(
    sentence: str,
    edits: Sequence[Edit],
    edit_filter: EditFilter,
    context: TextContext,
    start: int = 0,
    *,
    whole: bool = True,
) -> tuple[list[Edit], list[WithheldEdit]]:
    """The edits to apply, and the withheld edits. `start`: the sentence's offset in the text that edits and protected spans refer
    to. `whole`: False for the continuation of a split sentence, whose first word need not be capitalised."""
    names = _names(sentence, context, whole) if edit_filter.names else frozenset()
    protected = list(_protected_spans(sentence, edit_filter, context.protected, start)) if edits else []
    kept: list[Edit] = []
    withheld: list[WithheldEdit] = []
    for edit in edits:
        touched = next((why for span, why in protected if _touches(edit, span)), None)
        reason = touched or _withhold_reason(edit, edit_filter, names)
        if reason is None and edit_filter.structure and edit.end == start + len(sentence) and _loses_end(edit):
            reason = WithholdReason.MARKUP
        if reason is None:
            kept.append(edit)
        else:
            withheld.append(WithheldEdit(edit, reason))
    if _num_changed(kept) > _max_changed(sentence, edit_filter.max_edit_ratio):
        withheld += [WithheldEdit(edit, WithholdReason.RATIO) for edit in kept]
        return [], sorted(withheld, key=lambda each: each.edit.start)
    return kept, withheld


def _protected_spans(
    sentence: str, edit_filter: EditFilter, protected: Sequence[Span], start: int
) -> Iterator[tuple[Span, WithholdReason]]:
    """The spans of the sentence that must not change."""
    first = bisect_right(protected, start, key=lambda span: span[1])
    last = bisect_left(protected, start + len(sentence), key=lambda span: span[0])
    yield from ((span, WithholdReason.CODE) for span in protected[first:last])
    for phrases, flags, why in (
        (edit_filter.ignore, 0, WithholdReason.IGNORED),
        (edit_filter.dictionary, re.IGNORECASE, WithholdReason.DICTIONARY),
    ):
        if phrases:
            for match in _pattern(phrases, flags).finditer(sentence):
                yield (start + match.start(), start + match.end()), why


@functools.lru_cache(maxsize=64)
def _pattern(phrases: frozenset[str], flags: int) -> re.Pattern[str]:
    """Matches any of the phrases as whole words."""
    choices = "|".join(map(re.escape, sorted(phrases, key=len, reverse=True)))
    return re.compile(rf"(?<!\w)(?:{choices})(?!\w)", flags)


def _touches(edit: Edit, span: Span) -> bool:
    """Whether the edit changes the inside of the span; an insertion at its border does not."""
    start, end = span
    return start < edit.start < end if edit.start == edit.end else edit.start < end and edit.end > start


def _withhold_reason(edit: Edit, edit_filter: EditFilter, names: frozenset[str]) -> WithholdReason | None:
    if edit_filter.kinds is not None and edit.kind not in edit_filter.kinds:
        return WithholdReason.KIND
    old, new = _WORD.findall(edit.original), _WORD.findall(edit.replacement)
    if edit_filter.numbers and _numbers_change(edit, old, new):
        return WithholdReason.NUMBER
    if edit_filter.structure and _marks(edit.original) != _marks(edit.replacement):
        return WithholdReason.MARKUP
    if edit_filter.structure and edit_filter.names and _loses_capitals(old, new):
        return WithholdReason.NAME
    kept = {form for word in new for form in _name_forms(word)}
    if any(word in names and not _name_forms(word) & kept for word in old):
        return WithholdReason.NAME
    return None


def _numbers_change(edit: Edit, old: Sequence[str], new: Sequence[str]) -> bool:
    """Digits may not change. A number word may replace its misspelling ("tow mills"), but must not appear from nowhere."""
    if sorted(_DIGITS.findall(edit.original)) != sorted(_DIGITS.findall(edit.replacement)):
        return True
    had, has = ({w.casefold() for w in words} & _NUMBER_WORDS for words in (old, new))
    return bool(had - has) or (bool(has - had) and edit_kind(edit.original, edit.replacement) is not EditKind.SPELLING)


def _marks(text: str) -> list[str]:
    return [char for char in text if char in _QUOTATION_MARKS]


def _loses_end(edit: Edit) -> bool:
    before, after = (text.rstrip(_CLOSING)[-1:] for text in (edit.original, edit.replacement))
    return before in _ENDS and after not in _ENDS


def _loses_capitals(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether small letters replace a word in capitals: it is an abbreviation, or stands in a line of capitals."""
    lost = any(len(word) > 1 and word.isupper() and word not in new for word in old)
    return lost and any(any(map(str.islower, word)) for word in new if word not in old)


def _name_forms(name: str) -> set[str]:
    """A name without its possessive ending: Ann's is Ann, and Anns may be a misspelt Ann's."""
    letters = name.replace("’", "'")
    return {letters.removesuffix("'s").replace("'", ""), letters.replace("'", "")}


def _names(sentence: str, context: TextContext, whole: bool) -> frozenset[str]:
    """Capitalised words that do not begin the sentence. In headings only words with capitals inside are names."""
    words = [match.group() for match in _WORD.finditer(sentence)]
    inner = {word for word in words if any(map(str.isupper, word[1:])) and any(map(str.islower, word))}
    later = words[1:] if whole else words
    capital = [word for word in later if word[:1].isupper()]
    if len(later) > 3 and 2 * len(capital) > len(later):
        return frozenset(inner)
    capital += [word for word in words[:1] if word in context.names]
    return frozenset(inner | {word for word in capital if word.casefold() not in context.common | _CALENDAR})


def _num_changed(edits: Sequence[Edit]) -> int:
    """The number of changed words; changes of case, spaces and punctuation count as none."""
    sides = ([Counter(_UNIT.findall(text.casefold())) for text in (e.original, e.replacement)] for e in edits)
    return sum(max((old - new).total(), (new - old).total()) for old, new in sides)


def _max_changed(sentence: str, ratio: float) -> float:
    if ratio in (0.0, 1.0):
        return 0.0 if ratio == 0.0 else float("inf")
    return max(1.0, ratio * len(_UNIT.findall(sentence)))
