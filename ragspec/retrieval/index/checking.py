"""What hashes cannot tell: whether the files of a segment make sense together. For `ragspec index verify`."""

from __future__ import annotations

import numpy as np

from ragspec.errors import StoreCorrupt
from ragspec.retrieval.index.content_key import document_key, text_key
from ragspec.retrieval.index.segment import IndexSegment

_ROWS_AT_ONCE = 65_536
_MAX_NORM_ERROR = 1e-3


def check_segment(segment: IndexSegment) -> None:
    """Vectors are unit vectors, documents have the keys that were recorded, passages are slices of their documents.

    Raises: StoreCorrupt with the first thing that is wrong.
    """
    _check_vectors(segment)
    rows_seen = 0
    for number in range(segment.record.num_documents):
        document = segment.document(number)
        recorded = (segment.documents["key"][number].as_py(), segment.documents["text_key"][number].as_py())
        if recorded != (document_key(document), text_key(document)):
            raise StoreCorrupt(f"{segment.folder}: document {document.id!r} is not the one that was indexed")
        rows = segment.rows_of(number)
        rows_seen += len(rows)
        for row in rows:
            passage = segment.passage(row)
            if passage.text != document.text[passage.start : passage.end]:
                raise StoreCorrupt(f"{segment.folder}: passage {passage.id} is no part of its document")
    if rows_seen != segment.record.num_passages:
        raise StoreCorrupt(
            f"{segment.folder}: {segment.record.num_passages - rows_seen} passages belong to no document"
        )


def _check_vectors(segment: IndexSegment) -> None:
    for first in range(0, segment.record.num_passages, _ROWS_AT_ONCE):
        norms = np.linalg.norm(segment.vectors[first : first + _ROWS_AT_ONCE], axis=1)
        if not np.all(np.abs(norms - 1.0) < _MAX_NORM_ERROR):
            row = first + int(np.argmax(~(np.abs(norms - 1.0) < _MAX_NORM_ERROR)))
            raise StoreCorrupt(f"{segment.folder}: the vector of passage {segment.passage(row).id} has not length 1")
