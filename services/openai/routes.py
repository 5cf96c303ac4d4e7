"""OpenAI's routes under /v1.

Owns `GET /v1/models` (the models that answer, and the encoder that embeds) and `POST /v1/embeddings` (vectors of the encoder that
searches the index), with the thread that encodes.

Embeddings never truncate: a text longer than the encoder's limit is refused.
"""

import asyncio
import base64
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from fastapi import APIRouter, Request

from ragspec.core import check_text
from ragspec.numerics.threads import started_threads
from services.backend import ServiceBackend
from services.errors import ApiError
from services.openai.chat import add_chat
from services.openai.completions import add_completions
from services.openai.generation import DeltaMailbox, served_model
from services.openai.responses import add_responses
from services.openai.types import EmbeddingBody

_SLICE = 32
"""Texts encoded in one call. Between two calls other requests take turns, and abandoned requests end."""
_MAX_CHARS_PER_TOKEN = 64
_MAX_PREPARING = 64
"""Threads that prepare chat turns; most of them wait for one batched call of the index."""


def routes(backend: ServiceBackend) -> APIRouter:
    router, mailbox, threads = APIRouter(), DeltaMailbox(), started_threads(_MAX_PREPARING, "ragspec-prepare")
    add_chat(router, backend, mailbox, threads)
    add_responses(router, backend, mailbox, threads)
    add_completions(router, backend, mailbox)
    _add_embeddings(router, backend)
    _add_models(router, backend)
    return router


def _add_models(router: APIRouter, backend: ServiceBackend) -> None:
    encoder = backend.encoder
    common = {"object": "model", "created": int(time.time()), "owned_by": "ragspec"}
    lengths = {name: model.engine.max_context_tokens for name, model in backend.models.items()}
    lengths[encoder.identity.id] = encoder.max_tokens
    models = {name: {"id": name, **common, "max_model_len": length} for name, length in lengths.items()}

    @router.get("/v1/models", response_model=None, tags=["models"])
    async def index() -> dict[str, Any]:
        """The target comes first, then further models, then the encoder."""
        return {"object": "list", "data": list(models.values())}

    @router.get("/v1/models/{name:path}", response_model=None, tags=["models"])
    async def retrieve(name: str) -> dict[str, Any]:
        if name not in models:
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
        return models[name]


def _add_embeddings(router: APIRouter, backend: ServiceBackend) -> None:
    embeddings = Embeddings(backend)

    @router.post("/v1/embeddings", response_model=None, tags=["embeddings"])
    async def create(body: EmbeddingBody, request: Request) -> dict[str, Any]:
        """One vector of length 1 for each text."""
        lengths = await embeddings.count_tokens(body)
        num_tokens = sum(lengths)
        backend.rate_limiter.reserve(request.state.caller, num_tokens, 0)
        vectors = await embeddings.encode(body)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _formatted(vector, body.encoding_format)}
                for index, vector in enumerate(vectors)
            ],
            "model": body.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


class Embeddings:
    """Encodes slices of all requests in turn, in one thread. An abandoned request ends after its slice."""

    def __init__(self, backend: ServiceBackend) -> None:
        self._backend, self._encoder = backend, backend.encoder
        self._thread = started_threads(1, "ragspec-embeddings")

    async def count_tokens(self, body: EmbeddingBody) -> list[int]:
        """The number of tokens of each text. Raises: ApiError, InputError."""
        encoder = self._encoder
        if body.model != encoder.identity.id:
            served_model(self._backend, body.model)
        dimension = encoder.identity.dimension
        if body.dimensions not in (None, dimension):
            raise ApiError(400, f"the vectors have {dimension} dimensions, and no others", param="dimensions")
        lengths: list[int] = []
        for number, text in enumerate(body.input):
            check_text(text, "the input")
            # Why first: a tokenizer takes seconds for a megabyte
            if len(text) > _MAX_CHARS_PER_TOKEN * encoder.max_tokens:
                self._refuse_length(number, f"{len(text)} characters")
        for texts in _slices(body.input):
            for length in await self._in_thread(encoder.count_tokens, texts):
                if length > encoder.max_tokens:
                    self._refuse_length(len(lengths), f"{length} tokens")
                lengths.append(length)
        return lengths

    async def encode(self, body: EmbeddingBody) -> list[Any]:
        """One vector a text. Shape: [E] each."""
        vectors: list[Any] = []
        for texts in _slices(body.input):
            vectors += list(await self._in_thread(self._encoder.encode, texts, body.input_type))
        return vectors

    async def _in_thread(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _refuse_length(self, number: int, length: str) -> NoReturn:
        reason = f"the input has {length}, but the encoder reads at most {self._encoder.max_tokens} tokens"
        raise ApiError(400, reason, param=f"input.{number}", code="context_length_exceeded")


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    return (texts[start : start + _SLICE] for start in range(0, len(texts), _SLICE))


def _formatted(vector: Any, encoding_format: str) -> Any:
    """Base64 of little-endian float32, or a list of numbers. Shape: [E]."""
    if encoding_format == "base64":
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
    return vector.tolist()
