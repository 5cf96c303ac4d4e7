"""/v1/vector_stores: sets of files that are searched together. Owns the routes; `Library` does the work."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from fastapi import APIRouter, Query

from ragspec.errors import NotFound
from ragspec.retrieval.search.filters import ComparisonFilter, CompoundFilter, parse_filter
from ragspec.retrieval.search.segment_search import SearchScope
from services.backend import ServiceBackend
from services.stores.parsing import STORE
from services.stores.records import StoreRecord
from services.stores.schemas import (
    Fields,
    MemberChange,
    MemberQuery,
    Name,
    NewBatch,
    NewMember,
    NewStore,
    SearchBody,
    StoreChange,
    StoreQuery,
    Tenant,
    batch_object,
    deleted,
    member_object,
    merged,
    result_object,
    store_object,
)


def routes(backend: ServiceBackend) -> APIRouter:
    router = APIRouter(prefix="/v1/vector_stores")
    _add_stores(router, backend)
    _add_members(router, backend)
    _add_batches(router, backend)
    _add_search(router, backend)
    return router


def _add_stores(router: APIRouter, backend: ServiceBackend) -> None:
    library = backend.library

    def shape(store: StoreRecord) -> Fields:
        return store_object(store, library.members(store.tenant, store.id))

    @router.post("")
    def create(tenant: Tenant, body: NewStore) -> Fields:
        store = library.create_store(tenant, body.name or "", body.metadata, body.file_ids)
        return shape(store)

    @router.get("")
    def stores(tenant: Tenant, query: Annotated[StoreQuery, Query()]) -> Fields:
        return query.page(library.stores(tenant), shape, lambda store: (store.created_s, store.id))

    @router.get("/{store_id}")
    def store(tenant: Tenant, store_id: Name) -> Fields:
        return shape(library.store(tenant, store_id))

    @router.post("/{store_id}")
    def change(tenant: Tenant, store_id: Name, body: StoreChange) -> Fields:
        return shape(library.change_store(tenant, store_id, body.name, body.metadata))

    @router.delete("/{store_id}")
    async def delete(tenant: Tenant, store_id: Name) -> Fields:
        await library.delete_store(tenant, store_id)
        return deleted("vector_store.deleted", store_id)


def _add_members(router: APIRouter, backend: ServiceBackend) -> None:
    library = backend.library

    @router.post("/{store_id}/files")
    def attach(tenant: Tenant, store_id: Name, body: NewMember) -> Fields:
        return member_object(library.attach(tenant, store_id, body.file_id, body.attributes or {}))

    @router.get("/{store_id}/files")
    def members(tenant: Tenant, store_id: Name, query: Annotated[MemberQuery, Query()]) -> Fields:
        found = [each for each in library.members(tenant, store_id) if query.filter in ("", each.status)]
        return query.page(found, member_object, lambda member: (member.created_s, member.file))

    @router.get("/{store_id}/files/{file_id}")
    def member(tenant: Tenant, store_id: Name, file_id: Name) -> Fields:
        return member_object(library.member(tenant, store_id, file_id))

    @router.post("/{store_id}/files/{file_id}")
    def change(tenant: Tenant, store_id: Name, file_id: Name, body: MemberChange) -> Fields:
        """Indexes the file again with the new attributes. Unchanged passages keep their vectors."""
        library.member(tenant, store_id, file_id)
        return member_object(library.attach(tenant, store_id, file_id, body.attributes or {}))

    @router.delete("/{store_id}/files/{file_id}")
    async def detach(tenant: Tenant, store_id: Name, file_id: Name) -> Fields:
        await library.detach(tenant, store_id, file_id)
        return deleted("vector_store.file.deleted", file_id)


def _add_batches(router: APIRouter, backend: ServiceBackend) -> None:
    library = backend.library

    @router.post("/{store_id}/file_batches")
    def attach_all(tenant: Tenant, store_id: Name, body: NewBatch) -> Fields:
        return batch_object(library.attach_all(tenant, store_id, body.attributes_by_file()))

    @router.get("/{store_id}/file_batches/{batch_id}")
    def batch(tenant: Tenant, store_id: Name, batch_id: Name) -> Fields:
        return batch_object(library.batch(tenant, store_id, batch_id))

    @router.get("/{store_id}/file_batches/{batch_id}/files")
    def members(tenant: Tenant, store_id: Name, batch_id: Name, query: Annotated[MemberQuery, Query()]) -> Fields:
        found = [each for each in library.batch(tenant, store_id, batch_id) if query.filter in ("", each.status)]
        return query.page(found, member_object, lambda member: (member.created_s, member.file))


def _add_search(router: APIRouter, backend: ServiceBackend) -> None:
    library, retriever = backend.library, backend.config.retriever

    @router.post("/{store_id}/search")
    def search(tenant: Tenant, store_id: Name, body: SearchBody) -> Fields:
        library.store(tenant, store_id)
        in_store: Any = ComparisonFilter(type="eq", key=STORE, value=store_id)
        if body.filters is not None:
            in_store = CompoundFilter(type="and", filters=(in_store, parse_filter(body.filters)))
        queries = [body.query] if isinstance(body.query, str) else body.query
        found = backend.retriever.retrieve(queries, body.max_num_results, SearchScope(tenant, in_store))
        threshold = body.ranking_options.score_threshold if body.ranking_options else 0.0
        data = []
        for passage, score in merged(found.passages, retriever)[: body.max_num_results]:
            file_id = passage.document_id.split(":")[1]
            with contextlib.suppress(NotFound):  # it was deleted meanwhile
                member, file = library.member(tenant, store_id, file_id), library.file(tenant, file_id)
                if score >= threshold:
                    data.append(result_object(passage, file.filename, member.attributes, score))
        return {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": data,
            "has_more": False,
            "next_page": None,
        }
