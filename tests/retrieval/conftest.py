"""One real encoder for all tests here, and a tiny one of fixed vectors for the tests of files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from ragspec.config import EncoderConfig
from ragspec.core import Document
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray, Kind

DIMENSION = 16


class LetterEncoder:
    """A text's vector is drawn from its hash: no weights, no time, no batching effects."""

    identity = EncoderIdentity(id="letters", fingerprint="f" * 64, dimension=DIMENSION)

    def encode(self, texts: Sequence[str], kind: Kind = "document") -> FloatArray:
        rows = [self._vector(text) for text in texts]
        return np.stack(rows) if rows else np.empty((0, DIMENSION), np.float32)

    def _vector(self, text: str) -> FloatArray:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        vector = np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)
        return vector / np.linalg.norm(vector)


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder.load(EncoderConfig())


@pytest.fixture
def letters() -> LetterEncoder:
    return LetterEncoder()


@pytest.fixture
def documents() -> list[Document]:
    return [
        Document(f"d{n}", f"Über fact number {n}. It is told in two sentences — 雨。", f"Title {n}", f"{n}.txt", {"n": n})
        for n in range(20)
    ]
