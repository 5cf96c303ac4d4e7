"""The library's records as OpenAI's objects, and lists of them in pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ragspec.core import Passage
from ragspec.errors import InputError
from services.stores.records import FileRecord, Member, StoreRecord

T = TypeVar("T")

Fields = dict[str, Any]

MODE_BEST = {"hybrid": 2 / 61}
"""The best score there is: first in both rankings."""


def file_object(file: FileRecord) -> Fields:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def store_object(store: StoreRecord, members: Sequence[Member]) -> Fields:
    names = ("in_progress", "completed", "failed", "cancelled")
    counts = {name: sum(member.status == name for member in members) for name in names}
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": int(store.created_s),
        "last_active_at": int(store.used_s),
        "name": store.name,
        "metadata": dict(store.metadata),
        "status": "in_progress" if counts["in_progress"] else "completed",
        "usage_bytes": sum(member.num_bytes for member in members),
        "file_counts": {**counts, "total": len(members)},
    }


def member_object(member: Member) -> Fields:
    error = {"code": member.code, "message": member.message} if member.code else None
    return {
        "id": member.file,
        "object": "vector_store.file",
        "created_at": int(member.created_s),
        "vector_store_id": member.store,
        "status": member.status,
        "last_error": error,
        "usage_bytes": member.num_bytes,
        "attributes": dict(member.attributes),
        "chunking_strategy": {"type": "other"},
    }


def result_object(passage: Passage, filename: str, attributes: Mapping[str, Any], score: float) -> Fields:
    return {
        "file_id": passage.document_id.split(":")[1],
        "filename": filename,
        "score": score,
        "attributes": dict(attributes),
        "content": [{"type": "text", "text": passage.text}],
    }


def unit_score(score: float, mode: str, is_reranked: bool = False) -> float:
    """A passage's score from 0 to 1: cosine, the sum of reciprocal ranks as a part of the highest there is, or s / (1 + s).

    A reranker's is a logit: the logistic function of it.
    """
    if is_reranked:
        return 0.5 * (1.0 + math.tanh(0.5 * score))
    if mode == "sparse":
        return max(score, 0.0) / (1.0 + max(score, 0.0))
    return min(max(score / MODE_BEST.get(mode, 1.0), 0.0), 1.0)


def deleted(kind: str, name: str) -> Fields:
    return {"id": name, "object": kind, "deleted": True}


def page(
    records: Sequence[T],
    shape: Callable[[T], Fields],
    key: Callable[[T], tuple[float, str]],
    *,
    limit: int,
    order: Literal["asc", "desc"],
    after: str = "",
    before: str = "",
) -> Fields:
    """A part of a list in the order of `key`, creation and id; behind `after` or up to `before`.

    Raises: InputError for an id that is not in the list.
    """
    ordered = sorted(records, key=key, reverse=order == "desc")
    ids = [key(record)[1] for record in ordered]
    for cursor in filter(None, (after, before)):
        if cursor not in ids:
            raise InputError(f"there is no {cursor!r} in this list")
    first = ids.index(after) + 1 if after else 0
    end = ids.index(before) if before else len(ids)
    first = max(first, end - limit) if before and not after else first
    data = [shape(record) for record in ordered[first : min(end, first + limit)]]
    has_more = first > 0 if before and not after else first + limit < end
    names = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **names, "has_more": has_more}
