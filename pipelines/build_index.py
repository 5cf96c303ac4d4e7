"""Put files into an index, new or existing.

    python -m pipelines.build_index manual/ faq.jsonl "notes/**/*.md" --index my-index

Each file is indexed as a whole or not at all. A document records the real path of its file (`origin`), so that a later run finds
documents whose file is gone or has changed. Only new and changed documents are encoded. Work is committed every few thousand
passages, so after a kill the same command resumes. Files that cannot be read are reported and left out. The last line on stdout
is one JSON object; with `--watch`, one line follows each change.
"""

import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.text import Text

from pipelines.batch.options import exit_on_error
from pipelines.batch.ray_session import ray_session
from pipelines.file_ingest import FileIngest, FileList, IngestReport, NearDuplicates
from ragspec.cli.options import index_folder
from ragspec.cli.terminal import loading, safe, stderr_console
from ragspec.config import EncoderConfig, load_config
from ragspec.errors import IndexBusy, InputError
from ragspec.retrieval.encoder import Encoder, EncoderWrapper, FloatArray, TextEncoder, TextKind
from ragspec.retrieval.index.manifest import Manifest
from ragspec.retrieval.index.pointer import CURRENT
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import PASSAGES_PER_ENCODE, IndexWriter
from ragspec.retrieval.reading import NAMED_SUFFIXES, SUFFIXES, input_root, passed_over
from ragspec.retrieval.reading.bounded_reader import BoundedReader, ReadLimits, check_ocr

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_console = stderr_console()

_PASSAGES_PER_COMMIT = 2048
_POLL_S = 2.0
_READ_LIMITS = ReadLimits(max_text_bytes=512 * 2**20, timeout_s=900.0, memory_bytes=4 * 2**30)
"""Why more than for uploads: the files are the user's own."""

_SHOWN_KINDS = 8
_SHOWN_IDS = 20
_SHOWN_PARTS = 10
_INPUTS_HELP = f"Files, folders or quoted patterns: {' '.join(sorted(SUFFIXES))}"


@app.command(epilog="Example: ragspec index add manual/ faq.jsonl --index my-index")
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
    sync: Annotated[
        bool,
        typer.Option(
            "--sync",
            "--remove-missing",
            help="Also delete what the inputs no longer hold; --remove-missing is its former name.",
        ),
    ] = False,
    watch: Annotated[bool, typer.Option(help="Go on, and follow every change of the files; implies --sync.")] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Leave out files and folders by name, or by path below an input; may be repeated."
        ),
    ] = None,
    keep_originals: Annotated[
        bool, typer.Option(help="Keep copies of the files in the index, so that quotes are shown on their pages.")
    ] = False,
    ocr: Annotated[bool, typer.Option(help="Read scanned pages of PDF files, with the program ocrmypdf.")] = False,
    rebuild: Annotated[bool, typer.Option(help="Replace the index by one of these inputs only.")] = False,
    renew: Annotated[
        bool,
        typer.Option(help="With --sync: write the whole index anew by today's rules, documents of other inputs too."),
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Report the changes without making them.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if a file was skipped or read in part.")] = False,
    workers: Annotated[int, typer.Option(help="Processes that encode, through Ray.", min=1)] = 1,
    config: Annotated[Path | None, typer.Option(help="A YAML configuration; the options above win.")] = None,
) -> None:
    """Read, chunk, encode and index documents; unchanged documents stay, changed ones are replaced.

    `ragspec index sync` also deletes the documents that the inputs no longer hold.
    """
    overrides = {
        "encoder.model": encoder,
        "index.chunking.max_chars": max_chars,
        "index.chunking.max_tokens": max_tokens,
        "index.chunking.overlap_chars": overlap_chars,
        "index.words.language": language,
        "index.dense.kind": dense,
    }
    sync = sync or watch
    if watch and (dry_run or rebuild):
        raise typer.BadParameter("--watch goes with neither --dry-run nor --rebuild")
    if renew and (rebuild or not sync):
        raise typer.BadParameter("--renew goes with --sync, and not with --rebuild")
    with exit_on_error():
        settings, index = load_config(config, **overrides), index_folder(index, config)
        is_given = config or any(value for name, value in overrides.items() if name.startswith("index"))
        inputs_of = partial(FileList.of, inputs, exclude or [])
        found = inputs_of(allow_none=sync)
        if ocr:
            check_ocr()
        with (
            _encoder(settings.encoder, dry_run, workers) as (text_encoder, passages_per_encode),
            _folder(index, dry_run) as folder,
            BoundedReader(_READ_LIMITS, ocr) as reader,
        ):
            open_writer = partial(
                IndexWriter,
                folder,
                text_encoder,
                settings.index if is_given else None,
                keep_duplicates=keep_duplicates,
                passages_per_encode=passages_per_encode,
            )
            options = sync, rebuild, renew, keep_duplicates, keep_originals, dry_run
            indexing = Indexing(inputs, index, folder, open_writer, reader, owner, *options)
            ingest = indexing.follow(found, inputs_of) if watch else indexing.run(found)
    unread = itertools.chain.from_iterable(ingest.report.unread.values())
    if strict and (ingest.report.skipped or any(part.place for part in unread)):
        raise typer.Exit(1)


@dataclass
class Indexing:
    """Brings an index to the state of its inputs. `index`: the folder's name in summaries; a dry run may write to another. The
    last fields are the options of their names."""

    inputs: Sequence[str]
    index: Path
    folder: Path
    open_writer: Callable[..., IndexWriter]
    reader: BoundedReader
    owner: str
    sync: bool
    rebuild: bool
    renew: bool
    keep_duplicates: bool
    keep_originals: bool
    dry_run: bool

    def run(self, found: FileList, files: Sequence[tuple[Path, str]] | None = None) -> FileIngest:
        """Reads `files`, by default all that were found, commits, and prints the summary. Raises: RagspecError."""
        begin, is_new = time.monotonic(), self.rebuild or self.renew
        near = None if self.keep_duplicates else NearDuplicates(name for _, name in found.files)
        per_commit = None if self.dry_run or is_new else _PASSAGES_PER_COMMIT
        with self.open_writer(replace=is_new) as writer:
            originals = self.keep_originals and not self.dry_run
            ingest = FileIngest(writer, self.reader, self.owner, near, originals, per_commit)
            known = found.excluded.union(str(path.resolve()) for path, _ in found.files)
            named = [] if self.rebuild else self._named_before(writer, known)
            files = [*(found.files if files is None else files), *named]
            self.reader.expect(files)
            add_files(files, ingest)
            self._settle_others(ingest, found)
            passed = passed_over(self.inputs, known.union(str(path) for path, _ in named))
            others = Counter(
                (path.suffix.lower() or path.name) if path.is_file() else "pipe or broken link" for path in passed
            )
            with loading(_console, "encoding the last passages"):
                writer.flush()
            _warn(ingest.report, others, self.dry_run)
            if self.rebuild and writer.is_empty():
                raise InputError("nothing of these inputs could be indexed, so the index stays as it is")
            manifest = None if self.dry_run else writer.commit()
        summary = summary_of(manifest, ingest.report, writer, time.monotonic() - begin)
        summary |= {"excluded": len(found.excluded), "passed_over": dict(others)}
        summary |= {"would": ingest.report.changed} if self.dry_run else {}
        print(json.dumps({"index_dir": str(self.index), "dry_run": self.dry_run, **summary}), flush=True)
        return ingest

    def follow(self, found: FileList, inputs_of: Callable[..., FileList]) -> NoReturn:
        """Runs at once and after each change of the inputs; waits while another process writes the index."""
        files = found.files
        while True:
            try:
                ingest = self.run(found, files)
            except IndexBusy:
                time.sleep(_POLL_S)
                continue
            self.renew = False
            found, before = _changed(found, inputs_of), found
            names = {name for _, name in found.files if found.differs(name, before) or ingest.must_repeat(name)}
            files = tuple(each for each in found.files if each[1] in names)

    def _named_before(self, writer: IndexWriter, known: Collection[str]) -> list[tuple[Path, str]]:
        """The index's settings below the inputs that these do not name: named once, they are followed. `known`: real paths."""
        roots, prefix = [input_root(given) for given in self.inputs], f"{self.owner}/" if self.owner else ""
        found = (
            (Path(origin), document_id.removeprefix(prefix))
            for document_id, owner, origin in writer.origins()
            if owner == self.owner and origin not in known
        )
        return [
            (path, name)
            for path, name in found
            if path.suffix.lower() in NAMED_SUFFIXES and path.exists() and any(map(path.is_relative_to, roots))
        ]

    def _settle_others(self, ingest: FileIngest, found: FileList) -> None:
        """Keeps or deletes the documents that no file of the run holds."""
        roots = [input_root(given) for given in self.inputs]
        if self.renew and (self.folder / CURRENT).exists():
            ingest.keep_others(Store.open(self.folder).documents(), roots, found.excluded)
        if self.sync:
            ingest.delete_missing(roots, found.excluded)
        if not (self.keep_duplicates or self.rebuild or self.renew):
            ingest.delete_moved()
        ingest.delete_unseen()
        ingest.retry_duplicates()


def add_files(files: Sequence[tuple[Path, str]], ingest: FileIngest) -> None:
    """Raises: SaveError, EngineError."""
    sizes = [path.stat().st_size if path.exists() else 0 for path, _ in files]
    done, total = 0, sum(sizes)
    with loading(_console, "reading files") as say:
        for (path, name), size in zip(files, sizes, strict=True):
            say("reading and encoding files, in KiB", done // 1024, total // 1024)
            ingest.add_file(path, name)
            done += size


def _changed(before: FileList, inputs_of: Callable[..., FileList]) -> FileList:
    """Waits for a change of the inputs' files. An input that is away is waited for."""
    while True:
        time.sleep(_POLL_S)
        with suppress(InputError):
            if (now := inputs_of(allow_none=True)) != before:
                return now


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


def _warn(report: IngestReport, others: Counter[str], dry_run: bool) -> None:
    """`others`: how many files of each kind, a suffix mostly, were passed over."""
    warnings = [f"skipped: {reason}" for reason in report.skipped.values()]
    for name, parts in report.unread.items():
        warnings += [f"read in part: {name}, {part}" for part in parts[:_SHOWN_PARTS]]
        if len(parts) > _SHOWN_PARTS:
            warnings.append(f"read in part: {name}, and {len(parts) - _SHOWN_PARTS} more places")
    for name, number in (+report.private).items():
        warnings.append(
            f"private: {number} rows of {name} are shown to their `owner` alone; another name of the column shows them to all"
        )
    left_out = [f"duplicate: {name} has the text of another document and was left out" for name in report.duplicates]
    for name, original in report.near_duplicates.items():
        left_out.append(f"near-duplicate: {name} says what {original} says and was left out")
    warnings += left_out[:_SHOWN_IDS]
    if len(left_out) > _SHOWN_IDS:
        warnings.append(f"and {len(left_out) - _SHOWN_IDS} more duplicates (--keep-duplicates indexes them)")
    if others:
        kinds = ", ".join(f"{suffix} ({count})" for suffix, count in others.most_common(_SHOWN_KINDS))
        more = f" and {len(others) - _SHOWN_KINDS} more kinds" if len(others) > _SHOWN_KINDS else ""
        if named := ", ".join(sorted({*others}.intersection(NAMED_SUFFIXES))):
            more += f"; {named} are read where they are named"
        warnings.append(f"passed over: {others.total()} files of other kinds: {kinds}{more}")
    for verb, ids in zip(("add", "update", "delete"), report.changed.values(), strict=True) if dry_run else ():
        more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
        warnings.append(f"would {verb} {len(ids)} documents{': ' * bool(ids)}{', '.join(ids[:_SHOWN_IDS])}{more}")
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
        "near_duplicates": report.near_duplicates,
        "unread": {name: [str(part) for part in parts[:_SHOWN_PARTS]] for name, parts in report.unread.items()},
        "seconds": round(elapsed_s, 2),
        "passages_per_s": round(writer.changes.encoded / elapsed_s, 1),
    }


class ZeroEncoder(EncoderWrapper):
    """An encoder for dry runs: it counts and cuts tokens like the real encoder, and its vectors are zero."""

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        return np.zeros((len(texts), self.identity.dimension), np.float32)


if __name__ == "__main__":
    app()
