"""Metadata of many documents as columns: for each key, the distinct values and the documents that hold them.

>>> metadata_columns(['{"year": 2024}', '{"year": 2023, "tags": ["a"]}'])["year", "number", False].codes
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Mask = NDArray[np.bool_]

KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "number", float: "number"}
"""A value compares only with values of its kind."""


class ColumnValues(NamedTuple):
    """Values of one key and kind: for each entry its row and the code of its value. Shapes: rows and codes [entries] int32."""

    codes_by_value: dict[Any, int]
    rows: NDArray[np.int32]
    codes: NDArray[np.int32]

    def mark(self, mask: Mask, is_wanted: Mask) -> None:
        """Shapes: mask [num_documents], is_wanted [distinct values]."""
        mask[self.rows[is_wanted[self.codes]]] = True


Columns = dict[tuple[str, str, bool], ColumnValues]
"""Columns by key, kind, and whether the values are elements of lists. 1 and 1.0 are one value, as in a dict."""


def text_column(texts: Any) -> ColumnValues:
    """One text per document. `texts`: a sequence or an Arrow array."""
    array_ = texts if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.string())
    encoded = (array_.combine_chunks() if isinstance(array_, pa.ChunkedArray) else array_).dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    values = {value: code for code, value in enumerate(encoded.dictionary.to_pylist())}
    return ColumnValues(values, np.arange(len(codes), dtype=np.int32), codes)


def metadata_columns(metadata_json: Any) -> Columns:
    """The columns of every key. A key that few documents hold takes little memory."""
    codes_by_value: defaultdict[tuple[str, str, bool], dict[Any, int]] = defaultdict(dict)
    entries: defaultdict[tuple[str, str, bool], tuple[array[int], array[int]]]
    entries = defaultdict(lambda: (array("i"), array("i")))
    texts = metadata_json.to_pylist() if hasattr(metadata_json, "to_pylist") else metadata_json
    for row, text in enumerate(texts):
        for key, found in json.loads(text).items():
            in_list = isinstance(found, list)
            for value in found if in_list else (found,):
                kind = KINDS.get(type(value))
                if kind:  # null, objects and lists of lists equal nothing
                    codes = codes_by_value[key, kind, in_list]
                    rows, codes_of_rows = entries[key, kind, in_list]
                    rows.append(row)
                    codes_of_rows.append(codes.setdefault(value, len(codes)))
    return {
        name: ColumnValues(codes_by_value[name], np.array(rows, np.int32), np.array(codes, np.int32))
        for name, (rows, codes) in entries.items()
    }
