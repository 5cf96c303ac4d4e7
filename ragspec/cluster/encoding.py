"""Many encoders behind the interface of one: for corpora that one process would take too long over.

>>> pool = EncoderPool(EncoderConfig(), num_workers=4)
>>> with IndexWriter(index_dir, pool, passages_per_encode=pool.texts_at_once) as writer: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util import ActorPool

from ragspec.cluster.pool import cpus_per_worker
from ragspec.config import EncoderConfig
from ragspec.errors import EngineError
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray, Kind

_TEXTS_PER_CALL = 256
_CALLS_PER_WORKER = 8
_MAX_RETRIES = 3


class EncoderPool:
    """Texts go to actors by length, so that those of equal length still share a forward; a dead actor's texts are sent again."""

    def __init__(self, config: EncoderConfig, num_workers: int) -> None:
        """Needs Ray to be initialised. Raises: ModelError."""
        self._local = Encoder.load(config)
        options = {"num_cpus": cpus_per_worker(num_workers), "max_restarts": -1, "max_task_retries": _MAX_RETRIES}
        actor: Any = ray.remote(_Worker)
        self._actors = ActorPool([actor.options(**options).remote(config) for _ in range(num_workers)])
        self.texts_at_once = _TEXTS_PER_CALL * _CALLS_PER_WORKER * num_workers

    @property
    def identity(self) -> EncoderIdentity:
        return self._local.identity

    @property
    def max_tokens(self) -> int:
        return self._local.max_tokens

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._local.count_tokens(texts)

    def encode(self, texts: Sequence[str], kind: Kind = "document") -> FloatArray:
        """As `Encoder.encode`. Raises: EngineError if the actors die again and again."""
        vectors = np.empty((len(texts), self.identity.dimension), np.float32)  # [B, E]
        by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        parts = [by_length[i : i + _TEXTS_PER_CALL] for i in range(0, len(texts), _TEXTS_PER_CALL)]
        calls: list[Any] = [[texts[number] for number in part] for part in parts]
        try:
            results: Any = self._actors.map(lambda actor, some: actor.encode.remote(some, kind), calls)
            for part, encoded in zip(parts, results, strict=True):
                vectors[part] = encoded
        except RayError as cause:
            raise EngineError(f"encoding stopped: {str(cause).strip().splitlines()[-1]}") from cause
        return vectors


class _Worker:
    def __init__(self, config: EncoderConfig) -> None:
        self._encoder = Encoder.load(config)

    def encode(self, texts: Sequence[str], kind: Kind) -> FloatArray:
        return self._encoder.encode(texts, kind)
