"""Finds the words of a passage that a free sentence of an answer rests on: the exact text that a reader checks it against.

Owns the choice by overlap. A word counts by how rare it is in the passages; words of the question count less. Evidence is a run
of at most `_MAX_UNITS` neighbours that `ragspec.rag.quotable` lets an answer quote. Evidence is no proof: whether it says the
same as the sentence is for the reader to judge.

    >>> Evidence(passages, "When does the mill open?").find("At nine o'clock.")
    Place(passage=..., start=0, end=34)
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ragspec.core import Passage
from ragspec.rag.quotable import quotable_runs
from ragspec.rag.restatement import content_words, is_negation, words_of
from ragspec.retrieval.chunking import Span
from ragspec.retrieval.search.analysis import COMMON_WORDS

_MAX_UNITS = 3
_QUESTION_WEIGHT = 0.4
"""Of a word of the question beside one of the answer."""
_UNIT_COST = 0.5
"""What another sentence must add to the overlap, in the weight of a word that stands in one sentence only."""
_LEAST_COVERED = 0.6
"""The share of the statement's words that the question does not hold, by weight, that evidence holds."""
_LEAST_SAID_BACK = 0.8
"""The same of a statement that only says the question's words."""
_LEAST_BESIDE_NAMES = 0.3
"""The same of a statement with a number, an option or a path, all of which evidence holds."""
_STEM_CHARS = 6
_NAME = re.compile(r"[\d/_]|^-")
_COMMON = frozenset(word[:_STEM_CHARS] for word in [*COMMON_WORDS["english"].split(), "yes"])
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


class Place(NamedTuple):
    """`passage.text[start:end]`."""

    passage: Passage
    start: int
    end: int


class _Window(NamedTuple):
    place: Place
    stems: frozenset[str]
    num_units: int


class Evidence:
    """The sentences of some passages, as evidence for answers to one question."""

    def __init__(self, passages: Sequence[Passage], question: str = "") -> None:
        units = [
            (passage, [(span, _stems(passage.text[slice(*span)])) for span in run])
            for passage in passages
            for run in quotable_runs(passage)
        ]
        holding = Counter(stem for _, run in units for _, stems in run for stem in stems)
        self._num_units = sum(len(run) for _, run in units)
        self._holding, self._weights = holding, dict[str, float]()
        self._question = _stems(question)
        self._windows = [window for passage, run in units for window in _windows(passage, run)]

    def find(self, statement: str) -> Place | None:
        """The window of greatest overlap that lacks no number, no option and no negation of the statement, and not too many of
        its words; None if there is none."""
        stems = _stems(statement)
        if not stems or not self._windows:
            return None
        cost = _UNIT_COST * self._weight("")
        asked = self._question - stems
        covering = (each for each in self._windows if self._covers(each, statement, stems))
        overlap = {each.place: self._overlap(each.stems, stems, asked) - cost * each.num_units for each in covering}
        return max(overlap, key=overlap.__getitem__, default=None)

    def lead(self, quote: str) -> float:
        """By how much of the question's words, by weight, a quote holds more than any other span that may be quoted; -1 to 1."""
        others = (each for each in self._windows if each.num_units == 1)
        texts = ((each.place.passage.text[each.place.start : each.place.end], each.stems) for each in others)
        best = max(
            (self._share(stems) for text, stems in texts if text not in quote and quote not in text), default=0.0
        )
        return self._share(_stems(quote)) - best

    def _share(self, stems: frozenset[str]) -> float:
        return self._total(stems & self._question) / (self._total(self._question) or 1.0)

    def _overlap(self, held: frozenset[str], stems: frozenset[str], asked: frozenset[str]) -> float:
        return self._total(held & stems) + _QUESTION_WEIGHT * self._total(held & asked)

    def _covers(self, window: _Window, statement: str, stems: frozenset[str]) -> bool:
        # Why not the question's words: they stand in most windows, and the answer is in the others
        told = (stems - self._question) or stems
        is_said_back = stems <= self._question
        names = {stem for stem in told if _NAME.search(stem)}
        if not names <= window.stems:
            return False
        place = window.place
        if _is_negated(statement) != _is_negated(place.passage.text[place.start : place.end]):
            return False
        least = _LEAST_SAID_BACK if is_said_back else _LEAST_BESIDE_NAMES if names else _LEAST_COVERED
        return self._total(told & window.stems) >= least * self._total(told)

    def _total(self, stems: frozenset[str]) -> float:
        """Exact: the order of a set differs by process."""
        return math.fsum(map(self._weight, stems))

    def _weight(self, stem: str) -> float:
        if (weight := self._weights.get(stem)) is None:
            weight = self._weights[stem] = math.log(1 + self._num_units / max(1, self._holding[stem]))
        return weight


def _windows(passage: Passage, units: Sequence[tuple[Span, frozenset[str]]]) -> Iterator[_Window]:
    for first, ((start, _), _) in enumerate(units):
        for after in range(first + 1, min(first + _MAX_UNITS, len(units)) + 1):
            taken = units[first:after]
            held = frozenset().union(*(stems for _, stems in taken))
            yield _Window(Place(passage, start, max(end for (_, end), _ in taken)), held, len(taken))


def _stems(text: str) -> frozenset[str]:
    """The words that carry meaning, cut to their beginnings: "encrypts" and "encrypted" are one. And the options of commands."""
    words = [word[:_STEM_CHARS] if word.isalpha() else word for word in content_words(words_of(text))]
    return frozenset([*words, *_OPTION.findall(text)])


def _is_negated(text: str) -> bool:
    return any(is_negation(word.text) for word in words_of(text))
