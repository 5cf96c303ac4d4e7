"""Writes the postings of a segment, from terms or from the postings of other segments.

The same rows always give the same bytes, added one by one or merged.

    >>> builder.add(analyzer.terms("It rained.")); builder.write(folder); Postings.open(folder).num_rows
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.retrieval.search.bm25 import POSTING_FILES, Ints, Postings

_BLOCK_TERMS = 4_000_000
"""Terms collected before a sort; their keys take 32 MB."""


class PostingsBuilder:
    """Collects rows and writes them as one segment. Memory: about 5 bytes for each distinct term of each row."""

    def __init__(self) -> None:
        self._ids: defaultdict[str, int] = defaultdict()
        self._ids.default_factory = self._ids.__len__  # a term's number: how many terms came before it
        self._block = array("i")  # term numbers of the rows since the last block
        self._lengths = array("i")
        self._sorted_rows = 0
        self._lists: list[_Lists] = []

    @property
    def num_rows(self) -> int:
        return len(self._lengths)

    def add(self, terms: Sequence[str]) -> None:
        """The terms of the next row."""
        ids = self._ids
        self._block.extend([ids[term] for term in terms])
        self._lengths.append(len(terms))
        if len(self._block) >= _BLOCK_TERMS:
            self._sort_block()

    def add_postings(self, postings: Postings, kept_rows: Ints) -> None:
        """Append the rows `kept_rows`, strictly ascending, of a segment as the next rows; nothing is analysed again."""
        assert len(kept_rows) == 0 or (kept_rows[0] >= 0 and np.all(np.diff(kept_rows) > 0)), "rows must ascend"
        self._sort_block()
        new_rows = np.full(postings.num_rows, -1, np.int32)
        new_rows[kept_rows] = np.arange(self.num_rows, self.num_rows + len(kept_rows), dtype=np.int32)
        rows = new_rows[postings.rows]
        kept = rows >= 0
        sizes = np.diff(np.concatenate([[0], np.cumsum(kept)])[postings.offsets])
        term_ids = np.fromiter((self._ids[term] for term in postings.terms), np.int64, len(postings.terms))
        self._lists.append(_Lists(term_ids, sizes, rows[kept], postings.counts[kept]))
        self._lengths.extend(array("i", postings.lengths[kept_rows].astype("i").tobytes()))
        self._sorted_rows = self.num_rows

    def write(self, folder: Path) -> None:
        """Write `POSTING_FILES` into `folder`. The caller flushes them to the disk.

        Raises: OSError.
        """
        self._sort_block()
        sizes = np.zeros(len(self._ids), np.int64)  # [V] by number
        for lists in self._lists:
            sizes[lists.term_ids] += lists.sizes
        terms = sorted(term for term, number in self._ids.items() if sizes[number])  # UTF-8 sorts as characters do
        order = np.fromiter((self._ids[term] for term in terms), np.int64, len(terms))
        offsets = np.concatenate([[0], np.cumsum(sizes[order])])
        begins = np.zeros(len(sizes), np.int64)
        begins[order] = offsets[:-1]
        encoded = [term.encode("utf-8") for term in terms]
        term_offsets = np.concatenate([[0], np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))])
        raw, lengths = np.frombuffer(b"".join(encoded), np.uint8), np.frombuffer(self._lengths, np.int32)
        rows, counts = _joined(self._lists, begins)
        arrays: list[NDArray[Any]] = [raw, term_offsets, offsets, rows, counts, lengths]
        for name, values in zip(POSTING_FILES, arrays, strict=True):
            np.save(folder / name, values, allow_pickle=False)

    def _sort_block(self) -> None:
        first, self._sorted_rows = self._sorted_rows, self.num_rows
        if self._block:
            lengths = np.frombuffer(self._lengths, np.int32)[first:].copy()
            self._lists.append(_counted(np.frombuffer(self._block, np.int32), lengths, first))
            self._block = array("i")


def merge_postings(postings: Sequence[Postings], kept_rows: Sequence[Ints]) -> PostingsBuilder:
    """The kept rows of several segments, one segment after the other, as if their texts had been added anew.

    Shapes: kept_rows[i] [<= K of segment i] int64, strictly ascending.
    """
    builder = PostingsBuilder()
    for source, kept in zip(postings, kept_rows, strict=True):
        builder.add_postings(source, kept)
    return builder


class _Lists(NamedTuple):
    """Postings of a range of rows, term after term. Shapes: term_ids and sizes [v], rows and counts [sum of sizes]."""

    term_ids: Ints
    sizes: Ints
    rows: NDArray[np.int32]
    counts: NDArray[Any]


def _counted(term_ids: NDArray[np.int32], lengths: NDArray[np.int32], first_row: int) -> _Lists:
    """Shapes: term_ids [sum of lengths], lengths [rows]."""
    keys = term_ids.astype(np.int64) << 32
    keys |= np.repeat(np.arange(first_row, first_row + len(lengths)), lengths)
    keys.sort()
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(starts, append=len(keys))
    pairs = keys[starts]
    first = np.flatnonzero(np.diff(pairs >> 32, prepend=-1))
    sizes = np.diff(first, append=len(pairs))
    return _Lists(pairs[first] >> 32, sizes, (pairs & 0xFFFFFFFF).astype(np.int32), counts.astype(_narrowest(counts)))


def _joined(all_lists: Sequence[_Lists], begins: Ints) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Rows and counts of all lists, each term's at its place. Shapes: begins [V] by number -> two [P]."""
    num_postings = sum(len(lists.rows) for lists in all_lists)
    dtype = np.result_type(np.uint8, *(_narrowest(lists.counts) for lists in all_lists))
    rows, counts = np.empty(num_postings, np.int32), np.empty(num_postings, dtype)
    for lists in all_lists:
        before = np.cumsum(lists.sizes) - lists.sizes
        places = np.repeat(begins[lists.term_ids] - before, lists.sizes) + np.arange(len(lists.rows))
        rows[places], counts[places] = lists.rows, lists.counts
        begins[lists.term_ids] += lists.sizes
    return rows, counts


def _narrowest(counts: NDArray[Any]) -> np.dtype[Any]:
    return np.min_scalar_type(int(counts.max(initial=0)))
