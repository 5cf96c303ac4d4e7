"""Put files into an index, new or existing.

    python -m pipelines.build_index manual/ faq.jsonl "notes/**/*.md" --index my-index

Each file is indexed as a whole or not at all. A document records the real path of its file (`origin`), so that a later run finds
documents whose file is gone or has changed. Only new and changed documents are encoded. Work is committed every few thousand
passages, so after a kill the same command resumes. Files that cannot be read are reported and left out. The last line on stdout
is one JSON object.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.text import Text

from pipelines.batch.options import exit_on_error
from pipelines.batch.ray_session import ray_session
from ragspec.cli.options import index_folder
from ragspec.cli.terminal import loading, safe, stderr_console
from ragspec.config import EncoderConfig, load_config
from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.encoder import Encoder, EncoderWrapper, FloatArray, TextEncoder, TextKind
from ragspec.retrieval.index.content_key import check_document
from ragspec.retrieval.index.manifest import Manifest
from ragspec.retrieval.index.pointer import CURRENT
from ragspec.retrieval.index.writer import PASSAGES_PER_ENCODE, IndexWriter, UpsertOutcome
from ragspec.retrieval.reading import SUFFIXES, Unread, find_files, input_root, passed_over, read_file

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = stderr_console()

_PASSAGES_PER_COMMIT = 16_384
_READ_AT_ONCE_BYTES = 64 * 2**20
_SHOWN_KINDS = 8
_SHOWN_DUPLICATES = 20
_SHOWN_PARTS = 10
_INPUTS_HELP = f"Files, folders or quoted patterns: {' '.join(sorted(SUFFIXES))}"


@app.command()
def main(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help=_INPUTS_HELP)],
    index: Annotated[
        Path | None, typer.Option(help="The index's folder, made if it is not there; default: the configuration's.")
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="A sentence-transformers name or path.")] = None,
    max_chars: Annotated[int | None, typer.Option(help="Longest passage, in characters.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest passage, in the encoder's tokens; default: the encoder's limit.")
    ] = None,
    overlap_chars: Annotated[
        int | None, typer.Option(help="Whole sentences shared by neighbours, in characters.")
    ] = None,
    language: Annotated[str | None, typer.Option(help="Language of the stemmer; none: no stemming.")] = None,
    dense: Annotated[str | None, typer.Option(help="Vector search: exact, hnsw or ivf.")] = None,
    owner: Annotated[
        str, typer.Option(help="The only tenant who may see these documents; a prefix of their ids.")
    ] = "",
    keep_duplicates: Annotated[bool, typer.Option(help="Index documents whose text another document has.")] = False,
    remove_missing: Annotated[
        bool, typer.Option(help="Delete documents of these inputs that are no longer in a file.")
    ] = False,
    rebuild: Annotated[bool, typer.Option(help="Replace the index by one of these inputs only.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Report the changes without making them.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a file was skipped.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that encode, through Ray.", min=1)] = 1,
    config: Annotated[Path | None, typer.Option(help="A YAML configuration; the options above win.")] = None,
) -> None:
    """Read, chunk, encode and index documents; unchanged documents stay, changed ones are replaced."""
    overrides = {
        "encoder.model": encoder,
        "index.chunking.max_chars": max_chars,
        "index.chunking.max_tokens": max_tokens,
        "index.chunking.overlap_chars": overlap_chars,
        "index.words.language": language,
        "index.dense.kind": dense,
    }
    begin = time.monotonic()
    with exit_on_error():
        settings, index = load_config(config, **overrides), index_folder(index, config)
        index_overrides = [value for name, value in overrides.items() if name.startswith("index") and value is not None]
        files = find_files(inputs, allow_none=remove_missing)
        with (
            _encoder(settings.encoder, dry_run, workers) as (text_encoder, passages_per_encode),
            _folder(index, dry_run) as folder,
            IndexWriter(
                folder,
                text_encoder,
                settings.index if config or index_overrides else None,
                replace=rebuild,
                keep_duplicates=keep_duplicates,
                passages_per_encode=passages_per_encode,
            ) as writer,
        ):
            ingest = FileIngest(writer, owner, None if dry_run or rebuild else _PASSAGES_PER_COMMIT)
            add_files(files, ingest)
            if remove_missing:
                ingest.delete_missing([input_root(given) for given in inputs])
            writer.delete_unseen()
            ingest.retry_duplicates()
            writer.flush()
            others = Counter(path.suffix.lower() or path.name for path in passed_over(inputs))
            _warn(ingest.report, others)
            if rebuild and writer.is_empty():
                raise InputError("nothing of these inputs could be indexed, so the index stays as it is")
            manifest = None if dry_run else writer.commit()
    summary = summary_of(manifest, ingest.report, writer, time.monotonic() - begin) | {"passed_over": dict(others)}
    print(json.dumps({"index_dir": str(index), "dry_run": dry_run, **summary}))
    if strict and ingest.report.skipped:
        raise typer.Exit(1)


def add_files(files: list[tuple[Path, str]], ingest: FileIngest) -> None:
    """Raises: SaveError, EngineError."""
    with loading(_console, "reading files") as say:
        for number, (path, name) in enumerate(files):
            say("reading and encoding files", number, len(files))
            ingest.add_file(path, name)


@contextmanager
def _folder(index: Path, dry_run: bool) -> Iterator[Path]:
    """The index's folder; a temporary one if a dry run would have to create it."""
    is_missing = dry_run and not (index / CURRENT).exists()
    with tempfile.TemporaryDirectory(prefix="ragspec-") if is_missing else nullcontext(index) as folder:
        yield Path(folder)


@contextmanager
def _encoder(config: EncoderConfig, dry_run: bool, num_workers: int) -> Iterator[tuple[TextEncoder, int]]:
    """The encoder, and the number of passages for each call."""
    if dry_run:
        yield ZeroEncoder(Encoder.load(config)), PASSAGES_PER_ENCODE
    elif num_workers == 1:
        yield Encoder.load(config), PASSAGES_PER_ENCODE
    else:
        with ray_session(None):
            from ragspec.cluster.remote_retrieval.encoders import EncoderPool  # Why here: only this branch needs Ray

            pool = EncoderPool(config, num_workers)
            yield pool, pool.texts_at_once


def _warn(report: IngestReport, others: Counter[str]) -> None:
    """`others`: how many files of each suffix cannot be read."""
    num_hidden = len(report.duplicates) - _SHOWN_DUPLICATES
    warnings = [f"skipped: {reason}" for reason in report.skipped.values()]
    for name, parts in report.unread.items():
        warnings += [f"read in part: {name}, {part}" for part in parts[:_SHOWN_PARTS]]
        if len(parts) > _SHOWN_PARTS:
            warnings.append(f"read in part: {name}, and {len(parts) - _SHOWN_PARTS} more places")
    for document_id in list(report.duplicates)[:_SHOWN_DUPLICATES]:
        warnings.append(f"duplicate: {document_id} has the text of another document and was left out")
    if num_hidden > 0:
        warnings.append(f"and {num_hidden} more duplicates (--keep-duplicates indexes them)")
    if others:
        kinds = ", ".join(f"{suffix} ({count})" for suffix, count in others.most_common(_SHOWN_KINDS))
        more = f" and {len(others) - _SHOWN_KINDS} more kinds" if len(others) > _SHOWN_KINDS else ""
        warnings.append(f"passed over: {others.total()} files of kinds that cannot be read: {kinds}{more}")
    for warning in warnings:
        _console.print(Text(safe(warning), "yellow"), soft_wrap=True)


def summary_of(
    manifest: Manifest | None, report: IngestReport, writer: IndexWriter, elapsed_s: float
) -> dict[str, Any]:
    """Plain values, for JSON; without `manifest`, nothing was committed."""
    summary: dict[str, Any] = {}
    if manifest is not None:
        summary |= {"generation": manifest.generation_id, "documents": manifest.num_documents}
        summary |= {"passages": manifest.num_passages, "dimension": manifest.encoder.dimension}
    return {
        **summary,
        **asdict(writer.changes),
        "files": report.num_files,
        "skipped": list(report.skipped),
        "unread": {name: [str(part) for part in parts[:_SHOWN_PARTS]] for name, parts in report.unread.items()},
        "seconds": round(elapsed_s, 2),
        "passages_per_s": round(writer.changes.encoded / elapsed_s, 1),
    }


@dataclass
class IngestReport:
    """`skipped`: file names with the reason. `unread`: parts of indexed files. `duplicates`: ids of documents left out, with
    their file's path and name."""

    num_files: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    unread: dict[str, list[Unread]] = field(default_factory=dict)
    duplicates: dict[str, tuple[Path, str]] = field(default_factory=dict)


class FileIngest:
    """One run over files. `owner`: the tenant of all documents; empty if the documents name their own."""

    def __init__(self, writer: IndexWriter, owner: str, passages_per_commit: int | None) -> None:
        """`passages_per_commit` None: the caller commits, at the end."""
        self.report = IngestReport()
        self._writer = writer
        self._owner = owner
        self._passages_per_commit = passages_per_commit
        self._committed_passages = 0
        self._origin_of: dict[str, str] = {}
        self._read: set[str] = set()
        self._owners = {owner}

    def add_file(self, path: Path, name: str) -> None:
        """A file that cannot be read is left out as a whole; the documents that the index has of it stay."""
        self.report.num_files += 1
        try:
            for document in self._valid_documents(path, name):
                self._add(document, path, name)
            self._read.add(str(path.resolve()))
        except InputError as error:
            self.report.skipped[name] = str(error)

    def delete_missing(self, roots: Sequence[Path]) -> None:
        """Delete documents below `roots` whose file is gone, or was read in this run without them."""
        for document_id, owner, origin in list(self._writer.origins()):
            if document_id in self._origin_of or owner not in self._owners or not _is_below(origin, roots):
                continue
            if origin in self._read or not Path(origin).exists():
                self._writer.delete(document_id)

    def retry_duplicates(self) -> None:
        """Index the duplicates of documents that this run has changed or deleted since."""
        for path, name in dict.fromkeys(self.report.duplicates.values()):
            try:
                for document in self._documents(path, name):
                    was_left_out = self.report.duplicates.get(document.id) == (path, name)
                    if was_left_out and self._writer.duplicate_of(document) is None:
                        self._writer.upsert(document)
                        self._writer.changes.duplicate -= 1
                        del self.report.duplicates[document.id]
            except InputError as error:  # the file is gone since it was read
                self.report.skipped[name] = str(error)

    def _valid_documents(self, path: Path, name: str) -> Iterable[Document]:
        """All documents of a file. Raises: InputError before the first document, so that no file is indexed in part."""
        before = _size_and_mtime(path)
        ids: set[str] = set()
        unread: list[Unread] = []
        documents = self._new_documents(path, name, ids, unread)
        is_small = before[0] <= _READ_AT_ONCE_BYTES
        valid: Iterable[Document] = list(documents) if is_small else deque(documents, maxlen=0)
        if _size_and_mtime(path) != before:
            raise InputError(f"{path} was changed while it was read")
        self._origin_of.update(dict.fromkeys(ids, str(path.resolve())))
        if unread:
            self.report.unread[name] = unread
        return valid if is_small else self._documents(path, name)

    def _new_documents(self, path: Path, name: str, ids: set[str], unread: list[Unread]) -> Iterator[Document]:
        """Raises: InputError for an id that this run or another existing file has already."""
        for document in self._documents(path, name, unread):
            if document.id in ids:
                raise InputError(f"{path} holds two documents of the id {document.id!r}")
            ids.add(document.id)
            is_leaving = document.id in self._writer.unseen  # a rebuild drops it unless a file holds it
            known = None if is_leaving else self._writer.owner_and_origin(document.id)
            other = self._origin_of.get(document.id) or (known[1] if known else "")
            if other not in ("", document.origin) and Path(other).exists():
                raise InputError(f"{path}: the id {document.id!r} is that of a document in {other}")
            if known and known[0] != document.owner:
                raise InputError(f"{path}: the id {document.id!r} is that of a document of another owner")
            yield check_document(document)

    def _documents(self, path: Path, name: str, unread: list[Unread] | None = None) -> Iterator[Document]:
        """Why the owner is part of the ids: two tenants may have files of the same name."""
        prefix, origin = f"{self._owner}/" if self._owner else "", str(path.resolve())
        for document in read_file(path, name, unread):
            owner = self._owner or document.owner
            yield replace(document, id=prefix + document.id, owner=owner, source=document.source or name, origin=origin)

    def _add(self, document: Document, path: Path, name: str) -> None:
        self._owners.add(document.owner)
        if self._writer.upsert(document) is UpsertOutcome.DUPLICATE:
            self.report.duplicates[document.id] = path, name
        encoded = self._writer.changes.encoded
        if self._passages_per_commit and encoded - self._committed_passages >= self._passages_per_commit:
            self._writer.commit()
            self._committed_passages = encoded


class ZeroEncoder(EncoderWrapper):
    """An encoder for dry runs: it counts and cuts tokens like the real encoder, and its vectors are zero."""

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        return np.zeros((len(texts), self.identity.dimension), np.float32)


def _size_and_mtime(path: Path) -> tuple[int, int]:
    """Bytes and nanoseconds. Raises: InputError."""
    try:
        stat = path.stat()
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause.strerror}") from cause
    return stat.st_size, stat.st_mtime_ns


def _is_below(origin: str, roots: Sequence[Path]) -> bool:
    path = Path(origin)
    return bool(origin) and any(path.is_relative_to(root) for root in roots)


if __name__ == "__main__":
    app()
