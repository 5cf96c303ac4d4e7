"""An encoder for the tests of files: no weights, no time, no batching effects."""

import hashlib
from collections.abc import Sequence

import numpy as np

from ragspec.retrieval.encoder import EncoderIdentity, FloatArray, TextKind

DIMENSION = 16


class LetterEncoder:
    """A text's vector is drawn from its hash."""

    identity = EncoderIdentity(id="letters", fingerprint="f" * 64, dimension=DIMENSION)
    max_tokens = 256

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) + 2 for text in texts]

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        rows = [self._vector(text) for text in texts]
        return np.stack(rows) if rows else np.empty((0, DIMENSION), np.float32)

    def _vector(self, text: str) -> FloatArray:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        vector = np.random.default_rng(seed).standard_normal(DIMENSION).astype(np.float32)
        return vector / np.linalg.norm(vector)


class CoarseEncoder(LetterEncoder):
    """Few directions, so that many scores are equal."""

    def _vector(self, text: str) -> FloatArray:
        return super()._vector(text[-2:])


class WordEncoder(LetterEncoder):
    """Each word is a direction, so texts that share words are near."""

    identity = EncoderIdentity(id="words", fingerprint="e" * 64, dimension=64)

    def _vector(self, text: str) -> FloatArray:
        vector = np.full(64, 1e-3, np.float32)
        for word in text.lower().split():
            vector[hashlib.sha256(word.strip(".?").encode()).digest()[0] % 64] += 1.0
        return vector / np.linalg.norm(vector)
