"""Metadata filters, evaluated before a search.

The JSON form is the form of OpenAI's vector stores, with `not` added:

    {"type": "and", "filters": [{"type": "gte", "key": "year", "value": 2020},
                                {"type": "not", "filter": {"type": "in", "key": "tag", "value": ["draft", "old"]}}]}

A key is a key of the metadata, or document.id, document.title or document.source. Numbers compare with numbers and strings with
strings, character by character, so ISO dates compare as dates; 1 equals 1.0 but not true. A list matches `eq` and `in` by its
elements. `ne`, `nin` and `not` are negations: they hold where a key is missing or of another type; nothing else does.

    >>> columns.matches(parse_filter({"type": "eq", "key": "lang", "value": "en"}))    # [num_documents] bool
"""

from __future__ import annotations

import functools
import json
import math
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from ragspec.config import ConfigSection
from ragspec.errors import InputError, did_you_mean

Mask = NDArray[np.bool_]

KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "number", float: "number"}
"""A value compares only with values of its kind."""


class Column:
    """The rows in which each value stands.

    `values` ascend; the rows of value i are `rows[starts[i]:starts[i + 1]]`.
    Shapes: starts int64 [values + 1], rows int32 [places].
    """

    def __init__(self, numbers: Mapping[Any, int], found: array[int], rows: array[int]) -> None:
        """`numbers`: of each value. `found`: the number of the value of each place, in `rows`."""
        self.values = sorted(numbers)
        order = np.array([numbers[value] for value in self.values])
        places = np.frombuffer(found, np.intc)
        self.starts = np.concatenate([[0], np.bincount(places)[order].cumsum()])
        self.rows = np.frombuffer(rows, np.intc)[np.argsort(np.argsort(order)[places], kind="stable")]

    def rows_where(self, comparison: str, value: Any) -> NDArray[np.intc]:
        """`comparison`: gt, gte, lt or lte; equality for all others."""
        low, high, end = self.starts[[bisect_left(self.values, value), bisect_right(self.values, value), -1]]
        ranges = {"gt": (high, end), "gte": (low, end), "lt": (0, low), "lte": (0, high)}
        return self.rows[slice(*ranges.get(comparison, (low, high)))]


Columns: TypeAlias = dict[tuple[str, str, bool], Column]
"""By key, kind, and whether the values stand in lists."""


def columns_of(fields: Iterable[Mapping[str, Any]]) -> Columns:
    """The columns of every key of the documents' fields. A key that few documents hold takes little memory."""
    columns: defaultdict[tuple[str, str, bool], tuple[dict[Any, int], array[int], array[int]]]
    columns = defaultdict(lambda: ({}, array("i"), array("i")))
    for row, own in enumerate(fields):
        for key, found in own.items():
            in_list = isinstance(found, list)
            for value in found if in_list else (found,):
                kind = KINDS.get(type(value))
                if kind and value == value:  # null, NaN, objects and lists of lists equal nothing
                    numbers, places, rows = columns[key, kind, in_list]
                    places.append(numbers.setdefault(value, len(numbers)))
                    rows.append(row)
    return {name: Column(*columns.pop(name)) for name in [*columns]}


MAX_DEPTH = 32
MAX_NODES = 1_000
MAX_VALUES = 10_000

_TYPES = ("eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or", "not")
_ORDERINGS = ("gt", "gte", "lt", "lte")
_NO_FILTER = ("union_tag_invalid", "union_tag_not_found", "model_attributes_type")
"""Types of pydantic's errors for a value that is not an object with a known `type`."""
_MASKS_KEPT = 32
_ROWS_AT_ONCE = 4096


class _FilterNode(ConfigSection):
    """Filters are equal if their texts are. Why: filters for 1 and for True would be equal, also as keys of a cache."""

    @functools.cached_property
    def text(self) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FilterNode) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class ComparisonFilter(_FilterNode):
    """One key against one value, or against a list of them for `in` and `nin`."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str = Field(min_length=1)
    value: Any

    @field_validator("value", mode="before")
    @classmethod
    def _freeze(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _check_value(self) -> ComparisonFilter:
        wants_list = self.type in ("in", "nin")
        if isinstance(self.value, tuple) != wants_list:
            raise ValueError(f"{self.type} compares with {'a list of values' if wants_list else 'one value'}")
        for value in self.values:
            if type(value) not in KINDS:
                raise ValueError(f"a value must be a string, a number or a boolean, not {type(value).__name__}")
            if not isinstance(value, str) and not _is_finite(value):
                raise ValueError("a number must be finite, and at most 1.8e308")
            if isinstance(value, bool) and self.type in _ORDERINGS:
                raise ValueError(f"{self.type} compares numbers or strings, not booleans")
        return self

    @property
    def values(self) -> tuple[Any, ...]:
        return self.value if isinstance(self.value, tuple) else (self.value,)


class CompoundFilter(_FilterNode):
    """Holds if all filters hold (`and`), or at least one of them (`or`)."""

    type: Literal["and", "or"]
    filters: tuple[Filter, ...] = Field(min_length=1, strict=False)


class NotFilter(_FilterNode):
    """Holds where the filter does not hold."""

    type: Literal["not"]
    filter: Filter


Filter = Annotated[ComparisonFilter | CompoundFilter | NotFilter, Field(discriminator="type")]
CompoundFilter.model_rebuild()
NotFilter.model_rebuild()
_ADAPTER: TypeAdapter[Filter] = TypeAdapter(Filter)


def parse_filter(value: Mapping[str, Any]) -> Filter:
    """The filter that a JSON object describes.

    Raises: InputError with the place and the reason, also for a filter too deep or too large.
    """
    _check_size(value)
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as cause:
        first = cause.errors(include_input=False, include_url=False)[0]
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] in _NO_FILTER:
            reason = f"a filter is an object whose type is one of {', '.join(_TYPES)}"
            reason += did_you_mean(first.get("ctx", {}).get("tag", ""), _TYPES)
        raise InputError(f"{_place(first)}: {reason}") from cause


def _check_size(value: Any) -> None:
    """Without recursion: a deep filter would exhaust the stack, here or in the validation after it."""
    num_nodes, num_values = 1, 0
    left = [(value, 1)]
    while left:
        node, depth = left.pop()
        if not isinstance(node, Mapping):
            continue
        several, one, values = node.get("filters"), node.get("filter"), node.get("value")
        below = list(several) if isinstance(several, list | tuple) else []
        below += [] if one is None else [one]
        num_nodes += len(below)
        num_values += len(values) if isinstance(values, list | tuple) else 1
        if below and depth == MAX_DEPTH:
            raise InputError(f"the filter is more than {MAX_DEPTH} levels deep")
        if num_nodes > MAX_NODES or num_values > MAX_VALUES:
            raise InputError(f"the filter has more than {MAX_NODES} parts or {MAX_VALUES} values")
        left += [(child, depth + 1) for child in below]


def _place(error: ErrorDetails) -> str:
    """`filter.filters[0].value`: pydantic's location without the tags of the union."""
    *above, last = error["loc"] or ("",)
    steps = [step for step in above if step not in _TYPES]
    if last not in ("", *_TYPES) or error["type"] == "extra_forbidden":
        steps.append(last)
    return "filter" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


_TEXTS = {f"document.{name}": name for name in ("id", "title", "source")}
"""Columns of the documents' table, by the keys of filters."""


class DocumentColumns:
    """The documents of one segment as columns. Safe to call from several threads.

    Columns are built on first use; a comparison looks up its rows; recent masks are cached.
    """

    def __init__(self, documents: pa.Table) -> None:
        """`documents`: with the columns id, title, source and metadata (JSON)."""
        self._documents = documents
        self._read: dict[str, Columns] = {}  # by the name of a text; those of the metadata by ""
        self.matches = lru_cache(_MASKS_KEPT)(self._mask_of)
        self._lock = threading.Lock()

    def _mask_of(self, filter: Filter) -> Mask:
        """Which documents the filter holds for. Shapes: returns [num_documents] bool, read-only."""
        mask = self._evaluate(filter)
        mask.flags.writeable = False
        return mask

    def _evaluate(self, filter: Filter) -> Mask:
        if isinstance(filter, NotFilter):
            return ~self._evaluate(filter.filter)
        if isinstance(filter, CompoundFilter):
            combine = np.logical_and if filter.type == "and" else np.logical_or
            return functools.reduce(combine, map(self._evaluate, filter.filters))
        columns, mask = self._columns(filter.key), np.zeros(len(self._documents), np.bool_)
        for value in filter.values:
            for in_list in (False,) if filter.type in _ORDERINGS else (False, True):
                if column := columns.get((filter.key, KINDS[type(value)], in_list)):
                    mask[column.rows_where(filter.type, value)] = True
        return ~mask if filter.type in ("ne", "nin") else mask

    def _columns(self, key: str) -> Columns:
        name = _TEXTS.get(key, "")
        with self._lock:
            if name not in self._read:
                batches = _batches(self._documents[name or "metadata"])
                parsed = (json.loads(f"[{','.join(texts)}]") for texts in batches)
                fields = ({key: text} for texts in batches for text in texts) if name else chain.from_iterable(parsed)
                self._read[name] = columns_of(fields)
            return self._read[name]


def _batches(texts: pa.ChunkedArray) -> Iterator[list[str]]:
    """Few texts at a time: all of them as Python's strings take several times the memory."""
    for first in range(0, len(texts), _ROWS_AT_ONCE):
        yield texts.slice(first, _ROWS_AT_ONCE).to_pylist()
