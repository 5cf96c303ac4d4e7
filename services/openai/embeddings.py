"""`POST /v1/embeddings`: vectors of the encoder that the index is searched with.

Nothing is cut: a text longer than the encoder reads is refused.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from ragspec.core import check_text
from services.backend import Backend
from services.errors import ApiError
from services.openai.request_context import check_model
from services.openai.types import EmbeddingBody

_SLICE = 32
"""Texts that are encoded without a look at whether anybody still waits, and before others have their turn."""


def routes(backend: Backend) -> APIRouter:
    router, embeddings = APIRouter(tags=["embeddings"]), Embeddings(backend)

    @router.post("/v1/embeddings", response_model=None)
    async def create(body: EmbeddingBody, request: Request) -> dict[str, Any]:
        """One vector of length 1 for each text."""
        lengths = await embeddings.checked(body)
        num_tokens = sum(lengths)
        async with backend.gate.enter(request.state.caller, num_tokens, 0):
            vectors = await embeddings.encoded(body)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
                for index, vector in enumerate(vectors)
            ],
            "model": body.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    return router


class Embeddings:
    """Encodes in a thread of its own, a slice of one request after a slice of another; what nobody waits for any more ends with
    its slice."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._encoder = backend, backend.encoder
        self._thread = ThreadPoolExecutor(1, "ragspec-embeddings")

    async def checked(self, body: EmbeddingBody) -> list[int]:
        """Tokens of each text. Raises: ApiError, InputError."""
        encoder = self._encoder
        if body.model != encoder.identity.id:
            check_model(self._backend, body.model)
        dimension = encoder.identity.dimension
        if body.dimensions not in (None, dimension):
            raise ApiError(400, f"the vectors have {dimension} dimensions, and no others", param="dimensions")
        lengths: list[int] = []
        for texts in _slices(body.input):
            for text in texts:
                check_text(text, "the input")
            lengths += await self._apart(encoder.count_tokens, texts)
            self._check_lengths(lengths, len(lengths) - len(texts))
        return lengths

    async def encoded(self, body: EmbeddingBody) -> list[Any]:
        """A vector for each text. Shape: [E] each."""
        vectors: list[Any] = []
        for texts in _slices(body.input):
            vectors += list(await self._apart(self._encoder.encode, texts, body.input_type))
        return vectors

    async def _apart(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _check_lengths(self, lengths: list[int], first: int) -> None:
        most = self._encoder.max_tokens
        for number, length in enumerate(lengths[first:], first):
            if length > most:
                told = f"the input has {length} tokens, but the encoder reads at most {most}"
                raise ApiError(400, told, param=f"input.{number}", code="context_length_exceeded")


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    return (texts[start : start + _SLICE] for start in range(0, len(texts), _SLICE))


def _written(vector: Any, encoding_format: str) -> Any:
    """Little-endian float32 as base64, or numbers. Shape: [E]."""
    if encoding_format == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return vector.tolist()
