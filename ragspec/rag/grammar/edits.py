"""Minimal word-level edits between two texts, with offsets.

Pure functions over strings. A text is split into pieces: words, runs of white space, and other grapheme clusters.

    >>> word_edits("He go to school.", "He goes to the school.")[0]
    Edit(start=3, end=5, original='go', replacement='goes', kind=<EditKind.OTHER: 'other'>)
"""

import enum
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragspec.rag.citations import combining_marks, grapheme_pattern

_UNLIKE = 2
"""The cost of replacing a word by white space equals a deletion and an insertion."""
_CHANGE = 2**20
"""The cost of changing a piece. Smaller costs prefer pairs of similar pieces."""


class EditKind(enum.StrEnum):
    """The kind of mistake that an edit corrects."""

    SPELLING = "spelling"
    AGREEMENT = "agreement"
    ARTICLE = "article"
    PREPOSITION = "preposition"
    VERB_FORM = "verb_form"
    WORD_ORDER = "word_order"
    PUNCTUATION = "punctuation"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Edit:
    """`text[start:end] == original` becomes `replacement`; one of the two may be empty, never both. Units: characters."""

    start: int
    end: int
    original: str
    replacement: str
    kind: EditKind = EditKind.OTHER


def word_edits(before: str, after: str, start: int = 0, *, keep_white: bool = False) -> list[Edit]:
    """Edits from `before` to `after`: in order, not adjacent, with the fewest pieces changed.

    `start`: the offset of `before` in a longer text. `keep_white`: all white space counts as equal, so line breaks stay.
    Time is proportional to the product of the lengths of the differing parts.
    """
    old, new = split_pieces(before), split_pieces(after)
    same_old, same_new = (_unified(old), _unified(new)) if keep_white else (old, new)
    first = _num_equal(same_old, same_new)
    last = _num_equal(same_old[first:][::-1], same_new[first:][::-1])
    at = start + sum(map(len, old[:first]))
    edits: list[Edit] = []
    pairs = _align(same_old[first : len(old) - last], same_new[first : len(new) - last])
    for stays, cut, put in _runs(pairs):
        original = "".join(old[first : first + cut])
        first += cut
        if not stays and original != put:
            edits.append(Edit(at, at + len(original), original, put))
        at += len(original)
    return edits


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """The text with its edits, which are in order and do not overlap."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.start], edit.replacement]
        at = edit.end
    return "".join([*parts, text[at:]])


def split_pieces(text: str) -> list[str]:
    """The pieces of a text; joined they are the text."""
    return _piece().findall(text)


@functools.cache
def _piece() -> re.Pattern[str]:
    word = rf"(?:\w[{combining_marks()}]*+)++"
    return re.compile(rf"{word}(?:['’]{word})*+|\s++|{grapheme_pattern()}", re.DOTALL)


def _unified(all_pieces: Sequence[str]) -> list[str]:
    return [" " if piece.isspace() else piece for piece in all_pieces]


def _num_equal(old: Sequence[str], new: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _runs(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[bool, int, str]]:
    """Equal and changed runs: (is equal, number of old pieces, new text)."""
    for stays, run in itertools.groupby(pairs, lambda pair: pair[0] == pair[1]):
        for part in [list(run)] if stays else _split_run(list(run)):
            yield stays, sum(bool(a) for a, _ in part), "".join(b for _, b in part)


def _split_run(run: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Separate replacements from adjacent insertions and deletions, unless the run only joins or splits words."""
    cut, put = ("".join(side).split() for side in zip(*run, strict=True))
    if "".join(cut) == "".join(put):
        return [run]
    return [list(part) for _, part in itertools.groupby(run, lambda pair: bool(pair[0] and pair[1]))]


def _align(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """Levenshtein alignment: pairs with the fewest differences, then the most similar; "" faces insertions and deletions."""
    costs = [[j * _CHANGE for j in range(len(new) + 1)]]  # costs[i][j]: from old[:i] to new[:j]
    for i, a in enumerate(old, 1):
        row, above = [i * _CHANGE], costs[-1]
        for j, b in enumerate(new, 1):
            row.append(min(above[j] + _CHANGE, row[j - 1] + _CHANGE, above[j - 1] + _cost(a, b)))
        costs.append(row)
    pairs, i, j = [], len(old), len(new)
    while i or j:
        if i and j and costs[i][j] == costs[i - 1][j - 1] + _cost(old[i - 1], new[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((old[i], new[j]))
        elif i and costs[i][j] == costs[i - 1][j] + _CHANGE:
            i -= 1
            pairs.append((old[i], ""))
        else:
            j -= 1
            pairs.append(("", new[j]))
    return _shift_spaces(pairs[::-1])


def _shift_spaces(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same change with the space after the word: insert "to " before "school", not " to" after "goes"."""
    for first, (a, b) in enumerate(pairs):
        if (a and b) or not (a or b).isspace() or (first and bool(pairs[first - 1][0]) != bool(pairs[first - 1][1])):
            continue
        last = first
        while last < len(pairs) and (bool(pairs[last][0]), bool(pairs[last][1])) == (bool(a), bool(b)):
            last += 1
        if last < len(pairs) and pairs[last][0] == pairs[last][1] == (a or b):
            pairs[first : last + 1] = [pairs[last], *pairs[first + 1 : last], (a, b)]
    return pairs


@functools.lru_cache(maxsize=4096)
def _cost(a: str, b: str) -> int:
    if a == b:
        return 0
    if a.isspace() != b.isspace():
        return _UNLIKE * _CHANGE
    return _CHANGE + _unlikeness(a.casefold(), b.casefold())


def _unlikeness(a: str, b: str) -> int:
    """0 to 100: the share of two words outside their common prefix and suffix."""
    first = _num_equal(a, b)
    last = _num_equal(a[first:][::-1], b[first:][::-1])
    return 100 - 200 * (first + last) // (len(a) + len(b))
