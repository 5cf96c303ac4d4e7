"""Put files into an index, new or existing.

    python -m pipelines.build_index manual/ faq.jsonl "notes/**/*.md" --index my-index

Only new and changed documents are encoded. Work is committed every few thousand passages, so after a kill the same command
resumes. Files that cannot be read are reported and left out. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipelines.batch.index_ingest import FileIngest, IngestReport, ZeroEncoder
from pipelines.batch.options import exit_on_error
from pipelines.batch.ray_session import ray_session
from ragspec.cli.terminal import safe
from ragspec.config import EncoderConfig, load_config
from ragspec.errors import InputError
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.manifest import Manifest
from ragspec.retrieval.index.pointer import CURRENT
from ragspec.retrieval.index.writer import PASSAGES_PER_ENCODE, IndexWriter
from ragspec.retrieval.reading import SUFFIXES, find_files, input_root, passed_over

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = Console(stderr=True)

_PASSAGES_PER_COMMIT = 16_384
_SHOWN_KINDS = 8
_SHOWN_DUPLICATES = 20
_INPUTS_HELP = f"Files, folders or quoted patterns: {' '.join(sorted(SUFFIXES))}"


@app.command()
def main(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help=_INPUTS_HELP)],
    index: Annotated[Path, typer.Option(help="The index's folder; made if it is not there.")],
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
        settings = load_config(config, **overrides)
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
            add_files(files, ingest, writer)
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


def add_files(files: list[tuple[Path, str]], ingest: FileIngest, writer: IndexWriter) -> None:
    """Adds files with a progress bar. Raises: SaveError, EngineError."""
    columns = (TextColumn("files"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[passages]} passages"), console=_console) as bar:
        task = bar.add_task("files", total=len(files), passages=0)
        for path, name in files:
            ingest.add_file(path, name)
            bar.update(task, advance=1, passages=writer.changes.encoded)


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
    for document_id in list(report.duplicates)[:_SHOWN_DUPLICATES]:
        warnings.append(f"duplicate: {document_id} has the text of another document and was left out")
    if num_hidden > 0:
        warnings.append(f"and {num_hidden} more duplicates (--keep-duplicates indexes them)")
    if others:
        kinds = ", ".join(f"{suffix} ({count})" for suffix, count in others.most_common(_SHOWN_KINDS))
        more = f" and {len(others) - _SHOWN_KINDS} more kinds" if len(others) > _SHOWN_KINDS else ""
        warnings.append(f"passed over: {others.total()} files of kinds that cannot be read: {kinds}{more}")
    for warning in warnings:
        _console.print(safe(warning), style="yellow", markup=False, highlight=False, soft_wrap=True)


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
        **dataclasses.asdict(writer.changes),
        "files": report.num_files,
        "skipped": list(report.skipped),
        "seconds": round(elapsed_s, 2),
        "passages_per_s": round(writer.changes.encoded / elapsed_s, 1),
    }


if __name__ == "__main__":
    app()
