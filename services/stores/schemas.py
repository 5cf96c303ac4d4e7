"""Request bodies, query parameters and response objects of files, documents, vector stores and conversations.

Owns the fields of OpenAI's API for them. Unknown fields of bodies are refused. Never touches a store.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Request
from pydantic import AfterValidator, BaseModel, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from ragspec.config import RetrieverConfig
from ragspec.core import Passage
from ragspec.errors import InputError
from ragspec.rag.chat.conversations import Conversation
from ragspec.retrieval.search.relevance import RANK_OFFSET, unit_relevance
from services.limits import RequestBody, at_most
from services.stores.records import FileRecord, StoreMember, StoreRecord
from services.stores.uploads import FILE, STORE

T = TypeVar("T")
_MAX_KEYS = 16
"""Keys of attributes or metadata, as in OpenAI's API."""
Fields = dict[str, Any]


def _check_keys(fields: Fields) -> Fields:
    """Refuses the keys of a document's metadata that the service sets."""
    for key in {STORE, FILE} & fields.keys():
        raise PydanticCustomError("reserved", "the key {key} is the service's", {"key": key})
    return fields


Key = Annotated[str, Field(min_length=1, max_length=64)]
Text = Annotated[StrictStr, Field(max_length=512)]
Attributes = Annotated[
    dict[Key, Text | StrictBool | StrictInt | StrictFloat], at_most(_MAX_KEYS), AfterValidator(_check_keys)
]
Metadata = Annotated[dict[Key, Text], at_most(_MAX_KEYS), AfterValidator(_check_keys)]
Name = Annotated[str, Field(max_length=256)]


async def _tenant(request: Request) -> str:
    return str(request.state.caller.tenant)


Tenant = Annotated[str, Depends(_tenant)]
"""The caller's tenant, as a parameter of a route."""


class Chunking(RequestBody):
    """Only "auto": the index's settings cut all documents, so that their passages are comparable."""

    type: Literal["auto"]


class StoreChange(RequestBody):
    """`expires_after` can only be null: stores stay until they are deleted."""

    name: Name | None = None
    metadata: Metadata | None = None
    expires_after: None = None


class NewStore(StoreChange):
    description: Name | None = None
    file_ids: Annotated[list[Name], at_most(500)] = Field(default=[], max_length=500)
    chunking_strategy: Chunking | None = None


class NewMember(RequestBody):
    file_id: Name
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class NewBatch(RequestBody):
    """Either `file_ids`, which share `attributes`, or `files`, each with its own."""

    file_ids: Annotated[list[Name], at_most(500)] = Field(default=[], max_length=500)
    files: Annotated[list[NewMember], Field(fail_fast=True), at_most(500)] = Field(default=[], max_length=500)
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None

    def attributes_by_file(self) -> dict[str, Any]:
        """Attributes by file id. Raises: InputError without a file, or with both lists."""
        if bool(self.file_ids) == bool(self.files):
            raise InputError("a batch has files: either 'file_ids' or 'files' names them")
        own = {member.file_id: member.attributes or {} for member in self.files}
        return own or dict.fromkeys(self.file_ids, self.attributes or {})


class MemberChange(RequestBody):
    attributes: Attributes | None


class RankingOptions(RequestBody):
    """`ranker` is accepted and ignored: the index has one."""

    ranker: str | None = None
    score_threshold: float = Field(0.0, ge=0.0, le=1.0)


class SearchBody(RequestBody):
    """`rewrite_query` is accepted and ignored: single questions are not rewritten."""

    query: (
        Annotated[str, Field(max_length=4096)] | Annotated[list[str], at_most(16), Field(min_length=1, max_length=16)]
    )
    filters: dict[str, Any] | None = None
    max_num_results: int = Field(10, ge=1, le=50)
    ranking_options: RankingOptions | None = None
    rewrite_query: bool = False


class ContentPart(RequestBody):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default=[])
    logprobs: list[Any] = Field(default=[])


class ConversationItem(RequestBody):
    """`id` and `status` are ignored: items that a service answered with are sent back."""

    id: Name | None = None
    status: Name | None = None
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True), at_most(100)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class NewConversation(RequestBody):
    items: Annotated[list[ConversationItem], at_most(100)] | None = Field(None, max_length=100)
    metadata: Metadata | None = None


class ConversationChange(RequestBody):
    metadata: Metadata


class FeedbackBody(RequestBody):
    """`rating` null takes the feedback back."""

    rating: Literal["up", "down"] | None
    note: Annotated[str, Field(max_length=4000)] = ""


class SpanQuery(BaseModel):
    """A document, and a span of its text in characters."""

    id: Annotated[str, Field(min_length=1, max_length=4096)]
    start: int = Field(0, ge=0, le=2**40)
    end: int = Field(0, ge=0, le=2**40)


class PageQuery(BaseModel):
    """Query parameters of a list. `after` and `before` are ids; `before` is for vector stores and their files."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: Name = ""

    def page(self, records: Sequence[T], shape: Callable[[T], Fields], key: Callable[[T], tuple[float, str]]) -> Fields:
        """A page of the records, ordered by `key` (time of creation, id). Raises: InputError for an unknown id."""
        ordered = sorted(records, key=key, reverse=self.order == "desc")
        ids, before = [key(record)[1] for record in ordered], getattr(self, "before", "")
        for cursor in filter(None, (self.after, before)):
            if cursor not in ids:
                raise InputError(f"there is no {cursor!r} in this list")
        first = ids.index(self.after) + 1 if self.after else 0
        between = ordered[first : ids.index(before) if before else len(ids)]
        is_backwards = before and not self.after
        data = [shape(record) for record in (between[-self.limit :] if is_backwards else between[: self.limit])]
        names = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return {"object": "list", "data": data, **names, "has_more": len(between) > self.limit}


class ItemQuery(PageQuery):
    """`include`: with the passages, citations and feedback of stored answers."""

    include: Literal["", "ragspec"] = ""


class ListingQuery(BaseModel):
    offset: int = Field(0, ge=0)
    limit: int = Field(100, ge=1, le=1000)


class FileQuery(PageQuery):
    limit: int = Field(10_000, ge=1, le=10_000)
    purpose: str = Field("", max_length=64)


class StoreQuery(PageQuery):
    before: Name = ""


class MemberQuery(StoreQuery):
    """`filter`: a status."""

    filter: str = ""


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


def _progress(members: Sequence[StoreMember]) -> Fields:
    names = ("in_progress", "completed", "failed", "cancelled")
    counts = {name: sum(member.status == name for member in members) for name in names}
    status = "in_progress" if counts["in_progress"] else "completed"
    return {"status": status, "file_counts": {**counts, "total": len(members)}}


def store_object(store: StoreRecord, members: Sequence[StoreMember]) -> Fields:
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": int(store.created_s),
        "last_active_at": int(store.used_s),
        "name": store.name,
        "metadata": dict(store.metadata),
        "usage_bytes": sum(member.num_bytes for member in members),
        **_progress(members),
    }


def batch_object(members: Sequence[StoreMember]) -> Fields:
    """`members`: at least one, all of the same batch."""
    return {
        "id": members[0].batch_id,
        "object": "vector_store.files_batch",
        "created_at": int(members[0].created_s),
        "vector_store_id": members[0].store,
        **_progress(members),
    }


def member_object(member: StoreMember) -> Fields:
    return {
        "id": member.file,
        "object": "vector_store.file",
        "created_at": int(member.created_s),
        "vector_store_id": member.store,
        "status": member.status,
        "last_error": {"code": member.code, "message": member.message} if member.code else None,
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


def merged(rankings: Sequence[Sequence[Passage]], retriever: RetrieverConfig) -> list[tuple[Passage, float]]:
    """The passages of several queries by the sum of their reciprocal ranks, each with its best score, scaled to [0, 1].

    Why not by score: the relevance of a passage compares with that of others for the same query.
    """
    sums, best = defaultdict[str, float](float), dict[str, Passage]()
    for passages in rankings:
        for rank, passage in enumerate(passages, 1):
            sums[passage.id] += 1.0 / (RANK_OFFSET + rank)
            best[passage.id] = max(passage, best.get(passage.id, passage), key=lambda each: each.score)
    ranked = sorted(best.values(), key=lambda each: (-sums[each.id], each.document_id, each.ordinal))
    return [(passage, unit_score(passage.score, retriever)) for passage in ranked]


def unit_score(score: float, retriever: RetrieverConfig) -> float:
    """A passage's score scaled to [0, 1].

    Rerankers give logits, learned fusion a relevance: a logistic function of it. Fusion by rank: the share of the best sum of
    reciprocal ranks. Sparse: s / (1 + s). Dense: the cosine.
    """
    if retriever.reranker:
        return 0.5 * (1.0 + math.tanh(0.5 * score))
    if retriever.mode == "hybrid":
        best = 2.0 / (RANK_OFFSET + 1)
        return unit_relevance(score) if retriever.fusion == "learned" else min(score / best, 1.0)
    return max(score, 0.0) / (1.0 + max(score, 0.0)) if retriever.mode == "sparse" else min(max(score, 0.0), 1.0)


def result_page(queries: Sequence[str], results: Sequence[Fields]) -> Fields:
    """All results of a search, as one page."""
    kind = "vector_store.search_results.page"
    return {"object": kind, "search_query": queries, "data": results, "has_more": False, "next_page": None}


def conversation_object(conversation: Conversation, ttl_s: float) -> Fields:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_s),
        "metadata": dict(conversation.metadata),
        "last_active_at": int(conversation.used_s),
        "expires_at": int(conversation.used_s + ttl_s),
    }


def item_id(conversation: str, number: int) -> str:
    """Ids sort as the numbers do."""
    return f"msg_{conversation.removeprefix('conv_')}_{number:06d}"


def number_of(item: str) -> int:
    """The number of an item in its conversation; 0 for an id without one."""
    digits = item.rpartition("_")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() else 0


def conversation_item(conversation: str, number: int, text: str) -> Fields:
    """Item `number` of a stored conversation. Even items are the user's."""
    role, kind = ("assistant", "output_text") if number % 2 else ("user", "input_text")
    part: Fields = {"type": kind, "text": text} | ({"annotations": []} if number % 2 else {})
    item = {"id": item_id(conversation, number), "type": "message", "status": "completed"}
    return item | {"role": role, "content": [part]}


def deleted(kind: str, name: str) -> Fields:
    return {"id": name, "object": kind, "deleted": True}
