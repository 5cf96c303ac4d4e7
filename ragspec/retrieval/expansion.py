"""Hits joined with the passages around them: each is one verbatim part of its document, and hits that touch are one.

Owns how passages are joined. Knows no index and no budget: a prompt takes the first of `widths` that fits.

    >>> next(widths(retriever.retrieve(["When did it rain?"], k=3).passages[0]))[0].text
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragspec.core import Passage


@dataclass(frozen=True, slots=True)
class WidePassage(Passage):
    """A hit that can be shown with `num_neighbours` passages on each side.

    `around`: the document's text from `around_start`, with one passage more on each side, so that it shows which hits touch.
    `spans`: of the passages in it, in order, in characters of the document.
    """

    around: str = ""
    around_start: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    num_neighbours: int = 0


@dataclass(frozen=True, slots=True)
class JoinedPassage(Passage):
    """A passage as it was shown, with text around its best hit, which is [hit_start, hit_end) of the document."""

    hit_start: int = 0
    hit_end: int = 0

    @property
    def hit(self) -> Passage:
        text = self.text[self.hit_start - self.start : self.hit_end - self.start]
        names = self.title, self.source, self.score, self.heading
        return Passage(self.document_id, self.ordinal, text, self.hit_start, self.hit_end, *names)


class _Region(NamedTuple):
    """The part [start, end) of a document, which is shown for `hit`. `known`: the document's text from `known_start`."""

    rank: int
    hit: Passage
    start: int
    end: int
    known: str
    known_start: int

    @classmethod
    def of(cls, rank: int, hit: Passage, num_neighbours: int) -> _Region:
        if not isinstance(hit, WidePassage):
            return cls(rank, hit, hit.start, hit.end, hit.text, hit.start)
        at = hit.spans.index((hit.start, hit.end))
        inside = hit.spans[max(0, at - num_neighbours) : at + num_neighbours + 1]
        end = max(end for _, end in inside)
        return cls(rank, hit, inside[0][0], end, hit.around, hit.around_start)

    @property
    def passage(self) -> Passage:
        hit, names = self.hit, (self.hit.title, self.hit.source, self.hit.score, self.hit.heading)
        shown = hit.document_id, hit.ordinal, self.text(self.start, self.end), self.start, self.end, *names
        is_joined = (self.start, self.end) != (hit.start, hit.end)
        return JoinedPassage(*shown, hit.start, hit.end) if is_joined else Passage(*shown)

    def text(self, start: int, end: int) -> str:
        return self.known[start - self.known_start : end - self.known_start]


def widths(passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """The passages as they may be shown: joined with all their neighbours, with fewer, with none, and last each by itself.

    The last is for prompts without room for all, and the only one if no passage has neighbours.
    """
    most = max((each.num_neighbours for each in passages if isinstance(each, WidePassage)), default=0)
    for num_neighbours in range(most, -1, -1) if most else ():
        yield joined(passages, num_neighbours)
    yield [_Region.of(0, each, 0).passage if isinstance(each, WidePassage) else each for each in passages]


def joined(passages: Iterable[Passage], num_neighbours: int = 0) -> list[Passage]:
    """Each passage with its neighbours, in the order given. Those that touch or overlap become one, in the first one's place."""
    regions: list[_Region] = []
    for rank, passage in enumerate(passages):
        region = _Region.of(rank, passage, num_neighbours)
        for other in regions[:]:
            if (both := _union(other, region)) is not None:
                regions.remove(other)
                region = both
        regions.append(region)
    return [region.passage for region in sorted(regions, key=lambda region: region.rank)]


def is_part(passage: Passage, others: Iterable[Passage]) -> bool:
    """Whether the passage stands at its place in the others together, but for space between these."""
    own = _Region.of(0, passage, 0)
    at = own.start
    of_the_document = [_Region.of(0, each, 0) for each in others if each.document_id == passage.document_id]
    for other in sorted(of_the_document, key=lambda each: each.start):
        start, end = max(own.start, other.start), min(own.end, other.end)
        if start >= end or own.text(at, start).strip():
            continue
        if own.text(start, end) != other.text(start, end):
            return False
        at = max(at, end)
    return not own.text(at, own.end).strip()


def _union(one: _Region, other: _Region) -> _Region | None:
    """Both as one region with the better hit; None if they do not touch, or are of another state of the document."""
    if one.hit.document_id != other.hit.document_id:
        return None
    low, high = sorted((one, other), key=lambda region: region.known_start)
    shift = high.known_start - low.known_start
    shared = low.known[shift : shift + len(high.known)]
    if not shared or not high.known.startswith(shared):
        return None
    best = min(one, other, key=lambda region: region.rank)
    known = low.known[:shift] + high.known + low.known[shift + len(high.known) :]
    both = best._replace(
        start=min(one.start, other.start),
        end=max(one.end, other.end),
        known=known,
        known_start=low.known_start,
    )
    between = both.text(min(one.end, other.end), max(one.start, other.start))
    return None if between.strip() else both
