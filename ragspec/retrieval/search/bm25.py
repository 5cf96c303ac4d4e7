"""BM25 over immutable segments: a row's score is bitwise the same in any segment, shard or batch.

    score(row) = sum over the query's terms, in sorted order, of weight * tf / (tf + k1 * (1 - b + b * length / average_length))
    weight     = times the term is in the query * ln(1 + (N - df + 0.5) / (df + 0.5))

N, df and the average length count the readable rows of all segments, as integers that add up exactly. Every operation is one
float64 operation in a fixed order. Why not tantivy's index: it stores lengths in one byte and counts deleted rows.
Source: Robertson and Zaragoza, The Probabilistic Relevance Framework (2009); the idf is Lucene's, never negative.

A segment is six arrays, mapped from disk (`ragspec.retrieval.search.bm25` writes them):

    terms.npy            [bytes] uint8    all terms one after the other, sorted by their UTF-8 bytes
    term_offsets.npy     [V + 1] int64    term t is terms[term_offsets[t]:term_offsets[t + 1]]
    posting_offsets.npy  [V + 1] int64    its postings are [posting_offsets[t], posting_offsets[t + 1])
    posting_rows.npy     [P] int32        ascending inside a term
    posting_counts.npy   [P] uint8..32    times the term occurs in the row; the narrowest type that holds them all
    lengths.npy          [K] int32        terms of a row, with repetitions

    >>> statistics = sum((postings.statistics(terms) for postings in segments), TermStatistics())
    >>> rows, scores = segments[0].scores(sparse_query(terms, statistics))
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import StoreCorrupt
from ragspec.numerics.compiled import compiled
from ragspec.retrieval.index.segment_files import mapped_array

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Length = TypeVar("Length", float, NDArray[np.float64])

POSTING_FILES = tuple(
    f"{name}.npy" for name in "terms term_offsets posting_offsets posting_rows posting_counts lengths".split()
)

_CHANGED = "the postings were changed while they were in use"
_KINDS = ("u1", "i8", "i8", "i4", "u1 u2 u4", "i4")

_BLOCK_ROWS = 8192
"""Rows scored at a time; their sums take 64 KB. Measured at a million rows: a third faster than one array of sums."""


K1, B = 1.2, 0.75
"""BM25's saturation of repeated terms and its discount for long passages."""


@dataclass(frozen=True, slots=True)
class TermStatistics:
    """Counts over readable rows. They are integers, so parts add up to the same sum in any layout of segments."""

    num_rows: int = 0
    total_length: int = 0
    frequencies: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: TermStatistics) -> TermStatistics:
        both = Counter(self.frequencies)
        both.update(other.frequencies)
        return TermStatistics(self.num_rows + other.num_rows, self.total_length + other.total_length, both)


@dataclass(frozen=True, slots=True)
class SparseQuery:
    """A query with its weights, the same for all segments. `terms` are distinct and sorted."""

    terms: tuple[str, ...]
    weights: tuple[float, ...]
    average_length: float

    def norm(self, length: Length) -> Length:
        """The part of the denominator that depends on a row's length."""
        return K1 * ((1.0 - B) + B * length / self.average_length)


def sparse_query(terms: Sequence[str], statistics: TermStatistics) -> SparseQuery:
    """The query of these terms with their repetitions, under the statistics of all segments and shards.

    Uses `math.log` and Python's floats, since a SIMD path may round differently.
    """
    counts = sorted(Counter(terms).items())
    weights = [count * idf(statistics.num_rows, statistics.frequencies.get(term, 0)) for term, count in counts]
    average_length = statistics.total_length / statistics.num_rows if statistics.total_length else 1.0
    return SparseQuery(tuple(term for term, _ in counts), tuple(weights), average_length)


def idf(num_rows: int, frequency: int) -> float:
    """The weight of a term that `frequency` of `num_rows` passages hold."""
    return math.log(1.0 + (num_rows - frequency + 0.5) / (frequency + 0.5))


class Postings:
    """The postings of one segment; read-only, safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        """Map the files of `folder`. Their hashes must have been compared.

        Raises: StoreCorrupt if a file is missing, is no array of the right type, or does not fit the others.
        """
        arrays = [mapped_array(folder / name) for name in POSTING_FILES]
        if not _fit_together(arrays):
            raise StoreCorrupt(f"the postings in {folder} do not fit together")
        terms, term_offsets, self.offsets, self.rows, self.counts, self.lengths = (a.view(np.ndarray) for a in arrays)
        self.terms = _Terms(terms, term_offsets)
        self.num_rows, self._longest = len(self.lengths), int(self.lengths.max(initial=0))

    def postings(self, term: str) -> slice:
        """The slice of `rows` and `counts` that holds the postings of `term`; empty for an unknown term.

        Raises: StoreCorrupt if the files were changed.
        """
        at = self.terms.find(term)
        found = slice(0, 0) if at is None else slice(int(self.offsets[at]), int(self.offsets[at + 1]))
        if not 0 <= found.start <= found.stop <= len(self.rows):
            raise StoreCorrupt(_CHANGED)
        return found

    def frequency(self, term: str, readable: Mask | None = None) -> int:
        """Readable rows that hold the term; None: all are readable. Shapes: readable [K]."""
        rows = self.rows[self.postings(term)]
        try:
            return len(rows) if readable is None else int(np.count_nonzero(readable[rows]))
        except IndexError as cause:
            raise StoreCorrupt(_CHANGED) from cause

    def statistics(self, terms: Sequence[str], readable: Mask | None = None) -> TermStatistics:
        """This segment's part of the statistics of `terms`. Shapes: readable [K]."""
        num_rows = self.num_rows if readable is None else int(np.count_nonzero(readable))
        total_length = int(np.sum(self.lengths, dtype=np.int64, where=True if readable is None else readable))
        return TermStatistics(num_rows, total_length, {term: self.frequency(term, readable) for term in terms})

    def scores(self, query: SparseQuery, allowed: Mask | None = None) -> tuple[Ints, NDArray[np.float64]]:
        """The allowed rows that hold a term of the query, ascending, and their scores, all greater than 0.

        Shapes: allowed [K] -> two [R]. Raises: StoreCorrupt if the files were changed.
        """
        spans = [self.postings(term) for term in query.terms]
        begins = np.array([span.start for span in spans], np.int64)
        ends = np.array([span.stop for span in spans], np.int64)
        most = min(self.num_rows, int(np.sum(ends - begins)))
        rows, scores = np.empty(most, np.int64), np.empty(most, np.float64)  # [R] and room
        # Why a copy: to the compiler, a read-only mask is another type.
        mask = np.zeros(0, np.bool_) if allowed is None else np.array(allowed)  # [K] or [0]
        weights = np.array(query.weights, np.float64)
        norms = query.norm(np.arange(self._longest + 1, dtype=np.float64))  # [longest row + 1]
        found = _scored_rows((self.rows, self.counts, self.lengths), (begins, ends, weights), norms, mask, rows, scores)
        if found < 0:
            raise StoreCorrupt(_CHANGED)
        return rows[:found], scores[:found]


@compiled(nogil=True)
def _scored_rows(postings: Any, query: Any, norms: Any, allowed: Any, found_rows: Any, found_scores: Any) -> int:
    """Scores block of rows by block, so that the sums stay in the cache; returns how many rows were found.

    -1: a row or a length lies outside the arrays. They are checked here, each time, because the files are mapped: whoever
    overwrites them changes what was checked before. No fastmath: each operation rounds as Python's does. An empty `allowed`
    allows every row.
    Shapes: postings rows and counts [P], lengths [K]; query begins, ends and weights [terms]; norms [longest row + 1];
    out: found_rows and found_scores [R].
    """
    rows, counts, lengths = postings
    begins, ends, weights = query
    sums = np.zeros(_BLOCK_ROWS)
    at = begins.copy()
    found = 0
    for first in range(0, lengths.shape[0], _BLOCK_ROWS):
        end = min(first + _BLOCK_ROWS, lengths.shape[0])
        touched = False
        for term in range(begins.shape[0]):
            begin, weight = at[term], weights[term]
            at[term] += np.searchsorted(rows[begin : ends[term]], end)
            touched |= at[term] > begin
            for i in range(begin, at[term]):
                at_row = np.uint32(np.uint32(rows[i]) - np.uint32(first))  # Why unsigned: negative ones are too large
                if at_row >= end - first:
                    return -1
                length, count = np.uint32(lengths[first + at_row]), np.float64(counts[i])
                if length >= norms.shape[0]:
                    return -1
                sums[at_row] += weight * count / (count + norms[length])
        for place in range(end - first if touched else 0):
            if sums[place] > 0.0:
                if allowed.shape[0] == 0 or allowed[first + place]:
                    found_rows[found], found_scores[found] = first + place, sums[place]
                    found += 1
                sums[place] = 0.0
    return found


def _fit_together(arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether compiled code will stay inside the arrays."""
    if not all(a.ndim == 1 and a.dtype.str[1:] in k.split() for a, k in zip(arrays, _KINDS, strict=True)):
        return False
    terms, term_offsets, offsets, rows, counts, lengths = arrays
    return bool(
        len(term_offsets) == len(offsets) > 0
        and term_offsets[-1] == len(terms)
        and offsets[0] == 0
        and offsets[-1] == len(rows) == len(counts)
        and np.all(offsets[:-1] < offsets[1:])
        and rows[offsets[1:] - 1].max(initial=-1) < len(lengths)  # the last row of a term is its greatest
    )


class _Terms:
    """Sorted terms as stored on disk. A binary search takes a few microseconds and needs no table."""

    def __init__(self, raw: NDArray[np.uint8], offsets: Ints) -> None:
        self._raw = raw.data
        self._offsets = offsets.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[str]:
        raw, offsets = bytes(self._raw), self._offsets.tolist()
        return (str(raw[begin:end], "utf-8") for begin, end in pairwise(offsets))

    def encoded(self, at: int) -> bytes:
        return bytes(self._raw[self._offsets[at] : self._offsets[at + 1]])

    def find(self, term: str) -> int | None:
        wanted = term.encode("utf-8")
        at = bisect_left(range(len(self)), wanted, key=self.encoded)
        return at if at < len(self) and self.encoded(at) == wanted else None


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
        """Append the rows `kept_rows` of a segment as the next rows, as if their texts had been added anew.

        Shapes: kept_rows [<= K of the segment] int64, strictly ascending.
        """
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
