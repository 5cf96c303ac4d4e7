"""The demo's index: the standard library's documentation, encoded once and kept in the user's cache.

The folder is named by its content (documents, encoder, chunking), so another Python or another encoder has its own; one that is
damaged or half-written is built again.
"""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ragspec.cli.terminal import note, one_line
from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.errors import SaveError, StoreCorrupt, StoreError
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.content import content_key
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.retriever import build_index
from ragspec.retrieval.store import Store
from ragspec.training.stdlib_corpus import stdlib_documents


def demo_documents() -> list[Document]:
    """One document per documented name of this Python, titled by it."""
    source = f"Python {platform.python_version()}"
    return [Document(id=name, text=text, title=name, source=source) for name, text in stdlib_documents()]


def open_demo_index(console: Console, encoder: TextEncoder, documents: list[Document], cache: Path) -> Store:
    """The cached index, built where it is missing or damaged; where the cache cannot be written, a temporary one.

    Raises: SaveError if no place can be written.
    """
    chunking = ChunkingConfig()
    key = content_key(documents, encoder.identity, chunking)
    folder = cache / f"stdlib-{key[:16]}"
    try:
        return _open(folder, encoder, key)
    except StoreCorrupt as damage:
        note(console, f"the cached index is damaged and is built again ({one_line(damage)})")
    except StoreError:
        pass  # there is none yet
    try:
        return _build(console, folder, encoder, documents, chunking)
    except SaveError as failure:
        note(console, f"nothing is cached: {one_line(failure)}")
    with tempfile.TemporaryDirectory(prefix="ragspec-") as scratch:  # opened files outlive their names
        return _build(console, Path(scratch) / "index", encoder, documents, chunking)


def _open(folder: Path, encoder: TextEncoder, key: str) -> Store:
    store = Store.open(folder, encoder.identity)
    if store.manifest.content_key != key:
        raise StoreCorrupt(f"{folder} holds other documents")
    return store


def _build(
    console: Console, folder: Path, encoder: TextEncoder, documents: list[Document], chunking: ChunkingConfig
) -> Store:
    num_passages = sum(len(chunk(document, chunking)) for document in documents)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Encoding, once; cached afterwards", total=num_passages)
        build_index(documents, folder, encoder, chunking, lambda _, passages: bar.update(task, completed=passages))
    return Store.open(folder, encoder.identity)
