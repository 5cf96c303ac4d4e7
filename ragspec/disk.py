"""Writes that survive a crash: flushed to the disk, renamed into place, one writer at a time.

Foreign errors become SaveError here and nowhere else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ragspec.errors import IndexBusy, SaveError

TEMPORARY = ".building-"
"""How the name of everything begins that is not complete yet."""

_LOCK = ".lock"


@contextlib.contextmanager
def saving(place: Path) -> Iterator[None]:
    """Inside, an OSError means that writing to `place` failed.

    Raises: SaveError with the system's reason.
    """
    try:
        yield
    except OSError as cause:
        raise SaveError(f"cannot write {place}: {cause.strerror or cause}") from cause


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Holds the folder's writer lock; the system drops it when the holder dies.

    Raises: IndexBusy if another writer holds it.
    """
    with open(folder / _LOCK, "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise IndexBusy(f"another index is being written to {folder} right now") from cause
        yield


def make_folder(path: Path) -> None:
    """The folder and those above it, as durable as what will be written into it."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        fsync(each.parent)


def fsync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Put `text` at `path`: readers see the old content or the new, never a part. On an OSError the old is still there."""
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        temporary.write_text(text, encoding="ascii")
        fsync(temporary)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
