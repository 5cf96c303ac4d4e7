"""Put files into an index: a new one, or one that is there already.

    python -m pipelines.build_index manual/ faq.jsonl "notes/**/*.md" --index my-index

Only what is new or changed is encoded. What is done is committed every some thousand passages, so after a kill the same command
goes on where it stopped. Files that cannot be read are named and left out. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipelines.batch.index_ingest import Found, Ingest, Unencoded
from pipelines.batch.ray_session import ray_session
from ragspec.cli.terminal import one_line, safe
from ragspec.config import IndexConfig, PipelineConfig, load_config
from ragspec.errors import InputError, RagspecError
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.manifest import CURRENT, Manifest
from ragspec.retrieval.index.writer import PASSAGES_PER_ENCODE, IndexWriter
from ragspec.retrieval.reading import find_files, input_root

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = Console(stderr=True)

_PASSAGES_PER_COMMIT = 16_384
_NAMED_DUPLICATES = 20


@dataclass(frozen=True)
class Job:
    """What the command line decides, beside the index's own settings."""

    inputs: tuple[str, ...]
    index_dir: Path
    owner: str = ""
    keep_duplicates: bool = False
    remove_missing: bool = False
    rebuild: bool = False
    dry_run: bool = False
    workers: int = 1


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
    owner: Annotated[str, typer.Option(help="The tenant who alone may see these documents; leads their ids.")] = "",
    keep_duplicates: Annotated[bool, typer.Option(help="Index a text again that another document has.")] = False,
    remove_missing: Annotated[
        bool, typer.Option(help="Delete documents of these inputs whose file is gone, or holds them no more.")
    ] = False,
    rebuild: Annotated[bool, typer.Option(help="Make the index anew, of these inputs alone.")] = False,
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
    job = Job(tuple(inputs), index, owner, keep_duplicates, remove_missing, rebuild, dry_run, workers)
    try:
        settings = load_config(config, **overrides)
        asked = config is not None or any(value is not None for name, value in overrides.items() if "index" in name)
        found = run(job, settings, settings.index if asked else None)
    except RagspecError as error:
        _console.print(f"error: {one_line(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if strict and found.skipped:
        raise typer.Exit(1)


def run(job: Job, settings: PipelineConfig, config: IndexConfig | None) -> Found:
    """The whole job; prints its summary. `config` None: the index's own, or the default. Raises: RagspecError."""
    files = find_files(job.inputs, allow_none=job.remove_missing)
    begin = time.monotonic()
    on_the_way = None if job.dry_run or job.rebuild else _PASSAGES_PER_COMMIT
    with (
        _encoder(job, settings) as (encoder, at_once),
        _place(job) as index_dir,
        IndexWriter(
            index_dir,
            encoder,
            config,
            replace=job.rebuild,
            keep_duplicates=job.keep_duplicates,
            passages_per_encode=at_once,
        ) as writer,
        _progress(len(files)) as bar,
    ):
        ingest = Ingest(writer, job.owner, on_the_way)
        for path, name in files:
            ingest.add_file(path, name)
            bar(writer.changes.encoded)
        if job.remove_missing:
            ingest.delete_missing([input_root(given) for given in job.inputs])
        writer.delete_unseen()
        ingest.reconsider_duplicates()
        writer.flush()
        if job.rebuild and writer.is_empty():
            _warn(ingest.found)
            raise InputError("nothing of these inputs could be indexed, so the index stays as it is")
        manifest = None if job.dry_run else writer.commit()
        bar(writer.changes.encoded)
    _warn(ingest.found)
    _report(job, manifest, ingest.found, writer, time.monotonic() - begin)
    return ingest.found


@contextmanager
def _place(job: Job) -> Iterator[Path]:
    """The index's folder; for the rehearsal of a new index another one, so that none is made."""
    if not job.dry_run or (job.index_dir / CURRENT).exists():
        yield job.index_dir
        return
    with tempfile.TemporaryDirectory(prefix="ragspec-") as scratch:
        yield Path(scratch)


@contextmanager
def _encoder(job: Job, settings: PipelineConfig) -> Iterator[tuple[TextEncoder, int]]:
    """The encoder, and how many passages it wants at once."""
    if job.dry_run:
        yield Unencoded(Encoder.load(settings.encoder)), PASSAGES_PER_ENCODE
    elif job.workers == 1:
        yield Encoder.load(settings.encoder), PASSAGES_PER_ENCODE
    else:
        with ray_session(None):
            from ragspec.cluster.encoding import EncoderPool  # Why here: Ray, only for those who want several processes

            pool = EncoderPool(settings.encoder, job.workers)
            yield pool, pool.texts_at_once


@contextmanager
def _progress(num_files: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[passages]} passages"), console=_console) as bar:
        task = bar.add_task("files", total=num_files, passages=0)
        done = iter(range(1, num_files + 1))
        yield lambda passages: bar.update(task, completed=next(done, num_files), passages=passages)


def _warn(found: Found) -> None:
    for reason in found.skipped.values():
        _say(f"skipped: {reason}")
    for document_id in list(found.duplicates)[:_NAMED_DUPLICATES]:
        _say(f"duplicate: {document_id} has the text of another document and was left out")
    if len(found.duplicates) > _NAMED_DUPLICATES:
        _say(f"and {len(found.duplicates) - _NAMED_DUPLICATES} more duplicates (--keep-duplicates indexes them)")


def _say(message: str) -> None:
    _console.print(safe(message), style="yellow", markup=False, highlight=False, soft_wrap=True)


def _report(job: Job, manifest: Manifest | None, found: Found, writer: IndexWriter, elapsed_s: float) -> None:
    summary: dict[str, Any] = {"index_dir": str(job.index_dir), "dry_run": job.dry_run}
    if manifest is not None:
        summary |= {
            "generation": manifest.generation_id,
            "documents": manifest.num_documents,
            "passages": manifest.num_passages,
            "dimension": manifest.encoder.dimension,
        }
    summary |= dataclasses.asdict(writer.changes)
    summary |= {"files": found.num_files, "skipped": list(found.skipped), "seconds": round(elapsed_s, 2)}
    summary["passages_per_s"] = round(writer.changes.encoded / elapsed_s, 1)
    print(json.dumps(summary))


if __name__ == "__main__":
    app()
