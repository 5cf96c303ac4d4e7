"""Encoders in actors behind the interface of one: for queries, and for corpora that one process would take too long over.

>>> encoder = RemoteEncoder(directory)
>>> pool = EncoderPool(EncoderConfig(), num_workers=4)
>>> with IndexWriter(index_dir, pool, passages_per_encode=pool.texts_at_once) as writer: ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ragspec.cluster.calls import Patience, ask
from ragspec.cluster.crew import Crew
from ragspec.cluster.directory import Directory
from ragspec.cluster.own_actors import Alive, OwnActors
from ragspec.config import EncoderConfig
from ragspec.errors import EncoderMismatch
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray, TextEncoder, TextKind

_TEXTS_PER_CALL = 256
_CALLS_PER_WORKER = 8
_BULK = Patience(timeout_s=3600.0, late_s=60.0)


class Described(NamedTuple):
    """What an encoder elsewhere is."""

    identity: EncoderIdentity
    max_tokens: int


class EncoderActor(Alive):
    """An encoder in a process of its own. Light to build; its model is loaded by `load`, or by the first call."""

    def __init__(self, config: EncoderConfig, loaded: Callable[[EncoderConfig], TextEncoder] = Encoder.load) -> None:
        self._config, self._load = config, loaded
        self._encoder: TextEncoder | None = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Raises: ModelError."""
        self._loaded()

    def describe(self) -> Described:
        encoder = self._loaded()
        return Described(encoder.identity, encoder.max_tokens)

    def count_tokens(self, identity: EncoderIdentity, texts: Sequence[str]) -> list[int]:
        return self._checked(identity).count_tokens(texts)

    def encode(self, identity: EncoderIdentity, texts: Sequence[str], kind: TextKind) -> FloatArray:
        """Raises: EncoderMismatch if this is another encoder than the one that is meant."""
        return self._checked(identity).encode(texts, kind)

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
    """A `TextEncoder`, bit for bit the one that the members of kind "encoder" have. Safe to call from several threads.

    Texts go to actors by length, so that those of equal length still share a forward.
    """

    def __init__(self, directory: Directory, patience: Patience = Patience(30.0, 2.0)) -> None:  # noqa: B008
        """Waits for an encoder. Raises: RetrievalError if there is none, ModelError if it cannot be loaded."""
        self._crew = Crew(directory, "encoder", what="an encoder")
        self._patience = patience
        try:
            self._described: Described = self._asked([[]], lambda actor, _: actor.describe.remote(), patience)[0]
        except BaseException:
            self.close()
            raise

    @property
    def identity(self) -> EncoderIdentity:
        return self._described.identity

    @property
    def max_tokens(self) -> int:
        return self._described.max_tokens

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """As `Encoder.count_tokens`. Raises: as `encode`."""
        parts = [texts[i : i + _TEXTS_PER_CALL] for i in range(0, len(texts), _TEXTS_PER_CALL)]
        counted = self._asked(parts, lambda actor, part: actor.count_tokens.remote(self.identity, part), self._patience)
        return [count for some in counted for count in some]

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        """As `Encoder.encode`. Raises: RetrievalError if no encoder answers in time."""
        vectors = np.empty((len(texts), self.identity.dimension), np.float32)  # [B, E]
        by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        rows = [by_length[i : i + _TEXTS_PER_CALL] for i in range(0, len(texts), _TEXTS_PER_CALL)]
        parts = [[texts[row] for row in some] for some in rows]
        encoded = self._asked(parts, lambda actor, part: actor.encode.remote(self.identity, part, kind), self._patience)
        for some, found in zip(rows, encoded, strict=True):
            vectors[some] = found
        return vectors

    def close(self) -> None:
        """The actors are others'."""
        self._crew.close()

    def _asked(
        self, parts: Sequence[Sequence[str]], send: Callable[[Any, Sequence[str]], Any], patience: Patience
    ) -> list[Any]:
        """Each part of whoever is free: one at a time, so there is one item in a call."""
        orders: dict[int, tuple[str, ...]] = dict.fromkeys(range(len(parts)), ())
        answers = ask(self._crew, orders, lambda actor, numbers: send(actor, parts[numbers[0]]), patience)
        for error in answers.unanswered.values():
            raise error
        found = {numbers[0]: value for numbers, value in answers.given}
        return [found[number] for number in range(len(parts))]


class EncoderPool(RemoteEncoder):
    """Encoders of one's own, for a corpus."""

    def __init__(self, config: EncoderConfig, num_workers: int) -> None:
        """Needs Ray to be initialised. Raises: ModelError."""
        self._local = Encoder.load(config)  # Why: tokens are counted often and quickly
        self._own = OwnActors("encoder", EncoderActor, (config,), num_workers)
        self.texts_at_once = _TEXTS_PER_CALL * _CALLS_PER_WORKER * num_workers
        super().__init__(self._own, _BULK)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._local.count_tokens(texts)

    def close(self) -> None:
        super().close()
        self._own.close()
