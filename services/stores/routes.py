"""/v1/files, /v1/vector_stores and /v1/conversations."""

from __future__ import annotations

from fastapi import APIRouter

from services.backend import Backend
from services.stores import conversations, files, vector_stores


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()
    for part in (files, vector_stores, conversations):
        router.include_router(part.routes(backend))
    return router
