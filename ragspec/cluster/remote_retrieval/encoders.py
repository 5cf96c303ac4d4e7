"""Encoders in actors, behind the interface of one encoder: for queries, and for corpora too large for one process.

>>> encoder = RemoteEncoder(deployment.replicas_of("encoder"))
>>> pool = EncoderPool(EncoderConfig(), num_workers=4)
>>> with IndexWriter(index_dir, pool, passages_per_encode=pool.texts_at_once) as writer: ...
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ragspec.cluster.actors import ActorPool, Replica, WorkerActor, ended_if_lost, wait_for_all
from ragspec.cluster.remote_retrieval.worker_pool import HANG_S, RetryPolicy, WorkerPool, call_free_workers
from ragspec.config import EncoderConfig
from ragspec.errors import EncoderMismatch
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray, TextEncoder, TextKind

_TEXTS_PER_CALL = 256
_CALLS_PER_WORKER = 8
_LOAD_TIMEOUT_S = 300.0
_QUERIES, _BULK = RetryPolicy(timeout_s=30.0, late_s=2.0), RetryPolicy(timeout_s=3600.0, late_s=60.0)


class EncoderActor(WorkerActor):
    """An encoder in a process of its own; its model is loaded by `load`, or by the first call. Every answer is a list of one,
    as `call_free_workers` expects."""

    def __init__(self, config: EncoderConfig, loaded: Callable[[EncoderConfig], TextEncoder] = Encoder.load) -> None:
        self._config, self._load = config, loaded
        self._encoder: TextEncoder | None = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Raises: ModelError."""
        self._loaded()

    def describe(self) -> list[tuple[EncoderIdentity, int]]:
        """The identity and the most tokens of a text."""
        encoder = self._loaded()
        return [(encoder.identity, encoder.max_tokens)]

    def count_tokens(self, identity: EncoderIdentity, texts: Sequence[str]) -> list[list[int]]:
        return [self._checked(identity).count_tokens(texts)]

    def encode(self, identity: EncoderIdentity, texts: Sequence[str], kind: TextKind) -> list[FloatArray]:
        """Raises: EncoderMismatch if this is not the encoder of that identity."""
        encoder = self._checked(identity)
        with ended_if_lost(encoder):
            return [encoder.encode(texts, kind)]

    def _checked(self, identity: EncoderIdentity) -> TextEncoder:
        encoder = self._loaded()
        if encoder.identity != identity:
            raise EncoderMismatch(f"this process encodes with {encoder.identity}, not {identity}")
        return encoder

    def _loaded(self) -> TextEncoder:
        with self._lock:
            if self._encoder is None:
                self._encoder = self._load(self._config)
            return self._encoder


class RemoteEncoder:
    """A `TextEncoder` with the bits of the encoder that the actors have loaded. Safe to call from several threads.

    Texts are sorted by length, so that those of equal length share a forward.
    """

    identity: EncoderIdentity
    max_tokens: int

    def __init__(self, replicas: Sequence[Replica], policy: RetryPolicy = _QUERIES, hang_s: float = HANG_S) -> None:
        """Waits for an encoder. Raises: RetrievalError if none answers, ModelError if it cannot be loaded."""
        self._pool = WorkerPool(replicas, "an encoder", _load, hang_s)
        self._policy = policy
        try:
            ((self.identity, self.max_tokens),) = self._call([[]], lambda actor, _: actor.describe.remote())
        except BaseException:
            self.close()
            raise

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """As `Encoder.count_tokens`. Raises: as `encode`."""
        parts = [texts[i : i + _TEXTS_PER_CALL] for i in range(0, len(texts), _TEXTS_PER_CALL)]
        counted = self._call(parts, lambda actor, part: actor.count_tokens.remote(self.identity, part))
        return [count for some in counted for count in some]

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        """As `Encoder.encode`. Raises: RetrievalError if no encoder answers in time."""
        vectors = np.empty((len(texts), self.identity.dimension), np.float32)  # [B, E]
        by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        rows = [by_length[i : i + _TEXTS_PER_CALL] for i in range(0, len(texts), _TEXTS_PER_CALL)]
        parts = [[texts[row] for row in some] for some in rows]
        encoded = self._call(parts, lambda actor, part: actor.encode.remote(self.identity, part, kind))
        for some, encoded_rows in zip(rows, encoded, strict=True):
            vectors[some] = encoded_rows
        return vectors

    def close(self) -> None:
        """The actors live on."""
        self._pool.close()

    def _call(self, parts: Sequence[Sequence[str]], send: Callable[[Any, Sequence[str]], Any]) -> list[Any]:
        return call_free_workers(self._pool, parts, send, self._policy)


def _load(worker: Replica) -> None:
    """A restarted encoder loads its model before texts wait for it."""
    wait_for_all([worker.actor.load.remote()], _LOAD_TIMEOUT_S, worker.name)


class EncoderPool(RemoteEncoder):
    """Encoders of its own, for a corpus."""

    def __init__(self, config: EncoderConfig, num_workers: int) -> None:
        """Needs Ray to be initialised. Raises: ModelError, EngineError."""
        self._local = Encoder.load(config)  # Why: counting tokens is quick and frequent
        self._actors = ActorPool(EncoderActor, (config,), num_workers, prefix="encoder")
        self.texts_at_once = _TEXTS_PER_CALL * _CALLS_PER_WORKER * num_workers
        super().__init__(self._actors.replicas, _BULK)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._local.count_tokens(texts)

    def close(self) -> None:
        super().close()
        self._actors.close()
