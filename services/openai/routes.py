"""OpenAI's routes under /v1. Owns `GET /v1/models`: the model that answers, and the encoder that embeds."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from services.backend import ServiceBackend
from services.errors import ApiError
from services.openai import chat, completions, embeddings, responses
from services.openai.engine_stream import DeltaMailbox


def routes(backend: ServiceBackend) -> APIRouter:
    router, mailbox, parts = APIRouter(), DeltaMailbox(), chat.ChatParts.of(backend)
    for part in (
        chat.routes(backend, mailbox, parts),
        responses.routes(backend, mailbox, parts),
        completions.routes(backend, mailbox),
        embeddings.routes(backend),
        _model_routes(backend),
    ):
        router.include_router(part)
    return router


def _model_routes(backend: ServiceBackend) -> APIRouter:
    router, encoder = APIRouter(tags=["models"]), backend.encoder
    common = {"object": "model", "created": int(time.time()), "owned_by": "ragspec"}
    models = {
        name: {"id": name, **common, "max_model_len": max_tokens}
        for name, max_tokens in {
            backend.model: backend.engine.max_context_tokens,
            encoder.identity.id: encoder.max_tokens,
        }.items()
    }

    @router.get("/v1/models", response_model=None)
    async def index() -> dict[str, Any]:
        """The model that answers comes first."""
        return {"object": "list", "data": list(models.values())}

    @router.get("/v1/models/{name:path}", response_model=None)
    async def retrieve(name: str) -> dict[str, Any]:
        if name not in models:
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
        return models[name]

    return router
