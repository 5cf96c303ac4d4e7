"""`POST /v1/embeddings`: vectors of the encoder that the index is searched with.

Nothing is cut: a text longer than the encoder reads is refused.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from fastapi import APIRouter

from ragspec.core import check_text
from services.backend import Backend
from services.errors import ApiError
from services.openai.asking import check_model
from services.openai.types import EmbeddingBody


def routes(backend: Backend) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", response_model=None)
    async def create(body: EmbeddingBody) -> dict[str, Any]:
        """One vector of length 1 for each text."""
        return await asyncio.to_thread(embedded, backend, body)

    return router


def embedded(backend: Backend, body: EmbeddingBody) -> dict[str, Any]:
    """Blocks. Raises: ApiError, InputError."""
    encoder = backend.encoder
    if body.model != encoder.identity.id:
        check_model(backend, body.model)
    dimension = encoder.identity.dimension
    if body.dimensions not in (None, dimension):
        raise ApiError(400, f"the vectors have {dimension} dimensions, and no others", param="dimensions")
    for text in body.input:
        check_text(text, "the input")
    lengths = encoder.count_tokens(body.input)
    for number, length in enumerate(lengths):
        if length > encoder.max_tokens:
            told = f"the input has {length} tokens, but the encoder reads at most {encoder.max_tokens}"
            raise ApiError(400, told, param=f"input.{number}", code="context_length_exceeded")
    vectors = encoder.encode(body.input, body.input_type)  # [B, E]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "model": body.model,
        "usage": {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)},
    }


def _written(vector: Any, encoding_format: str) -> Any:
    """Little-endian float32 as base64, or numbers. Shape: [E]."""
    if encoding_format == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return vector.tolist()
