"""A suite's retrieval index: built once, kept in a folder named by its content, opened again after that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragspec.config import IndexConfig
from ragspec.core import Document
from ragspec.errors import StoreError
from ragspec.retrieval.content import content_key
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Progress, Retriever, build_index
from ragspec.retrieval.store import Store


def cached_retriever(
    documents: Sequence[Document],
    encoder: Encoder,
    cache_dir: Path,
    config: IndexConfig | None = None,
    progress: Progress | None = None,
) -> Retriever:
    """The retriever over these documents; a damaged cache is built anew. Raises: SaveError, InputError."""
    config = config or IndexConfig()
    folder = cache_dir / content_key(documents, encoder.identity, config)[:24]
    try:
        return Retriever(encoder, Store.open(folder, encoder.identity), follow=False)
    except StoreError:
        build_index(documents, folder, encoder, config, progress)
        return Retriever(encoder, Store.open(folder, encoder.identity), follow=False)
