"""`ragspec index`: what is in an index, and what happens to it. Putting files in is the job `pipelines.build_index`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ragspec.cli.terminal import note, safe, stderr_console, stdout_console
from ragspec.config import DenseConfig
from ragspec.errors import InputError
from ragspec.retrieval.index.checking import check_segment
from ragspec.retrieval.index.manifest import Manifest
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter


def run_list(index_dir: Path, limit: int, *, as_json: bool) -> None:
    """Every document, by id, after one line about the index. Raises: StoreError."""
    store = Store.open(index_dir)
    rows = sorted(_documents(store), key=lambda row: row["id"])
    if as_json:
        print(json.dumps({**facts(store.manifest), "list": rows}))
        return
    console = stdout_console()
    console.print(Text(_headline(store.manifest), "bold"))
    table = Table("id", "title", "source", "owner", "passages")
    for row in rows[:limit]:
        table.add_row(*(Text(safe(str(value))) for value in row.values()))
    console.print(table)
    if len(rows) > limit:
        console.print(Text(f"and {len(rows) - limit} more (--limit {len(rows)} shows all)", "dim"))


def run_delete(index_dir: Path, ids: Sequence[str], sources: Sequence[str], *, dry_run: bool) -> None:
    """Delete by id and by source. Raises: InputError, before anything is changed, if one of them is not there."""
    with IndexWriter(index_dir) as writer:
        for document_id in ids:
            if writer.owner_and_origin(document_id) is None:
                raise InputError(f"no document has the id {document_id!r}; nothing was deleted")
        for source in dict.fromkeys(sources):
            if not writer.delete_source(source):
                raise InputError(f"no document comes from {source!r}; nothing was deleted")
        for document_id in ids:
            writer.delete(document_id)
        manifest = None if dry_run else writer.commit()
        _report(manifest, {"deleted": writer.changes.deleted, "dry_run": dry_run})


def run_verify(index_dir: Path) -> None:
    """Hashes, then what the files say to each other. Raises: StoreError with what is wrong."""
    store = Store.open(index_dir)
    for live in store.segments:
        check_segment(live.segment)
    _report(store.manifest, {"verified": True})


def run_compact(index_dir: Path, dense: DenseConfig | None, *, purge: bool) -> None:
    """Raises: StoreError, SaveError, ConfigError."""
    before = Store.open(index_dir).manifest
    with IndexWriter(index_dir) as writer:
        manifest = writer.compact(dense)
        num_kept = writer.purge() if purge else 0
    if num_kept:
        note(
            stderr_console(),
            f"{num_kept} earlier generations are in use and stay, deleted text with them: purge again later",
        )
    summary = {"segments_before": len(before.segments), "bytes_before": num_bytes(before)}
    _report(manifest, summary | ({"generations_in_use": num_kept} if purge else {}))


def facts(manifest: Manifest) -> dict[str, Any]:
    """What an index is, in numbers and names."""
    return {
        "generation": manifest.generation_id,
        "documents": manifest.num_documents,
        "passages": manifest.num_passages,
        "segments": len(manifest.segments),
        "bytes": num_bytes(manifest),
        "encoder": manifest.encoder.id,
        "dimension": manifest.encoder.dimension,
        "dense": manifest.config.dense.kind,
        "words": manifest.analyzer,
    }


def num_bytes(manifest: Manifest) -> int:
    """Size of all segments on disk."""
    return sum(file.size_bytes for segment in manifest.segments for file in segment.files.values())


def _documents(store: Store) -> list[dict[str, Any]]:
    rows = []
    for live in store.segments:
        segment = live.segment
        passages = Counter(segment.document_of.tolist())
        names = [segment.documents[name].to_pylist() for name in ("title", "source", "owner")]
        for number in live.live_documents():
            title, source, owner = (column[number] for column in names)
            row = {"id": segment.ids[number], "title": title, "source": source, "owner": owner}
            rows.append({**row, "passages": passages[number]})
    return rows


def _headline(manifest: Manifest) -> str:
    return (
        f"generation {manifest.generation_id}: {manifest.num_documents} documents, {manifest.num_passages} passages in "
        f"{len(manifest.segments)} segments, {num_bytes(manifest) / 2**20:.1f} MiB; {manifest.encoder.id}, "
        f"{manifest.config.dense.kind} search"
    )


def _report(manifest: Manifest | None, summary: dict[str, Any]) -> None:
    if manifest is not None:
        stderr_console().print(Text(_headline(manifest)))
        summary = {**facts(manifest), **summary}
    print(json.dumps(summary))
