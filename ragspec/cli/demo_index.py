"""The demo's index: the standard library's documentation, encoded once and kept in the user's cache.

The folder is named by its content (documents, encoder, chunking), so another Python or another encoder has its own. One that is
damaged or half-written is built again; a service's own copy, which others' documents may be in, is not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ragspec.cli.terminal import note, one_line
from ragspec.config import ChunkingConfig, IndexConfig
from ragspec.core import Document
from ragspec.disk import saving
from ragspec.errors import SaveError
from ragspec.evaluation.datasets import cached_retriever, cached_store
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import ProgressCallback, Retriever

_NAME = "stdlib"


def demo_documents(corpus: Iterable[tuple[str, str]]) -> list[Document]:
    """One document per documented name, titled by it."""
    return [Document(name, text, title=name) for name, text in corpus]


def count_passages(documents: list[Document]) -> int:
    return sum(len(chunk(document, ChunkingConfig())) for document in documents)


def demo_retriever(console: Console, encoder: Encoder, documents: list[Document], cache: Path) -> Retriever:
    """From the cache, or built with a progress bar; where the cache cannot be written, in a temporary folder.

    Raises: SaveError if no place can be written.
    """
    with _progress(console, documents) as show:
        try:
            return cached_retriever(documents, encoder, cache / _NAME, progress=show)
        except SaveError as failure:
            note(console, f"nothing is cached: {one_line(failure)}")
        with tempfile.TemporaryDirectory(prefix="ragspec-") as scratch:  # its files stay open when their names go
            return cached_retriever(documents, encoder, Path(scratch), progress=show)


def own_index(console: Console, encoder: Encoder, documents: list[Document], cache: Path, home: Path) -> Path:
    """The folder of an index of the demo's documents that others may be added to, in `home`: a copy of the cached one at first.

    Raises: SaveError; StoreError for one that is damaged.
    """
    folder = home / content_key(documents, encoder.identity, IndexConfig())[:24]
    if folder.exists():
        return Store.open(folder, encoder.identity).index_dir
    with _progress(console, documents) as show:
        store = cached_store(documents, encoder, cache / _NAME, progress=show)
    with saving(folder):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            os.rename(shutil.copytree(store.index_dir, Path(scratch) / "index"), folder)
    return folder


@contextlib.contextmanager
def _progress(console: Console, documents: list[Document]) -> Iterator[ProgressCallback]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Passages, encoded once", total=count_passages(documents))
        yield lambda _, num_passages: bar.update(task, completed=num_passages)
