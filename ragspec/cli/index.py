"""`ragspec index`: the commands that list, delete, check, compact and back up the documents of an index.

Owns what these commands print. Adding files is the job `pipelines.build_index`; `add` passes its arguments on to that job. Each
command imports what it needs when it runs, so that `ragspec --help` loads neither numpy nor torch.

    $ ragspec index list --index my-index
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.text import Text

from ragspec.cli.options import PASSED_ON, AsJson, Config, Data, Index, group, index_folder, overrides, pass_on
from ragspec.cli.terminal import data_folder, note, plain_table, safe, stderr_console, stdout_console
from ragspec.config import load_config, load_settings
from ragspec.errors import InputError, StoreCorrupt

if TYPE_CHECKING:
    from ragspec.retrieval.index.manifest import Manifest
    from ragspec.retrieval.index.store import Store
    from ragspec.retrieval.index.writer import IndexWriter
    from services.settings import ServiceSettings

_SHOWN_DOCUMENTS = 20
_OTHER_COLUMNS = 60

index = group("index", "Documents in, out and checked.")


@index.command(context_settings=PASSED_ON)
def add(context: typer.Context) -> None:
    """Put files and folders in: ragspec index add manual/ faq.jsonl --index DIR"""
    pass_on("pipelines.build_index", context.args, "ragspec index add")


@index.command(context_settings=PASSED_ON)
def sync(context: typer.Context) -> None:
    """Make the index follow folders: adds, changes and deletes; --watch goes on: ragspec index sync manual/ --index DIR"""
    pass_on("pipelines.build_index", ["--sync", *context.args], "ragspec index sync")


_IDS_HELP = 'Documents by id, by folder (manual/old) or by glob ("manual/**/*.pdf"), of ids or of files.'


@index.command(epilog="Example: ragspec index delete 'old/**/*.pdf' --index my-index")
def delete(
    index: Index = None,
    config: Config = None,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help=_IDS_HELP)] = None,
    source: Annotated[list[str] | None, typer.Option(help="All documents of a source; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be deleted; change nothing.")] = False,
) -> None:
    """Take documents out, by id, folder, glob or source."""
    from ragspec.retrieval.index.writer import IndexWriter

    if not ids and not source:
        raise typer.BadParameter("name documents by id, folder or glob, or a source with --source")
    with IndexWriter(index_folder(index, config)) as writer:  # an unknown id or source raises before the commit
        found = {given: _documents_of(writer, given) for given in ids or ()}
        for given, documents in found.items():
            if not documents:
                raise InputError(f"no document has the id {given!r}, nor is any below it; nothing was deleted")
        before = {document_id for document_id, *_ in writer.origins()}
        for name in dict.fromkeys(source or ()):
            if not writer.delete_source(name):
                raise InputError(f"no document comes from {name!r}; nothing was deleted")
        for document_id in itertools.chain(*found.values()):
            writer.delete(document_id)
        gone = sorted(before - {document_id for document_id, *_ in writer.origins()})
        for document_id in gone[:_SHOWN_DOCUMENTS]:
            note(stderr_console(), f"{'would delete' if dry_run else 'deleted'} {document_id}")
        if len(gone) > _SHOWN_DOCUMENTS:
            note(stderr_console(), f"and {len(gone) - _SHOWN_DOCUMENTS} more")
        manifest = None if dry_run else writer.commit()
        would = {"would": {"delete": gone}} if dry_run else {}
        _print_summary(manifest, {"deleted": writer.changes.deleted, "dry_run": dry_run, **would})


def _documents_of(writer: IndexWriter, given: str) -> list[str]:
    """The ids of the document of that id; without one, of all below that folder or glob, by their ids or their files."""
    if writer.owner_and_origin(given) is not None:
        return [given]
    if not given:
        return []
    of_ids, of_files = _glob(given), _glob(str(Path(given).resolve()))
    return [name for name, _, origin in writer.origins() if of_ids.fullmatch(name) or of_files.fullmatch(origin)]


def _glob(pattern: str) -> re.Pattern[str]:
    """Matches what a shell's glob matches, with `**` for any number of folders, and everything below that."""
    rules = {r"\*\*/": "(?:.*/)?", r"\*\*": ".*", r"\*": "[^/]*", r"\?": "[^/]"}
    regex = re.escape(pattern.rstrip("/"))
    for sign, rule in rules.items():
        regex = regex.replace(sign, rule)
    return re.compile(f"{regex}(?:/.*)?", re.DOTALL)


@index.command("list", epilog="Example: ragspec index list --index my-index")
def list_documents(
    index: Index = None,
    config: Config = None,
    limit: Annotated[int, typer.Option(help="Most documents to show.", min=0)] = 50,
    as_json: AsJson = False,
) -> None:
    """What is in the index."""
    from ragspec.retrieval.index.store import Store

    store = Store.open(index_folder(index, config))
    rows = sorted(_documents(store), key=lambda row: _natural(row["id"]))
    if as_json:
        print(json.dumps({**_statistics(store.manifest), "list": rows}))
        return
    console = stdout_console()
    console.print(Text(_headline(store.manifest), "bold"))
    table = plain_table("id", "title", "source", "owner", "passages", right=("passages",))
    for row in rows[:limit]:
        table.add_row(*(Text(safe(str(value))) for value in row.values()))
    table.columns[0].no_wrap = True  # Why: `index delete` takes an id that was copied
    width = max((cell_len(safe(row["id"])) for row in rows[:limit]), default=0) + _OTHER_COLUMNS
    console.width = max(console.width, width)
    console.print(table)
    if len(rows) > limit:
        console.print(Text(f"and {len(rows) - limit} more (--limit {len(rows)} shows all)", "dim"))


def _natural(document_id: str) -> list[tuple[int, str]]:
    """Orders file:2 before file:10."""
    parts = (part.lstrip("0") for part in re.split(r"([0-9]+)", document_id))
    return [*((len(part) if part.isdecimal() else -1, part) for part in parts), (0, document_id)]


@index.command(epilog="Example: ragspec index verify --index my-index")
def verify(index: Index = None, config: Config = None) -> None:
    """Compare every hash, then check that the files make sense together. Exits 1 with the first thing that is wrong."""
    from ragspec.retrieval.index.index_directory import ORIGINALS
    from ragspec.retrieval.index.manifest import file_checksum
    from ragspec.retrieval.index.store import Store, check_segment
    from ragspec.retrieval.search.analysis import RULES, rules_of

    store = Store.open(index_folder(index, config))
    for live in store.segments:
        check_segment(live.segment)
    for path in (store.index_dir / ORIGINALS).glob("[!.]*"):
        if file_checksum(path).sha256 != path.name:
            raise StoreCorrupt(f"{path} is not the file that was kept: its sha256 differs")
    rules = rules_of(store.manifest.analyzer)
    if rules < RULES:
        note(stderr_console(), f"texts are cut into words by rules {rules}; `index sync --renew` uses rules {RULES}")
    if former := store.former_documents():
        shown = ", ".join(former[:_SHOWN_DOCUMENTS]) + (" and more" if len(former) > _SHOWN_DOCUMENTS else "")
        which = f"{len(former)} of {store.manifest.num_documents} documents"
        note(stderr_console(), f"{which} have no blocks and pages; `index add` of their files adds them: {shown}")
    _print_summary(store.manifest, {"verified": True, "word_rules": rules, "former_documents": former})


@index.command(epilog="Example: ragspec index compact --index my-index")
def compact(
    index: Index = None,
    config: Config = None,
    dense: Annotated[str | None, typer.Option(help="How vectors are searched from now on: exact, hnsw or ivf.")] = None,
    purge: Annotated[
        bool, typer.Option(help="Remove deleted text from the disk now, not with a later change.")
    ] = False,
) -> None:
    """Merge segments and drop what was deleted; with exact search, answers stay the same."""
    from ragspec.retrieval.index.store import Store
    from ragspec.retrieval.index.writer import IndexWriter

    dense_config = load_config(None, **{"index.dense.kind": dense}).index.dense if dense else None
    folder = index_folder(index, config)
    before = Store.open(folder).manifest
    with IndexWriter(folder) as writer:
        manifest = writer.compact(dense_config)
        num_kept = writer.purge() if purge else 0
    if num_kept:
        kept = f"{num_kept} earlier generations are in use and stay, deleted text with them: purge again later"
        note(stderr_console(), kept)
    summary = {"segments_before": len(before.segments), "bytes_before": _num_bytes(before)}
    _print_summary(manifest, summary | ({"generations_in_use": num_kept} if purge else {}))


@index.command(epilog="Example: ragspec index backup saved --index my-index")
def backup(
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the backup.")],
    index: Index = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Copy an index, and a service's files, conversations and dictionaries, also while it serves."""
    from services.stores.backup import back_up

    _print_summary(None, back_up(index_folder(index, config), _service_of(data, config), target))


@index.command(epilog="Example: ragspec index restore saved --index my-index")
def restore(
    backup: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `ragspec index backup` made.")],
    index: Index = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Check a backup and put it where nothing is; start the service afterwards."""
    from services.stores.backup import restore as put_back

    _print_summary(None, put_back(backup, index_folder(index, config), _service_of(data, config)))


def _service_of(data: Path | None, config: Path | None) -> ServiceSettings:
    from services.settings import ServiceConfig

    os.umask(0o077)  # what a service keeps is for its owner only, and so are copies
    service = load_settings(ServiceConfig, config, **overrides(data_dir=data)).service
    return service.model_copy(update={"data_dir": service.data_dir or str(data_folder() / "service")})


def _statistics(manifest: Manifest) -> dict[str, Any]:
    return {
        "generation": manifest.generation_id,
        "documents": manifest.num_documents,
        "passages": manifest.num_passages,
        "segments": len(manifest.segments),
        "bytes": _num_bytes(manifest),
        "encoder": manifest.encoder.id,
        "dimension": manifest.encoder.dimension,
        "dense": manifest.config.dense.kind,
        "words": manifest.analyzer,
    }


def _num_bytes(manifest: Manifest) -> int:
    return sum(file.size_bytes for segment in manifest.segments for file in segment.files.values())


def _documents(store: Store) -> list[dict[str, Any]]:
    rows = []
    for live in store.segments:
        segment = live.segment
        passages = Counter(segment.document_of.tolist())
        columns = {name: segment.documents[name].to_pylist() for name in ("title", "source", "owner")}
        for number in live.live_documents():
            row = {name: column[number] for name, column in columns.items()}
            rows.append({"id": segment.ids[number], **row, "passages": passages[number]})
    return rows


def _headline(manifest: Manifest) -> str:
    return (
        f"generation {manifest.generation_id}: {manifest.num_documents} documents, {manifest.num_passages} passages in "
        f"{len(manifest.segments)} segments, {_num_bytes(manifest) / 2**20:.1f} MiB; {manifest.encoder.id}, "
        f"{manifest.config.dense.kind} search"
    )


def _print_summary(manifest: Manifest | None, summary: dict[str, Any]) -> None:
    if manifest is not None:
        stderr_console().print(Text(_headline(manifest)))
        summary = {**_statistics(manifest), **summary}
    print(json.dumps(summary))
