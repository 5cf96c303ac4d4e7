"""Copies of an index and of what a service keeps beside it, made while the service runs.

Owns the layout of a backup: `index`, `library` and `data`, and BACKUP.json with the hash of every file. Never writes into an
index or a data folder that exists.

    >>> back_up(Path("my-index"), ServiceSettings(data_dir="/data/service"), Path("backups/monday"))
    >>> restore(Path("backups/monday"), Path("my-index"), ServiceSettings(data_dir="/data/service"))

The index's generation and the records of its files are taken while no writer commits, so together they are a state that a crash
could leave, and the next service goes on from it. Conversations may be a moment younger. The content of a file that is deleted
while the backup runs may be missing.
"""

import contextlib
import json
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ragspec.disk import TEMPORARY, fsync, make_folder, saving, write_atomically, writer_lock
from ragspec.errors import IndexBusy, InputError, StoreCorrupt
from ragspec.retrieval.index.index_directory import ORIGINALS, reader_lock
from ragspec.retrieval.index.manifest import FileChecksum, file_checksum, read_generation, verify_checksums
from ragspec.retrieval.index.pointer import CURRENT
from services.settings import ServiceSettings
from services.stores.library import library_folder
from services.stores.records import read_only

RECORD = "BACKUP.json"
_DATABASES = ("conversations.sqlite", "dictionaries.sqlite")
_LIBRARY = "library.sqlite"
_BUSY_S = 120.0
"""Time to wait for a writer of the index or of a database."""
_RETRY_S = 0.1


def back_up(index_dir: Path, service: ServiceSettings, target: Path) -> dict[str, Any]:
    """Returns the record without its hashes. Raises: StoreError, InputError if `target` exists, IndexBusy, SaveError."""
    library, data = library_folder(service, index_dir), Path(service.data_dir or os.devnull)
    with _new_folder(target) as staged, contextlib.ExitStack() as held:
        with _no_writer(index_dir):
            pointer = held.enter_context(reader_lock(index_dir))
            _copy_database(library / _LIBRARY, staged / "library" / _LIBRARY)
        folder, manifest = read_generation(index_dir, pointer)
        for name in (folder.name, *(segment.name for segment in manifest.segments)):
            shutil.copytree(index_dir / name, staged / "index" / name)
        write_atomically(staged / "index" / CURRENT, pointer)
        files = dict.fromkeys((library / "files").glob("*/file-*"), "library/files")
        files |= dict.fromkeys((index_dir / ORIGINALS).glob("[!.]*"), "index")
        for path, place in sorted(files.items()):
            with contextlib.suppress(FileNotFoundError):  # deleted since
                make_folder(copy := staged / place / path.parent.name)
                shutil.copy2(path, copy)
        for name in _DATABASES:
            _copy_database(data / name, staged / "data" / name)
        record = _record_of(staged) | {"generation": manifest.generation_id, "documents": manifest.num_documents}
        write_atomically(staged / RECORD, json.dumps(record, indent=1))
    return {name: value for name, value in record.items() if name != "files"}


def restore(backup: Path, index_dir: Path, service: ServiceSettings) -> dict[str, Any]:
    """Checks every file, then copies. Returns the record without its hashes.

    Raises: InputError for a folder that is no backup or a place that is taken, StoreCorrupt, SaveError.
    """
    record = _checked_record(backup)
    targets = {backup / "index": index_dir, backup / "library": library_folder(service, index_dir)}
    if service.data_dir:
        targets |= {backup / "data" / name: Path(service.data_dir) / name for name in _DATABASES}
    taken = [str(place) for place in targets.values() if place.exists()]
    if taken:
        raise InputError(f"a restore replaces nothing: move {', '.join(taken)} away first")
    with contextlib.ExitStack() as undo:
        for source, place in targets.items():
            if source.exists():
                undo.callback(_remove, place)
                with saving(place):
                    make_folder(place.parent)
                    (shutil.copytree if source.is_dir() else shutil.copy2)(source, place)
        for path in (each for place in targets.values() for each in (place, *place.rglob("*")) if each.exists()):
            fsync(path)
        undo.pop_all()
    return {name: value for name, value in record.items() if name != "files"}


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` if the block ends well, readable by its owner only. Raises: InputError, SaveError."""
    if target.exists():
        raise InputError(f"{target} exists: name a new folder for each backup")
    staged = target.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with saving(target):
            make_folder(target.parent)
            staged.mkdir(mode=0o700)
            yield staged
            for path in (staged, *staged.rglob("*")):
                fsync(path)
            staged.rename(target)
            fsync(target.parent)
    finally:
        _remove(staged)


@contextlib.contextmanager
def _no_writer(index_dir: Path) -> Iterator[None]:
    """Waits for the writer's lock; a service whose writer meets it tries again. Raises: IndexBusy, StoreMissing."""
    if not index_dir.is_dir():
        with reader_lock(index_dir):  # says what is missing
            pass
    deadline = time.monotonic() + _BUSY_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(writer_lock(index_dir))
                break
            except IndexBusy:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
        yield


def _copy_database(path: Path, copy: Path) -> None:
    """Copies a consistent state of a database in use; does nothing if there is no database. Raises: SaveError."""
    if not path.exists():
        return
    make_folder(copy.parent)
    with read_only(path, _BUSY_S) as source, contextlib.closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    copy.chmod(0o600)


def _record_of(folder: Path) -> dict[str, Any]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): file_checksum(path).model_dump() for path in paths}
    num_bytes = sum(file["size_bytes"] for file in files.values())
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"ragspec": version("ragspec"), "created": created, "bytes": num_bytes, "files": files}


def _checked_record(backup: Path) -> dict[str, Any]:
    """Raises: InputError, StoreCorrupt."""
    try:
        record: dict[str, Any] = json.loads((backup / RECORD).read_bytes())
        files = {name: FileChecksum.model_validate(checksum) for name, checksum in record["files"].items()}
    except OSError as cause:
        raise InputError(f"{backup} is no backup: {RECORD} cannot be read: {cause.strerror}") from cause
    except (ValueError, KeyError, AttributeError, TypeError) as cause:
        raise StoreCorrupt(f"{backup / RECORD} is damaged") from cause
    verify_checksums((backup / name, checksum) for name, checksum in files.items())
    return record


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
