"""The demo's index: the standard library's documentation, encoded once and kept in the user's cache.

The folder is named by its content (documents, encoder, chunking), so another Python or another encoder has its own; one that is
damaged or half-written is built again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ragspec.cli.terminal import note, one_line
from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.errors import SaveError
from ragspec.evaluation.index_cache import cached_retriever
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Retriever


def demo_documents(corpus: Iterable[tuple[str, str]]) -> list[Document]:
    """One document per documented name, titled by it."""
    return [Document(name, text, title=name) for name, text in corpus]


def count_passages(documents: list[Document]) -> int:
    return sum(len(chunk(document, ChunkingConfig())) for document in documents)


def demo_retriever(console: Console, encoder: Encoder, documents: list[Document], cache: Path) -> Retriever:
    """From the cache, or built with a progress bar; where the cache cannot be written, in a temporary folder.

    Raises: SaveError if no place can be written.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Passages, encoded once", total=count_passages(documents))

        def show(_: int, num_passages: int) -> None:
            bar.update(task, completed=num_passages)

        try:
            return cached_retriever(documents, encoder, cache / "stdlib", progress=show)
        except SaveError as failure:
            note(console, f"nothing is cached: {one_line(failure)}")
        with tempfile.TemporaryDirectory(prefix="ragspec-") as scratch:  # its files stay open when their names go
            return cached_retriever(documents, encoder, Path(scratch), progress=show)
