"""Several segments become one: the documents that are there, with the vectors and postings they have. Nothing is encoded or
analysed again, so scores stay what they were, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.segment import SegmentWriter
from ragspec.retrieval.index.store import LiveSegment
from ragspec.retrieval.search.bm25_builder import merge_postings

_VECTORS_AT_ONCE = 65_536


def merge_segments(sources: Sequence[LiveSegment], writer: SegmentWriter) -> None:
    """Fill `writer` with the live documents of `sources`, in order, and finish it. Raises: OSError."""
    kept = [np.flatnonzero(live.live_rows()) for live in sources]
    for live, rows in zip(sources, kept, strict=True):
        numbers = np.cumsum(live.is_live) - 1 + writer.num_documents  # of each old document in the new segment
        passages = live.segment.passages.filter(pa.array(live.live_rows()))
        renumbered = pa.array(numbers[passages["document"].to_numpy()], pa.int64())
        writer.append(_documents(live), passages.set_column(0, "document", renumbered), _blocks(live, rows))
    writer.finish(merge_postings([live.segment.postings for live in sources], kept))


def bins(sources: Sequence[LiveSegment], max_passages: int) -> list[list[int]]:
    """Which segments to merge with which, in order, so that none of the results has more than `max_passages`."""
    found: list[list[int]] = []
    room = 0
    for number, live in enumerate(sources):
        size = live.num_live_passages
        if size > room or not found:
            found.append([])
            room = max_passages
        found[-1].append(number)
        room -= size
    return found


def _documents(live: LiveSegment) -> pa.Table:
    return live.segment.documents.filter(pa.array(live.is_live))


def _blocks(live: LiveSegment, rows: NDArray[np.int64]) -> Iterator[FloatArray]:
    for first in range(0, len(rows), _VECTORS_AT_ONCE):
        yield live.segment.vectors[rows[first : first + _VECTORS_AT_ONCE]]
