"""Chunks documents and encodes them many at a time, so that texts of equal length share a forward.

>>> waiting = [Chunker(encoder, config.chunking).chunked(document) for document in documents]
>>> encode_missing(encoder, waiting)
>>> waiting[0].vectors
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ragspec.config import ChunkingConfig
from ragspec.core import Document, Passage
from ragspec.errors import ModelError, RetrievalError
from ragspec.retrieval.chunking import TokenLimit, chunk, embedded_text
from ragspec.retrieval.encoder import FloatArray, TextEncoder
from ragspec.retrieval.index.content_key import text_key


@dataclass(slots=True)
class EmbeddedDocument:
    """A document cut into passages by `chunking`, with their embedded texts and their vectors [len(passages), E].

    `missing`: numbers of the passages whose vectors must be computed.
    """

    document: Document
    text_key: bytes
    chunking: ChunkingConfig
    passages: list[Passage]
    texts: list[str]
    vectors: FloatArray
    missing: list[int]

    @property
    def num_missing_chars(self) -> int:
        """Characters of the texts that must be encoded."""
        return sum(len(self.texts[number]) for number in self.missing)

    def reuse(self, known: Mapping[str, FloatArray]) -> None:
        """Fill in missing vectors. `known`: vectors by embedded text."""
        for number in [*self.missing]:
            vector = known.get(self.texts[number])
            if vector is not None and np.isfinite(vector).all():  # else the file was overwritten after it was checked
                self.vectors[number] = vector
                self.missing.remove(number)


def encode_missing(encoder: TextEncoder, documents: Sequence[EmbeddedDocument], max_chars: float = math.inf) -> None:
    """Compute missing vectors, in order, until their texts have `max_chars` characters. After an error none is filled in.

    Raises: ModelError for a vector that is not finite, which no search could rank; RetrievalError if the encoder fails.
    """
    chosen: list[tuple[EmbeddedDocument, int]] = []
    for each, number in ((document, number) for document in documents for number in document.missing):
        if max_chars <= 0:
            break
        chosen.append((each, number))
        max_chars -= len(each.texts[number])
    try:
        encoded = encoder.encode([each.texts[number] for each, number in chosen])
    except OSError as cause:
        raise RetrievalError(f"the encoder cannot be asked: {cause}") from cause
    for (each, _), vector in zip(chosen, encoded, strict=True):
        if not np.isfinite(vector).all():
            raise ModelError(f"the encoder's vector of a passage of document {each.document.id!r} is not finite")
    for (each, number), vector in zip(chosen, encoded, strict=True):
        each.vectors[number] = vector
    num_filled = Counter(id(each) for each, _ in chosen)
    for each in documents:
        del each.missing[: num_filled[id(each)]]


class Chunker:
    """Cuts documents into passages that an encoder reads whole."""

    def __init__(self, encoder: TextEncoder, chunking: ChunkingConfig) -> None:
        self._chunking, self._dimension = chunking, encoder.identity.dimension
        self._limit = TokenLimit(encoder.max_tokens, encoder.count_tokens)

    def chunked(self, document: Document) -> EmbeddedDocument:
        """Raises: ConfigError."""
        passages = chunk(document, self._chunking, self._limit)
        texts = [embedded_text(passage) for passage in passages]
        vectors = np.empty((len(texts), self._dimension), np.float32)
        missing = list(range(len(texts)))
        return EmbeddedDocument(document, text_key(document), self._chunking, passages, texts, vectors, missing)
