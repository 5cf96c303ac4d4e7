"""The fewest changes of words that make one text of another, with their places.

Pure functions over strings; a word, a run of white space and a punctuation mark are the pieces that change.

    >>> word_edits("He go to school.", "He goes to the school.")
    [Edit(start=3, end=5, original='go', replacement='goes'), Edit(start=8, end=8, original='', replacement=' the')]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PIECE = re.compile(r"\w+(?:['’]\w+)*|\s+|.", re.DOTALL)
_UNLIKE = 2
"""What replacing a word by white space costs: as much as taking one away and putting the other in."""


@dataclass(frozen=True, slots=True)
class Edit:
    """`text[start:end] == original` becomes `replacement`; one of the two may be empty, never both. Units: characters."""

    start: int
    end: int
    original: str
    replacement: str


def word_edits(before: str, after: str, start: int = 0) -> list[Edit]:
    """Edits that make `before` into `after`: in order, apart from each other, as few pieces changed as can be.

    `start`: where `before` begins in a longer text, whose characters the edits then count. Time grows with the product of the
    lengths of what differs.
    """
    old, new = _PIECE.findall(before), _PIECE.findall(after)
    first = _num_equal(old, new)
    last = _num_equal(old[first:][::-1], new[first:][::-1])
    at = start + sum(map(len, old[:first]))
    edits: list[Edit] = []
    for cut, put in _changes(old[first : len(old) - last], new[first : len(new) - last]):
        original, replacement = "".join(cut), "".join(put)
        if original != replacement:
            edits.append(Edit(at, at + len(original), original, replacement))
        at += len(original)
    return edits


def applied(text: str, edits: Sequence[Edit]) -> str:
    """The text after its edits, which are in order and do not overlap."""
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.start], edit.replacement]
        at = edit.end
    return "".join([*parts, text[at:]])


def _num_equal(old: Sequence[str], new: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Runs that stay (equal on both sides) and runs that change, in turns, from first to last."""
    runs: list[tuple[list[str], list[str], bool]] = []
    for a, b in _aligned(old, new):
        stays = a == b
        if not runs or runs[-1][2] != stays:
            runs.append(([], [], stays))
        runs[-1][0].append(a)
        runs[-1][1].append(b)
    for cut, put, _ in runs:
        yield cut, put


def _aligned(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of pieces with the fewest that differ; "" stands against what is put in or taken away (Levenshtein)."""
    costs = [list(range(len(new) + 1))]  # costs[i][j]: of making old[:i] into new[:j]
    for i, a in enumerate(old, 1):
        row, above = [i], costs[-1]
        for j, b in enumerate(new, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + _cost(a, b)))
        costs.append(row)
    pairs, i, j = [], len(old), len(new)
    while i or j:
        if i and j and costs[i][j] == costs[i - 1][j - 1] + _cost(old[i - 1], new[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((old[i], new[j]))
        elif i and costs[i][j] == costs[i - 1][j] + 1:
            i -= 1
            pairs.append((old[i], ""))
        else:
            j -= 1
            pairs.append(("", new[j]))
    return pairs[::-1]


def _cost(a: str, b: str) -> int:
    if a == b:
        return 0
    return 1 if a.isspace() == b.isspace() else _UNLIKE
