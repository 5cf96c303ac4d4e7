"""Filters: what they mean, read one document at a time; and what is refused with a reason."""

import json
import math
import operator
import tracemalloc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrieval.search import filters
from ragspec.retrieval.search.filters import MAX_DEPTH, MAX_NODES, MAX_VALUES, DocumentColumns, parse_filter

Json = dict[str, Any]

scalars = st.one_of(
    st.sampled_from([0, 1, -1, 2**53, 2**53 + 1, 1.0, 0.0, -0.0, 0.5, float(2**53), 10**300, "", "1", "a", "ä", "2024-05-01"]),
    st.booleans(),
)  # fmt: skip
fields = st.one_of(
    scalars,
    st.none(),
    st.lists(st.one_of(scalars, st.none(), st.lists(scalars, max_size=1)), max_size=3),
    st.dictionaries(st.sampled_from("xy"), scalars, max_size=1),
)
COLUMNS = ["id", "title", "source", "metadata"]
KEYS = ["x", "y", "z", "document.id", "document.title", "document.source"]
documents = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(["", "a", "1"]),
        st.dictionaries(st.sampled_from(["x", "y", "document.id"]), fields),
    ),
    max_size=12,
)


def comparisons_of(kinds: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    kind, key = st.sampled_from(kinds.split()), st.sampled_from(KEYS)
    return st.builds(lambda t, k, v: {"type": t, "key": k, "value": v}, kind, key, values)


comparisons = st.one_of(
    comparisons_of("eq ne", scalars),
    comparisons_of("gt gte lt lte", scalars.filter(lambda value: not isinstance(value, bool))),
    comparisons_of("in nin", st.lists(scalars, max_size=4)),
)
any_filter = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds(
            lambda t, f: {"type": t, "filters": f},
            st.sampled_from(["and", "or"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda f: {"type": "not", "filter": f}, inner),
    ),
    max_leaves=6,
)

ORDERINGS = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}


def same_kind(a: Any, b: Any) -> bool:
    def kind(value: Any) -> str:
        return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__

    return kind(a) == kind(b) and kind(a) in ("number", "str", "bool")


def holds(asked: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """The meaning of a filter for one document."""
    kind = asked["type"]
    if kind in ("and", "or"):
        return (all if kind == "and" else any)(holds(each, fields) for each in asked["filters"])
    if kind == "not":
        return not holds(asked["filter"], fields)
    if kind in ("ne", "nin"):
        return not holds({**asked, "type": "eq" if kind == "ne" else "in"}, fields)
    found, value = fields.get(asked["key"]), asked["value"]
    if kind in ORDERINGS:
        return same_kind(found, value) and ORDERINGS[kind](found, value)
    have = found if isinstance(found, list) else [found]
    wanted = [value] if kind == "eq" else value
    return any(same_kind(a, b) and a == b for a in have for b in wanted)


def columns(rows: list[tuple[str, str, Json]]) -> DocumentColumns:
    texts = [row[0] for row in rows], [row[1] for row in rows], ["s"] * len(rows), [json.dumps(row[2]) for row in rows]
    return DocumentColumns(pa.table([pa.array(column, pa.string()) for column in texts], COLUMNS))


def year(value: Any, kind: str = "eq") -> Json:
    return {"type": kind, "key": "year", "value": value}


def nested(depth: int) -> Json:
    one = year(1)
    for _ in range(depth - 1):
        one = {"type": "not", "filter": one}
    return one


@settings(max_examples=80, deadline=None)
@given(documents, st.lists(any_filter, min_size=1, max_size=4))
def test_masks_are_what_each_document_says(rows: list[tuple[str, str, Json]], asked: list[Json]) -> None:
    """Evaluating once per distinct value must not join 1 and True, lose list elements, or remember another filter's mask."""
    found = columns(rows)
    for one in asked * 2:
        expected = [
            holds(one, {**row[2], "document.id": row[0], "document.title": row[1], "document.source": "s"})
            for row in rows
        ]
        mask = found.matches(parse_filter(one))
        assert mask.dtype == np.bool_ and mask.tolist() == expected


@given(any_filter)
def test_a_filter_survives_its_json_form(asked: Json) -> None:
    """A filter that another process reads must be the one that was sent."""
    parsed = parse_filter(asked)
    assert repr(parse_filter(json.loads(parsed.model_dump_json()))) == repr(parsed)


def test_meanings_that_are_easily_mixed_up() -> None:
    """Each line is a document that some implementation finds or loses."""
    found = columns(
        [("a", "", {"year": v}) for v in (1, 1.0, True, "1", [1, 2], [], None, {"year": 1})] + [("a", "", {})]
    )
    assert found.matches(parse_filter(year(1))).tolist() == [True, True, False, False, True] + [False] * 4
    assert found.matches(parse_filter(year(True))).tolist() == [False, False, True] + [False] * 6
    assert found.matches(parse_filter(year(1, "ne"))).tolist() == [False, False, True, True, False] + [True] * 4
    assert found.matches(parse_filter(year([], "in"))).sum() == 0
    assert found.matches(parse_filter(year([], "nin"))).all()
    assert found.matches(parse_filter(year(0, "gt"))).tolist() == [True, True] + [False] * 7
    assert found.matches(parse_filter({"type": "eq", "key": "year.year", "value": 1})).sum() == 0
    long = columns([("a", "", {"year": 10**300}), ("a", "", {"year": 10**300 + 1})])  # neither floats nor text
    assert long.matches(parse_filter(year(10**300))).tolist() == [True, False]
    assert long.matches(parse_filter(year(1.5e308, "lt"))).all()
    dates = columns([("a", "", {"year": date}) for date in ("2023-12-31", "2024-01-01", "2024-05-01T10:00:00Z")])
    assert dates.matches(parse_filter(year("2024-01-01", "gte"))).tolist() == [False, True, True]


def test_columns_of_many_values_are_small_and_ordered() -> None:
    """Each value had an array of its own: 200 bytes beside its text. Not every number has an order."""
    rows = [
        json.dumps({"key": f"customer-{number:05d}", "year": math.nan if number else 1.0}) for number in range(20_000)
    ]
    found = DocumentColumns(pa.table([rows] * 4, COLUMNS))
    tracemalloc.start()
    mask = found.matches(parse_filter({"type": "gte", "key": "key", "value": "customer-12345"}))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert mask.sum() == 20_000 - 12_345 and held_bytes < 130 * len(rows)
    assert found.matches(parse_filter(year(0.5, "gt"))).sum() == found.matches(parse_filter(year(2, "lt"))).sum() == 1


def test_arrow_columns_give_the_same_masks() -> None:
    """An index hands over chunked arrow arrays; codes of one chunk are not those of the next."""
    ids, meta = ["d1", "d2", "d1"], ['{"year": 1}', "{}", '{"year": 2}']
    columns = ([ids[:1], ids[1:]], [["t"] * 3], [["s"] * 3], [meta[:2], meta[2:]])
    chunked = DocumentColumns(pa.table([pa.chunked_array(column) for column in columns], COLUMNS))
    of_d1 = parse_filter({"type": "eq", "key": "document.id", "value": "d1"})
    assert chunked.matches(of_d1).tolist() == [True, False, True]
    assert chunked.matches(parse_filter(year(2))).tolist() == [False, False, True]
    empty = DocumentColumns(pa.table([pa.chunked_array([], pa.string())] * 4, COLUMNS))
    for key in ("year", "document.id"):
        assert empty.matches(parse_filter({"type": "ne", "key": key, "value": "x"})).shape == (0,)


WRONG: list[Any] = json.loads(Path(__file__).with_name("wrong_filters.json").read_text(encoding="utf-8"))
"""Each with the place and the reason of its refusal."""
WRONG += [(year(value), "filter: ", "finite") for value in (float("nan"), 10**400)]
WRONG += [(year([float("inf")], "in"), "filter: ", "finite")]


@pytest.mark.parametrize(("asked", "place", "reason"), WRONG)
def test_wrong_filters_are_refused_with_place_and_reason(asked: Any, place: str, reason: str) -> None:
    """A filter that is half understood shows documents that it was meant to hide."""
    with pytest.raises(InputError, match=f"^{place}.*({reason})"):
        parse_filter(asked)


def test_filters_too_deep_or_too_large_are_refused() -> None:
    """Ten thousand brackets from outside must not end in a RecursionError, nor a thousand filters in a minute of work."""
    parse_filter(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(InputError, match="deep"):
            parse_filter(nested(depth))
    parse_filter({"type": "or", "filters": [year(1)] * (MAX_NODES - 1)})
    with pytest.raises(InputError, match="parts"):
        parse_filter({"type": "or", "filters": [year(1)] * MAX_NODES})
    parse_filter(year([1] * MAX_VALUES, "in"))
    with pytest.raises(InputError, match="values"):
        parse_filter(year([1] * (MAX_VALUES + 1), "in"))


def test_masks_are_kept_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user's filter at 100 KB a mask fills the memory; a mask that a caller may write to poisons the next request."""
    monkeypatch.setattr(filters, "_MASKS_KEPT", 2)
    found = columns([("a", "", {"year": n}) for n in range(5)])
    first = found.matches(parse_filter(year(1)))
    assert found.matches(parse_filter(year(1))) is first
    assert found.matches(parse_filter(year(1.0))) is not first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = True
    for n in range(5):
        found.matches(parse_filter(year(n)))
    assert found.matches.cache_info().currsize == 2


def test_threads_share_columns() -> None:
    """Two first requests at once must not see columns that are half built."""
    rows = [("a", "", {"year": n % 10, "tags": [n % 3, n % 7]}) for n in range(3000)]
    expected = [n % 10 == 3 for n in range(3000)]
    for _ in range(5):
        found = columns(rows)
        with ThreadPoolExecutor(8) as pool:
            masks = [pool.submit(found.matches, parse_filter(year(3))) for _ in range(16)]
            assert all(mask.result().tolist() == expected for mask in masks)
