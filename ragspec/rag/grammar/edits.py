"""The fewest changes of words that make one text of another, with their places.

Pure functions over strings; a word with its accents, a run of white space and any other character with what belongs to it are the
pieces that change.

    >>> word_edits("He go to school.", "He goes to the school.")[0]
    Edit(start=3, end=5, original='go', replacement='goes', kind=<EditKind.OTHER: 'other'>)
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragspec.rag.characters import combining_marks, grapheme_pattern

_UNLIKE = 2
"""What replacing a word by white space costs: as much as taking one away and putting the other in."""
_CHANGE = 2**20
"""What changing a piece costs; below that, pieces that look alike are preferred."""


class EditKind(enum.StrEnum):
    """What is wrong with what an edit changes."""

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
    """Edits that make `before` into `after`: in order, apart from each other, as few pieces changed as can be.

    `start`: where `before` begins in a longer text, whose characters the edits then count. `keep_white`: white space is as good
    as any other, so that line breaks stay where they are. Time grows with the product of the lengths of what differs.
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
    """The text after its edits, which are in order and do not overlap."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.start], edit.replacement]
        at = edit.end
    return "".join([*parts, text[at:]])


def split_pieces(text: str) -> list[str]:
    """What changes as a whole. Joined they are the text."""
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
    """Runs that stay and runs that change: which it is, how many old pieces it has, and the new text."""
    for stays, run in itertools.groupby(pairs, lambda pair: pair[0] == pair[1]):
        for part in [list(run)] if stays else _split_run(list(run)):
            yield stays, sum(bool(a) for a, _ in part), "".join(b for _, b in part)


def _split_run(run: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Words that are replaced stand apart from those put in or taken away beside them; one that is joined or cut does not."""
    cut, put = ("".join(side).split() for side in zip(*run, strict=True))
    if "".join(cut) == "".join(put):
        return [run]
    return [list(part) for _, part in itertools.groupby(run, lambda pair: bool(pair[0] and pair[1]))]


def _align(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of pieces with the fewest that differ, and of those the most alike; "" stands against what is put in or taken away
    (Levenshtein)."""
    costs = [[j * _CHANGE for j in range(len(new) + 1)]]  # costs[i][j]: of making old[:i] into new[:j]
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
    """The same change with the word before its space: "to " before "school", not " to" behind "goes"."""
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
    """0 to 100: how little of two words is their common beginning and end."""
    first = _num_equal(a, b)
    last = _num_equal(a[first:][::-1], b[first:][::-1])
    return 100 - 200 * (first + last) // (len(a) + len(b))
