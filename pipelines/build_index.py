"""Build an index from files.

    python -m pipelines.build_index manual/ faq.jsonl --out index

The last line on stdout is one JSON object with what was built.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ragspec.config import load_config
from ragspec.core import Document
from ragspec.errors import InputError, RagspecError
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.manifest import Manifest
from ragspec.retrieval.reading import find_files, read_file
from ragspec.retrieval.retriever import build_index

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = Console(stderr=True)


@app.command()
def main(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUT...", help="Files (.txt .md .rst .jsonl) or folders of them.")
    ],
    out: Annotated[Path, typer.Option(help="The index's folder; an index there gets a new generation.")],
    encoder: Annotated[str | None, typer.Option(help="A sentence-transformers name or path.")] = None,
    max_chars: Annotated[int | None, typer.Option(help="Longest passage, in characters.")] = None,
    overlap_chars: Annotated[
        int | None, typer.Option(help="Whole sentences shared by neighbours, in characters.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML configuration; the options above win.")] = None,
    skip_unreadable: Annotated[bool, typer.Option(help="Report files that cannot be read and go on.")] = False,
) -> None:
    """Chunk, encode and index documents."""
    overrides = {"encoder.model": encoder, "chunking.max_chars": max_chars, "chunking.overlap_chars": overlap_chars}
    try:
        settings = load_config(config, **overrides)
        files = find_files(inputs)
        started_s = time.monotonic()
        loaded = Encoder.load(settings.encoder)
        with _progress_bar() as bar:
            task = bar.add_task("files", total=len(files), passages=0)

            def documents() -> Iterator[Document]:
                for path, name in files:
                    yield from _documents(path, name, skip_unreadable)
                    bar.advance(task)

            manifest = build_index(
                documents(), out, loaded, settings.chunking, lambda _, passages: bar.update(task, passages=passages)
            )
    except RagspecError as error:
        _console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    _report(manifest, out, time.monotonic() - started_s)


def _documents(path: Path, name: str, skip_unreadable: bool) -> Iterator[Document]:
    if not skip_unreadable:
        yield from read_file(path, name)
        return
    try:
        yield from list(read_file(path, name))  # Why a list: a file with one bad line is left out as a whole
    except InputError as error:
        _console.print(f"skipped: {error}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[passages]} passages"), console=_console)


def _report(manifest: Manifest, out: Path, elapsed_s: float) -> None:
    summary = {
        "index_dir": str(out),
        "generation": manifest.generation_id,
        "documents": manifest.num_documents,
        "passages": manifest.num_passages,
        "dimension": manifest.encoder.dimension,
        "seconds": round(elapsed_s, 2),
        "passages_per_s": round(manifest.num_passages / elapsed_s, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    app()
