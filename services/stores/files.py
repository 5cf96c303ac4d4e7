"""/v1/files: what tenants upload."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, Request, UploadFile
from starlette.responses import FileResponse

from services.backend import Backend
from services.errors import ApiError
from services.stores.bodies import Cursor, Order
from services.stores.shapes import Fields, deleted, file_object, page

_BEYOND = 10_000
Purpose = Literal["assistants", "user_data"]


def routes(backend: Backend) -> APIRouter:
    """Why plain functions: they wait for disks, in threads."""
    router, library = APIRouter(prefix="/v1/files"), backend.library

    @router.post("")
    def upload(request: Request, file: UploadFile, purpose: Annotated[Purpose, Form()]) -> Fields:
        tenant = request.state.caller.tenant
        return file_object(library.upload(tenant, file.filename or "", purpose, file.file))

    @router.get("")
    def files(
        request: Request,
        purpose: Annotated[str, Query(max_length=64)] = "",
        limit: Annotated[int, Query(ge=1, le=_BEYOND)] = _BEYOND,
        order: Order = "desc",
        after: Cursor = "",
    ) -> Fields:
        found = [file for file in library.files(request.state.caller.tenant) if purpose in ("", file.purpose)]
        return page(found, file_object, lambda file: (file.created_s, file.id), limit=limit, order=order, after=after)

    @router.get("/{file_id}")
    def file(request: Request, file_id: Cursor) -> Fields:
        return file_object(library.file(request.state.caller.tenant, file_id))

    @router.get("/{file_id}/content")
    def content(request: Request, file_id: Cursor) -> Any:
        found = library.file(request.state.caller.tenant, file_id)
        path = library.path(found)
        if not path.is_file():
            raise ApiError(404, f"the content of {file_id!r} is gone")
        # Why never the file's own type: a page that a tenant uploaded would run under the service's name
        return FileResponse(path, media_type="application/octet-stream", filename=found.filename)

    @router.delete("/{file_id}")
    def delete(request: Request, file_id: Cursor) -> Fields:
        library.delete_file(request.state.caller.tenant, file_id)
        return deleted("file", file_id)

    return router
