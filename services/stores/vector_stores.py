"""/v1/vector_stores: files that are searched together."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ragspec.core import Passage
from ragspec.retrieval.search.filters import ComparisonFilter, CompoundFilter, parse_filter
from ragspec.retrieval.search.segment_search import SearchScope
from services.backend import Backend
from services.stores.bodies import (
    Cursor,
    Limit,
    MemberChange,
    NewMember,
    NewStore,
    Order,
    Search,
    StoreChange,
)
from services.stores.parsing import STORE
from services.stores.records import StoreRecord
from services.stores.shapes import Fields, deleted, member_object, page, result_object, store_object, unit_score


def routes(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/v1/vector_stores")
    _add_stores(router, backend)
    _add_members(router, backend)
    _add_search(router, backend)
    return router


def _add_stores(router: APIRouter, backend: Backend) -> None:
    library = backend.library

    def shown(store: StoreRecord) -> Fields:
        return store_object(store, library.members(store.tenant, store.id))

    @router.post("")
    def create(request: Request, body: NewStore) -> Fields:
        tenant = request.state.caller.tenant
        for file_id in body.file_ids:
            library.file(tenant, file_id)
        store = library.create_store(tenant, body.name or "", body.metadata)
        for file_id in body.file_ids:
            library.attach(tenant, store.id, file_id, {})
        return shown(store)

    @router.get("")
    def stores(
        request: Request, limit: Limit = 20, order: Order = "desc", after: Cursor = "", before: Cursor = ""
    ) -> Fields:
        found = library.stores(request.state.caller.tenant)
        return page(
            found,
            shown,
            lambda store: (store.created_s, store.id),
            limit=limit,
            order=order,
            after=after,
            before=before,
        )

    @router.get("/{store_id}")
    def store(request: Request, store_id: Cursor) -> Fields:
        return shown(library.store(request.state.caller.tenant, store_id))

    @router.post("/{store_id}")
    def change(request: Request, store_id: Cursor, body: StoreChange) -> Fields:
        return shown(library.change_store(request.state.caller.tenant, store_id, body.name, body.metadata))

    @router.delete("/{store_id}")
    def delete(request: Request, store_id: Cursor) -> Fields:
        library.delete_store(request.state.caller.tenant, store_id)
        return deleted("vector_store.deleted", store_id)


def _add_members(router: APIRouter, backend: Backend) -> None:
    library = backend.library

    @router.post("/{store_id}/files")
    def attach(request: Request, store_id: Cursor, body: NewMember) -> Fields:
        tenant = request.state.caller.tenant
        return member_object(library.attach(tenant, store_id, body.file_id, body.attributes or {}))

    @router.get("/{store_id}/files")
    def members(
        request: Request,
        store_id: Cursor,
        limit: Limit = 20,
        order: Order = "desc",
        after: Cursor = "",
        before: Cursor = "",
        filter: str = "",
    ) -> Fields:
        found = library.members(request.state.caller.tenant, store_id)
        wanted = [member for member in found if filter in ("", member.status)]
        return page(
            wanted,
            member_object,
            lambda member: (member.created_s, member.file),
            limit=limit,
            order=order,
            after=after,
            before=before,
        )

    @router.get("/{store_id}/files/{file_id}")
    def member(request: Request, store_id: Cursor, file_id: Cursor) -> Fields:
        return member_object(library.member(request.state.caller.tenant, store_id, file_id))

    @router.post("/{store_id}/files/{file_id}")
    def change(request: Request, store_id: Cursor, file_id: Cursor, body: MemberChange) -> Fields:
        """Other attributes: the file is read in again, and passages keep their vectors."""
        tenant = request.state.caller.tenant
        library.member(tenant, store_id, file_id)
        return member_object(library.attach(tenant, store_id, file_id, body.attributes or {}))

    @router.delete("/{store_id}/files/{file_id}")
    def detach(request: Request, store_id: Cursor, file_id: Cursor) -> Fields:
        library.detach(request.state.caller.tenant, store_id, file_id)
        return deleted("vector_store.file.deleted", file_id)


def _add_search(router: APIRouter, backend: Backend) -> None:
    library, retriever = backend.library, backend.config.retriever

    @router.post("/{store_id}/search")
    def search(request: Request, store_id: Cursor, body: Search) -> Fields:
        tenant = request.state.caller.tenant
        library.store(tenant, store_id)
        own: Any = ComparisonFilter(type="eq", key=STORE, value=store_id)
        if body.filters is not None:
            own = CompoundFilter(type="and", filters=(own, parse_filter(body.filters)))
        queries = [body.query] if isinstance(body.query, str) else body.query
        found = backend.retriever.retrieve(queries, body.max_num_results, SearchScope(tenant, own))
        best: dict[str, Passage] = {}
        for passage in (passage for passages in found.passages for passage in passages):
            if passage.id not in best or passage.score > best[passage.id].score:
                best[passage.id] = passage
        ranked = sorted(best.values(), key=lambda passage: (-passage.score, passage.document_id, passage.ordinal))
        threshold = body.ranking_options.score_threshold if body.ranking_options else 0.0
        best_ranked = ranked[: body.max_num_results]
        scored = [(each, unit_score(each.score, retriever.mode, bool(retriever.reranker))) for each in best_ranked]
        members = {member.file: member for member in library.members(tenant, store_id)}
        names = {file.id: file.filename for file in library.files(tenant)}
        data = [
            result_object(passage, names[file_id], members[file_id].attributes, score)
            for passage, score in scored
            if score >= threshold and (file_id := passage.document_id.split(":")[1]) in members and file_id in names
        ]
        return {
            "object": "vector_store.search_results.page",
            "search_query": queries,
            "data": data,
            "has_more": False,
            "next_page": None,
        }
