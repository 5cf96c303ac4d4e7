"""Hits joined with the passages around them: each is one verbatim part of its document, and hits that touch are one.

Owns how passages are joined. Knows no index and no budget: a prompt takes the first of `widths` that fits.

    >>> next(widths(retriever.retrieve(["When did it rain?"], k=3).passages[0]))[0].text
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ragspec.core import Block, Passage, blocks_in


@dataclass(frozen=True, slots=True)
class WidePassage(Passage):
    """A hit that can be shown with `num_neighbours` passages on each side.

    `around`: the document's text from `around_start`, with one passage more on each side, so that it shows which hits touch.
    `spans`: of the passages in it, in order, in characters of the document. `around_blocks`: those that reach into it, likewise.
    """

    around: str = ""
    around_start: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    num_neighbours: int = 0
    around_blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedPassage(Passage):
    """A passage as it was shown, with text around its best hit, which is [hit_start, hit_end) of the document."""

    hit_start: int = 0
    hit_end: int = 0

    @property
    def hit(self) -> Passage:
        start, end = self.hit_start - self.start, self.hit_end - self.start
        return part(self, self.text[start:end], self.hit_start, self.hit_end, blocks_in(self.blocks, start, end))


def fields_of(passage: Passage) -> dict[str, Any]:
    """The fields that every passage has, by name."""
    return {field.name: getattr(passage, field.name) for field in fields(Passage)}


def part(passage: Passage, text: str, start: int, end: int, blocks: tuple[Block, ...]) -> Passage:
    """A plain passage at another place of the same document, with the names of `passage`."""
    return Passage(**fields_of(passage) | {"text": text, "start": start, "end": end, "blocks": blocks})


class _Region(NamedTuple):
    """The part [start, end) of a document, which is shown for `hit`. `known`: the document's text from `known_start`.

    `blocks`: those known, by their places in the document.
    """

    rank: int
    hit: Passage
    start: int
    end: int
    known: str
    known_start: int
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, rank: int, hit: Passage, num_neighbours: int) -> _Region:
        if not isinstance(hit, WidePassage):
            blocks = tuple(each._replace(start=each.start + hit.start, end=each.end + hit.start) for each in hit.blocks)
            return cls(rank, hit, hit.start, hit.end, hit.text, hit.start, blocks)
        at = hit.spans.index((hit.start, hit.end))
        inside = hit.spans[max(0, at - num_neighbours) : at + num_neighbours + 1]
        end = max(end for _, end in inside)
        return cls(rank, hit, inside[0][0], end, hit.around, hit.around_start, hit.around_blocks)

    @property
    def passage(self) -> Passage:
        hit, blocks = self.hit, blocks_in(self.blocks, self.start, self.end)
        shown = part(hit, self.text(self.start, self.end), self.start, self.end, blocks)
        if (self.start, self.end) == (hit.start, hit.end):
            return shown
        return JoinedPassage(**fields_of(shown), hit_start=hit.start, hit_end=hit.end)

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


def _merged(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Blocks in order; parts of a block that overlap become one."""
    found: list[Block] = []
    for block in sorted(blocks):
        if found and block.start < found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, block.end))
        else:
            found.append(block)
    return tuple(found)


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
    start, end = min(one.start, other.start), max(one.end, other.end)
    blocks = _merged(one.blocks + other.blocks)
    both = best._replace(start=start, end=end, known=known, known_start=low.known_start, blocks=blocks)
    between = both.text(min(one.end, other.end), max(one.start, other.start))
    return None if between.strip() else both
