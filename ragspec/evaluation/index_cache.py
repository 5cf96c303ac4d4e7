"""A suite's retrieval index: built once, kept in a folder named by its content, opened again after that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragspec.config import IndexConfig
from ragspec.core import Document
from ragspec.errors import StoreError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import ProgressCallback, Retriever, build_index


def cached_store(
    documents: Sequence[Document],
    encoder: TextEncoder,
    cache_dir: Path,
    config: IndexConfig | None = None,
    progress: ProgressCallback | None = None,
) -> Store:
    """The index of these documents; a damaged cache is built anew. Raises: SaveError, InputError."""
    config = config or IndexConfig()
    folder = cache_dir / content_key(documents, encoder.identity, config)[:24]
    try:
        return Store.open(folder, encoder.identity)
    except StoreError:
        build_index(documents, folder, encoder, config, progress)
        return Store.open(folder, encoder.identity)


def cached_retriever(
    documents: Sequence[Document], encoder: TextEncoder, cache_dir: Path, progress: ProgressCallback | None = None
) -> Retriever:
    """The default retriever over these documents, which never change. Raises: SaveError, InputError."""
    return Retriever(encoder, cached_store(documents, encoder, cache_dir, progress=progress), follow=False)
