"""Put files into an index: a new one, or one that is there already.

    python -m pipelines.build_index manual/ faq.jsonl "notes/**/*.md" --index my-index

Only what is new or changed is encoded. What is done is committed every some thousand passages, so after a kill the same command
goes on where it stopped. Files that cannot be read are named and left out. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ragspec.config import IndexConfig, PipelineConfig, load_config
from ragspec.core import Document
from ragspec.errors import InputError, RagspecError, StoreError
from ragspec.retrieval.changes import Outcome
from ragspec.retrieval.encoder import Encoder, EncoderIdentity, FloatArray, Kind, TextEncoder
from ragspec.retrieval.manifest import Manifest, read_current
from ragspec.retrieval.reading import find_files, read_file
from ragspec.retrieval.writer import PASSAGES_PER_ENCODE, IndexWriter

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = Console(stderr=True)

_PASSAGES_PER_COMMIT = 16_384
_NAMED_DUPLICATES = 20
_READ_AT_ONCE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Job:
    """What the command line decides, beside the index's own settings."""

    inputs: tuple[str, ...]
    index_dir: Path
    owner: str = ""
    keep_duplicates: bool = False
    remove_missing: bool = False
    dry_run: bool = False
    workers: int = 1


@dataclass
class Found:
    """What the files turned out to hold."""

    num_files: int = 0
    skipped: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)


@app.command()
def main(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Files, folders or quoted patterns: .txt .md .rst .html .pdf .docx .jsonl .csv"
        ),
    ],
    index: Annotated[Path, typer.Option(help="The index's folder; made if it is not there.")],
    encoder: Annotated[str | None, typer.Option(help="A sentence-transformers name or path.")] = None,
    max_chars: Annotated[int | None, typer.Option(help="Longest passage, in characters.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest passage, in the encoder's tokens; default: all it reads.")
    ] = None,
    overlap_chars: Annotated[
        int | None, typer.Option(help="Whole sentences shared by neighbours, in characters.")
    ] = None,
    language: Annotated[str | None, typer.Option(help="Whose words are stemmed; none for none.")] = None,
    dense: Annotated[str | None, typer.Option(help="How vectors are searched: exact, hnsw or ivf.")] = None,
    owner: Annotated[str, typer.Option(help="The tenant who alone may see these documents.")] = "",
    keep_duplicates: Annotated[bool, typer.Option(help="Index a text again that another document has.")] = False,
    remove_missing: Annotated[
        bool, typer.Option(help="Delete documents of these inputs that are not there any more.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would be done; change nothing.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a file was skipped.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that encode, through Ray.", min=1)] = 1,
    config: Annotated[Path | None, typer.Option(help="A YAML configuration; the options above win.")] = None,
) -> None:
    """Read, chunk, encode and index documents; those already there are left alone or replaced."""
    overrides = {
        "encoder.model": encoder,
        "index.chunking.max_chars": max_chars,
        "index.chunking.max_tokens": max_tokens,
        "index.chunking.overlap_chars": overlap_chars,
        "index.words.language": language,
        "index.dense.kind": dense,
    }
    job = Job(tuple(inputs), index, owner, keep_duplicates, remove_missing, dry_run, workers)
    try:
        settings = load_config(config, **overrides)
        asked = config is not None or any(value is not None for name, value in overrides.items() if "index" in name)
        found = run(job, settings, settings.index if asked else None)
    except RagspecError as error:
        _console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if strict and found.skipped:
        raise typer.Exit(1)


def run(job: Job, settings: PipelineConfig, config: IndexConfig | None) -> Found:
    """The whole job; prints its summary. `config` None: the index's own, or the default. Raises: RagspecError."""
    files = find_files(job.inputs)
    begin = time.monotonic()
    encoder, at_once = _encoder(job, settings)
    options: dict[str, Any] = {"keep_duplicates": job.keep_duplicates, "passages_per_encode": at_once}
    found = Found(num_files=len(files))
    with IndexWriter(job.index_dir, encoder, config, **options) as writer, _progress(len(files)) as bar:
        ingest = Ingest(job, writer, found)
        if job.remove_missing:
            ingest.expect_again(files)
        for path, name in files:
            ingest.add_file(path, name)
            bar(writer.changes.encoded)
        writer.delete_unseen()
        writer.flush()
        manifest = None if job.dry_run else writer.commit()
        bar(writer.changes.encoded)
    _name_duplicates(found)
    _report(job, manifest, found, writer, time.monotonic() - begin)
    return found


class Ingest:
    """Takes files into a writer, one by one."""

    def __init__(self, job: Job, writer: IndexWriter, found: Found) -> None:
        self._job = job
        self._writer = writer
        self._found = found
        self._file_of: dict[str, str] = {}
        self._committed_passages = 0

    def expect_again(self, files: Sequence[tuple[Path, str]]) -> None:
        """Documents of these inputs are deleted in the end if none of the files holds them any more."""
        names = {name for _, name in files}
        folders = {name.split("/", 1)[0] for name in names if "/" in name}
        self._writer.unseen.update(
            document_id
            for document_id, source in self._writer.sources()
            if source in names or ("/" in source and source.split("/", 1)[0] in folders)
        )

    def add_file(self, path: Path, name: str) -> None:
        """A file that cannot be read is named and left out as a whole; what it held before stays."""
        try:
            for document in self._whole(path, name):
                self._add(document, name)
        except InputError as error:
            self._found.skipped.append(name)
            self._keep_source(name)
            _warn(f"skipped: {error}")

    def _whole(self, path: Path, name: str) -> Iterable[Document]:
        """All documents of a file or, for half of a file is worse than none, an InputError before the first of them."""
        if path.stat().st_size <= _READ_AT_ONCE_BYTES:
            return list(self._documents(path, name))
        deque(self._documents(path, name), maxlen=0)  # Why read twice: it need not fit the memory
        return self._documents(path, name)

    def _documents(self, path: Path, name: str) -> Iterator[Document]:
        for document in read_file(path, name):
            other = self._file_of.setdefault(document.id, name)
            if other != name:
                raise InputError(f"{path}: the id {document.id!r} is that of a document in {other}")
            owner, source = self._job.owner or document.owner, document.source or name
            yield dataclasses.replace(document, owner=owner, source=source)

    def _add(self, document: Document, name: str) -> None:
        if self._writer.upsert(document) is Outcome.DUPLICATE:
            self._found.duplicates.append(document.id)
        changes = self._writer.changes
        if changes.encoded - self._committed_passages >= _PASSAGES_PER_COMMIT and not self._job.dry_run:
            self._writer.commit()
            self._committed_passages = changes.encoded

    def _keep_source(self, name: str) -> None:
        self._writer.unseen.difference_update(
            document_id for document_id, source in self._writer.sources() if source == name
        )


class Unencoded:
    """An encoder for what is not to be kept: it counts and cuts as the real one, and its vectors are zero."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    @property
    def identity(self) -> EncoderIdentity:
        return self._encoder.identity

    @property
    def max_tokens(self) -> int:
        return self._encoder.max_tokens

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._encoder.count_tokens(texts)

    def encode(self, texts: Sequence[str], kind: Kind = "document") -> FloatArray:
        return np.zeros((len(texts), self.identity.dimension), np.float32)


def _encoder(job: Job, settings: PipelineConfig) -> tuple[TextEncoder, int]:
    """The encoder, and how many passages it wants at once."""
    if job.dry_run:
        return Unencoded(Encoder.load(settings.encoder)), PASSAGES_PER_ENCODE
    if job.workers == 1:
        return Encoder.load(settings.encoder), PASSAGES_PER_ENCODE
    import ray  # Why here: seconds of imports, only for those who want several processes

    from ragspec.cluster.encoding import EncoderPool

    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    pool = EncoderPool(settings.encoder, job.workers)
    return pool, pool.texts_at_once


@contextmanager
def _progress(num_files: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[passages]} passages"), console=_console) as bar:
        task = bar.add_task("files", total=num_files, passages=0)
        done = iter(range(1, num_files + 1))
        yield lambda passages: bar.update(task, completed=next(done, num_files), passages=passages)


def _name_duplicates(found: Found) -> None:
    for document_id in found.duplicates[:_NAMED_DUPLICATES]:
        _warn(f"duplicate: {document_id} has the text of another document and was left out")
    if len(found.duplicates) > _NAMED_DUPLICATES:
        _warn(f"and {len(found.duplicates) - _NAMED_DUPLICATES} more duplicates (--keep-duplicates indexes them)")


def _warn(message: str) -> None:
    _console.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _report(job: Job, manifest: Manifest | None, found: Found, writer: IndexWriter, elapsed_s: float) -> None:
    summary: dict[str, Any] = {"index_dir": str(job.index_dir), "dry_run": job.dry_run}
    if manifest is None:
        try:
            manifest = read_current(job.index_dir)[1]
        except StoreError:
            pass
    if manifest is not None:
        summary |= {
            "generation": manifest.generation_id,
            "documents": manifest.num_documents,
            "passages": manifest.num_passages,
            "dimension": manifest.encoder.dimension,
        }
    summary |= dataclasses.asdict(writer.changes)
    summary |= {"files": found.num_files, "skipped": found.skipped, "seconds": round(elapsed_s, 2)}
    summary["passages_per_s"] = round(writer.changes.encoded / elapsed_s, 1)
    print(json.dumps(summary))


if __name__ == "__main__":
    app()
