"""/v1/files, /v1/vector_stores and /v1/conversations. Owns the routes of files.

Routes that wait for disks are plain functions, which FastAPI runs in threads. Deletions wait for the index,
which may take long, and hold no thread meanwhile.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, UploadFile
from starlette.responses import FileResponse

from services.backend import ServiceBackend
from services.errors import ApiError
from services.stores import conversations, vector_stores
from services.stores.schemas import Fields, FileQuery, Name, Tenant, deleted, file_object


def routes(backend: ServiceBackend) -> APIRouter:
    router = APIRouter()
    for part in (_file_routes, vector_stores.routes, conversations.routes):
        router.include_router(part(backend))
    return router


def _file_routes(backend: ServiceBackend) -> APIRouter:
    router, library = APIRouter(prefix="/v1/files"), backend.library

    @router.post("")
    def upload(
        tenant: Tenant, file: UploadFile, purpose: Annotated[Literal["assistants", "user_data"], Form()]
    ) -> Fields:
        return file_object(library.upload(tenant, file.filename or "", purpose, file.file))

    @router.get("")
    def files(tenant: Tenant, query: Annotated[FileQuery, Query()]) -> Fields:
        found = [file for file in library.files(tenant) if query.purpose in ("", file.purpose)]
        return query.page(found, file_object, lambda file: (file.created_s, file.id))

    @router.get("/{file_id}")
    def file(tenant: Tenant, file_id: Name) -> Fields:
        return file_object(library.file(tenant, file_id))

    @router.get("/{file_id}/content")
    def content(tenant: Tenant, file_id: Name) -> Any:
        found = library.file(tenant, file_id)
        path = library.path(found)
        if not path.is_file():
            raise ApiError(404, f"the content of {file_id!r} is gone")
        # Why never the file's own type: the browser would run an uploaded page as one of ours
        return FileResponse(path, media_type="application/octet-stream", filename=found.filename)

    @router.delete("/{file_id}")
    async def delete(tenant: Tenant, file_id: Name) -> Fields:
        await library.delete_file(tenant, file_id)
        return deleted("file", file_id)

    return router
