"""`GET /v1/models`: the model that answers, and the encoder that embeds."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from services.backend import Backend
from services.errors import ApiError


def routes(backend: Backend) -> APIRouter:
    router, created = APIRouter(tags=["models"]), int(time.time())
    longest = {
        backend.model: backend.engine.max_context_tokens,
        backend.encoder.identity.id: backend.encoder.max_tokens,
    }
    models = {name: _model(name, created, length) for name, length in longest.items()}

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


def _model(name: str, created: int, max_tokens: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "ragspec", "max_model_len": max_tokens}
