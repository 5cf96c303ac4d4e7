"""OpenAI's routes under /v1: chat, completions, embeddings, models."""

from __future__ import annotations

from fastapi import APIRouter

from services.backend import Backend
from services.openai import chat, completions, embeddings, models


def routes(backend: Backend) -> APIRouter:
    router = APIRouter()
    for part in (chat, completions, embeddings, models):
        router.include_router(part.routes(backend))
    return router
