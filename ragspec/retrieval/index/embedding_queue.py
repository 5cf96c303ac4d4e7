"""Chunks documents and encodes them many at a time, so that texts of equal length share a forward.

>>> queue.add(queue.chunked(document, known={}))
>>> queue.encode()[0].vectors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ragspec.config import ChunkingConfig
from ragspec.core import Document, Passage
from ragspec.errors import ModelError, RetrievalError
from ragspec.retrieval.chunking import TokenLimit, chunk, embedded_text
from ragspec.retrieval.encoder import FloatArray, TextEncoder
from ragspec.retrieval.index.content_key import IdsByKey, text_key


@dataclass(slots=True)
class EmbeddedDocument:
    """A document with its passages, their embedded texts, and their vectors [len(passages), E].

    `missing`: numbers of the passages whose vectors must be computed.
    """

    document: Document
    passages: list[Passage]
    texts: list[str]
    vectors: FloatArray
    missing: list[int]


class EmbeddingQueue:
    """Documents that wait to be encoded. An id is in the queue at most once."""

    def __init__(self, encoder: TextEncoder | None, chunking: ChunkingConfig) -> None:
        """Without an encoder the queue stays empty."""
        self._encoder = encoder
        self._chunking = chunking
        self._limit = None if encoder is None else TokenLimit(encoder.max_tokens, encoder.count_tokens)
        self._waiting: dict[str, EmbeddedDocument] = {}
        self._texts = IdsByKey()
        self.num_missing = 0

    def __contains__(self, document_id: str) -> bool:
        return document_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def with_text(self, key: bytes) -> Iterable[str]:
        """The ids of waiting documents with that text key."""
        return self._texts.ids(key)

    def chunked(self, document: Document, known: Mapping[str, FloatArray]) -> EmbeddedDocument:
        """Chunk a document. `known`: vectors by embedded text."""
        assert self._encoder is not None, "putting documents in needs an encoder"
        passages = chunk(document, self._chunking, self._limit)
        texts = [embedded_text(passage) for passage in passages]
        vectors = np.empty((len(texts), self._encoder.identity.dimension), np.float32)
        missing = [number for number, text in enumerate(texts) if text not in known]
        for number, text in enumerate(texts):
            if text in known:
                vectors[number] = known[text]
        return EmbeddedDocument(document, passages, texts, vectors, missing)

    def add(self, waiting: EmbeddedDocument) -> None:
        """Add a document whose id is not in the queue."""
        self._waiting[waiting.document.id] = waiting
        self._texts.add(text_key(waiting.document), waiting.document.id)
        self.num_missing += len(waiting.missing)

    def get(self, document_id: str) -> Document:
        return self._waiting[document_id].document

    def drop(self, document_id: str) -> None:
        waiting = self._waiting.pop(document_id)
        self._texts.remove(text_key(waiting.document), document_id)
        self.num_missing -= len(waiting.missing)

    def encode(self) -> list[EmbeddedDocument]:
        """All waiting documents, in order, with every vector. The queue is empty afterwards.

        Raises: ModelError for a vector that is not finite, which no search could rank; RetrievalError if the encoder fails.
        """
        waiting = list(self._waiting.values())
        if not waiting or self._encoder is None:
            return []
        try:
            encoded = self._encoder.encode([each.texts[number] for each in waiting for number in each.missing])
        except OSError as cause:
            raise RetrievalError(f"the encoder cannot be asked: {cause}") from cause
        rows = iter(encoded)
        for each in waiting:
            for number in each.missing:
                each.vectors[number] = next(rows)
            if not np.isfinite(each.vectors).all():
                raise ModelError(f"the encoder's vector of a passage of document {each.document.id!r} is not finite")
        self._waiting, self._texts, self.num_missing = {}, IdsByKey(), 0
        return waiting
