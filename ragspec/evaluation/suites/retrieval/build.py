"""How fast an index is built, and what building costs beyond the encoder's own time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ragspec.config import ChunkingConfig, IndexConfig
from ragspec.core import Document
from ragspec.evaluation.suites.retrieval.collections import synthetic_documents
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.encoder import EncoderWrapper, FloatArray, TextEncoder, TextKind
from ragspec.retrieval.index.writer import IndexWriter

SHORT = IndexConfig(chunking=ChunkingConfig(max_chars=100))
"""Passages of about twenty tokens."""


class TimedEncoder(EncoderWrapper):
    """Another encoder, and the seconds it took to encode; counting tokens is the index's doing and not among them."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__(encoder)
        self.encode_s = 0.0
        self.count_tokens_s = 0.0

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        begin = time.perf_counter()
        counts = super().count_tokens(texts)
        self.count_tokens_s += time.perf_counter() - begin
        return counts

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        begin = time.perf_counter()
        vectors = super().encode(texts, kind)
        self.encode_s += time.perf_counter() - begin
        return vectors


def build_speed(encoder: TextEncoder, num_passages: int, folder: Path, seed: int, tick: Tick) -> dict[str, float | int]:
    """Seconds of an index of about so many synthetic passages in `folder`, and their parts. Raises: SaveError.

    The passages are short: the shorter a text, the less of the time is the encoder's.
    """
    documents = _documents(num_passages, seed)
    timed = TimedEncoder(encoder)
    begin = time.perf_counter()
    with IndexWriter(folder, timed, SHORT) as writer:
        for number, document in enumerate(documents, 1):
            writer.upsert(document)
            tick("build", number, len(documents))
        manifest = writer.commit()
    total_s = time.perf_counter() - begin
    return {
        "num_passages": manifest.num_passages,
        "chars_per_passage": sum(len(document.text) for document in documents) / manifest.num_passages,
        "total_s": total_s,
        "encoder_s": timed.encode_s,
        "overhead_share": (total_s - timed.encode_s) / timed.encode_s,
        "count_tokens_s": timed.count_tokens_s,
        "passages_per_s": manifest.num_passages / total_s,
        "encoder_passages_per_s": manifest.num_passages / timed.encode_s,
        "file_mb": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
    }


def _documents(num_passages: int, seed: int) -> list[Document]:
    documents, count = [], 0
    for document in synthetic_documents(num_passages, seed):
        documents.append(document)
        count += len(chunk(document, SHORT.chunking))
        if count >= num_passages:
            break
    return documents
