"""OpenAI's routes under /v1: chat, completions, embeddings, models."""

from __future__ import annotations

from fastapi import APIRouter

from services.backend import Backend
from services.openai import chat, completions, embeddings, models
from services.openai.engine_stream import Mail


def routes(backend: Backend) -> APIRouter:
    router, mail = APIRouter(), Mail()
    for part in (chat.routes(backend, mail), completions.routes(backend, mail)):
        router.include_router(part)
    for other in (embeddings, models):
        router.include_router(other.routes(backend))
    return router
