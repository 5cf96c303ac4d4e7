"""The routes of /v1/files, /v1/documents and /v1/vector_stores.

`schemas` has their fields; `Library` and `DocumentViews` do the work. Routes that wait for disks are plain functions, which
FastAPI runs in threads. Deletions wait for the index, which may take long, and hold no thread meanwhile.
"""

import contextlib
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, UploadFile
from starlette.responses import FileResponse, HTMLResponse

from ragspec.errors import NotFound
from ragspec.retrieval.search.filters import ComparisonFilter, CompoundFilter, parse_filter
from ragspec.retrieval.search.segment_search import SearchScope
from services.backend import ServiceBackend
from services.errors import ApiError
from services.stores import schemas
from services.stores.conversation_routes import add_conversations
from services.stores.document_view import POLICY
from services.stores.records import StoreMember, StoreRecord
from services.stores.schemas import Fields, Name, Tenant
from services.stores.uploads import STORE


def routes(backend: ServiceBackend) -> APIRouter:
    router = APIRouter()
    for add in (_add_files, _add_documents, _add_stores, _add_members, _add_batches, _add_search, add_conversations):
        add(router, backend)
    return router


def _add_files(router: APIRouter, backend: ServiceBackend) -> None:
    library, records = backend.library, backend.library.records

    @router.post("/v1/files")
    def upload(
        tenant: Tenant, file: UploadFile, purpose: Annotated[Literal["assistants", "user_data"], Form()]
    ) -> Fields:
        return schemas.file_object(library.upload(tenant, file.filename or "", purpose, file.file))

    @router.get("/v1/files")
    def files(tenant: Tenant, query: Annotated[schemas.FileQuery, Query()]) -> Fields:
        found = [file for file in records.files(tenant) if query.purpose in ("", file.purpose)]
        return query.page(found, schemas.file_object, lambda file: (file.created_s, file.id))

    @router.get("/v1/files/{file_id}")
    def file(tenant: Tenant, file_id: Name) -> Fields:
        return schemas.file_object(records.file(tenant, file_id))

    @router.get("/v1/files/{file_id}/content")
    def content(tenant: Tenant, file_id: Name) -> Any:
        found = records.file(tenant, file_id)
        path = library.blobs.path(found)
        if not path.is_file():
            raise ApiError(404, f"the content of {file_id!r} is gone")
        # Why never the file's own type: the browser would run an uploaded page as one of ours
        return FileResponse(path, media_type="application/octet-stream", filename=found.filename)

    @router.delete("/v1/files/{file_id}")
    async def delete(tenant: Tenant, file_id: Name) -> Fields:
        await library.delete_file(tenant, file_id)
        return schemas.deleted("file", file_id)


def _add_documents(router: APIRouter, backend: ServiceBackend) -> None:
    views = backend.documents

    @router.get("/v1/documents")
    def documents(tenant: Tenant, query: Annotated[schemas.ListingQuery, Query()]) -> Fields:
        """The documents that the caller may search, and when the index changed last."""
        rows, total = views.listing(tenant, query.offset, query.limit)
        return {"object": "list", "data": rows, "total": total, "changed_at": views.changed_at()}

    @router.get("/v1/documents/view")
    def view(tenant: Tenant, query: Annotated[schemas.SpanQuery, Query()]) -> Any:
        """A page without scripts: the document's text as it was read, with a span of it marked."""
        page = views.html(views.find(tenant, query.id), query.start, query.end)
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})

    @router.get("/v1/documents/content")
    def content(tenant: Tenant, query: Annotated[schemas.SpanQuery, Query()]) -> Any:
        """The file that the document was read from, if it is kept."""
        document = views.find(tenant, query.id)
        if (path := views.original(document)) is None:
            raise ApiError(404, f"the file of {query.id!r} is not kept")
        return FileResponse(path, media_type="application/octet-stream", filename=PurePath(document.source).name)


def _add_stores(router: APIRouter, backend: ServiceBackend) -> None:
    library, records = backend.library, backend.library.records

    def shape(store: StoreRecord) -> Fields:
        return schemas.store_object(store, records.members(store.tenant, store.id))

    @router.post("/v1/vector_stores")
    def create(tenant: Tenant, body: schemas.NewStore) -> Fields:
        return shape(library.create_store(tenant, body.name or "", body.metadata, body.file_ids))

    @router.get("/v1/vector_stores")
    def stores(tenant: Tenant, query: Annotated[schemas.StoreQuery, Query()]) -> Fields:
        return query.page(records.stores(tenant), shape, lambda store: (store.created_s, store.id))

    @router.get("/v1/vector_stores/{store_id}")
    def store(tenant: Tenant, store_id: Name) -> Fields:
        return shape(records.store(tenant, store_id))

    @router.post("/v1/vector_stores/{store_id}")
    def change(tenant: Tenant, store_id: Name, body: schemas.StoreChange) -> Fields:
        return shape(library.change_store(tenant, store_id, body.name, body.metadata))

    @router.delete("/v1/vector_stores/{store_id}")
    async def delete(tenant: Tenant, store_id: Name) -> Fields:
        await library.delete_store(tenant, store_id)
        return schemas.deleted("vector_store.deleted", store_id)


def _page_of(members: list[StoreMember], query: schemas.MemberQuery) -> Fields:
    found = [member for member in members if query.filter in ("", member.status)]
    return query.page(found, schemas.member_object, lambda member: (member.created_s, member.file))


def _add_members(router: APIRouter, backend: ServiceBackend) -> None:
    library, records = backend.library, backend.library.records

    @router.post("/v1/vector_stores/{store_id}/files")
    def attach(tenant: Tenant, store_id: Name, body: schemas.NewMember) -> Fields:
        return schemas.member_object(library.attach(tenant, store_id, body.file_id, body.attributes or {}))

    @router.get("/v1/vector_stores/{store_id}/files")
    def members(tenant: Tenant, store_id: Name, query: Annotated[schemas.MemberQuery, Query()]) -> Fields:
        return _page_of(records.members(tenant, store_id), query)

    @router.get("/v1/vector_stores/{store_id}/files/{file_id}")
    def member(tenant: Tenant, store_id: Name, file_id: Name) -> Fields:
        return schemas.member_object(records.member(tenant, store_id, file_id))

    @router.get("/v1/vector_stores/{store_id}/files/{file_id}/content")
    def content(tenant: Tenant, store_id: Name, file_id: Name) -> Fields:
        """The text as it was read and is quoted, of a table one part a row."""
        texts = backend.documents.texts(records.member(tenant, store_id, file_id))
        data = [{"type": "text", "text": text} for text in texts]
        return {"object": "vector_store.file_content.page", "data": data, "has_more": False, "next_page": None}

    @router.post("/v1/vector_stores/{store_id}/files/{file_id}")
    def change(tenant: Tenant, store_id: Name, file_id: Name, body: schemas.MemberChange) -> Fields:
        """Indexes the file again with the new attributes. Unchanged passages keep their vectors."""
        records.member(tenant, store_id, file_id)
        return schemas.member_object(library.attach(tenant, store_id, file_id, body.attributes or {}))

    @router.delete("/v1/vector_stores/{store_id}/files/{file_id}")
    async def detach(tenant: Tenant, store_id: Name, file_id: Name) -> Fields:
        await library.detach(tenant, store_id, file_id)
        return schemas.deleted("vector_store.file.deleted", file_id)


def _add_batches(router: APIRouter, backend: ServiceBackend) -> None:
    library = backend.library

    @router.post("/v1/vector_stores/{store_id}/file_batches")
    def attach_all(tenant: Tenant, store_id: Name, body: schemas.NewBatch) -> Fields:
        return schemas.batch_object(library.attach_all(tenant, store_id, body.attributes_by_file()))

    @router.get("/v1/vector_stores/{store_id}/file_batches/{batch_id}")
    def batch(tenant: Tenant, store_id: Name, batch_id: Name) -> Fields:
        return schemas.batch_object(library.records.batch(tenant, store_id, batch_id))

    @router.get("/v1/vector_stores/{store_id}/file_batches/{batch_id}/files")
    def members(
        tenant: Tenant, store_id: Name, batch_id: Name, query: Annotated[schemas.MemberQuery, Query()]
    ) -> Fields:
        return _page_of(library.records.batch(tenant, store_id, batch_id), query)


def _add_search(router: APIRouter, backend: ServiceBackend) -> None:
    records, retriever = backend.library.records, backend.config.retriever

    @router.post("/v1/vector_stores/{store_id}/search")
    def search(tenant: Tenant, store_id: Name, body: schemas.SearchBody) -> Fields:
        records.store(tenant, store_id)
        in_store: Any = ComparisonFilter(type="eq", key=STORE, value=store_id)
        if body.filters is not None:
            in_store = CompoundFilter(type="and", filters=(in_store, parse_filter(body.filters)))
        queries = [body.query] if isinstance(body.query, str) else body.query
        found = backend.retriever.retrieve(queries, body.max_num_results, SearchScope(tenant, in_store))
        threshold = body.ranking_options.score_threshold if body.ranking_options else 0.0
        results = []
        for passage, score in schemas.merged(found.passages, retriever)[: body.max_num_results]:
            file_id = passage.document_id.split(":")[1]
            with contextlib.suppress(NotFound):  # it was deleted meanwhile
                member, file = records.member(tenant, store_id, file_id), records.file(tenant, file_id)
                if score >= threshold:
                    results.append(schemas.result_object(passage, file.filename, member.attributes, score))
        return schemas.result_page(queries, results)
