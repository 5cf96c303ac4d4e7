"""Writes that survive a crash: flushed to the disk, renamed into place, one writer at a time.

Knows no format of a file.

    >>> with saving(path), atomic_writer(path) as file:
    ...     file.write(content)
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ragspec.errors import IndexBusy, SaveError

TEMPORARY = ".building-"
"""The prefix of the names of unfinished files and folders."""

_LOCK = ".lock"


@contextlib.contextmanager
def saving(place: Path) -> Iterator[None]:
    """Turns an OSError of the block into a SaveError that names `place` and the system's reason."""
    try:
        yield
    except OSError as cause:
        raise SaveError(f"cannot write {place}: {cause.strerror or cause}") from cause


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Holds the folder's writer lock; the system drops it when the holder dies.

    Raises: IndexBusy if another writer holds it.
    """
    with only_holder(folder / _LOCK) as is_only:
        if not is_only:
            raise IndexBusy(f"another index is being written to {folder} right now")
        yield


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Waits for the lock file `path` and holds it; the system drops the lock when its holder dies."""
    with open(path, "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def only_holder(path: Path) -> Iterator[bool]:
    """Holds the lock file `path` if nobody else does, and tells which; the system drops the lock when its holder dies."""
    with open(path, "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush their names to the disk."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        fsync(each.parent)


def keep_private(data_dir: str) -> None:
    """Sets the umask so that only the owner reads files of this process, and closes `data_dir` to others. Raises: SaveError."""
    os.umask(0o077)
    if data_dir:
        with saving(folder := Path(data_dir)):
            make_folder(folder)
            folder.chmod(0o700)


def make_private(folder: Path) -> None:
    """Takes the rights of all accounts but the owner's. A folder whose rights cannot be changed stays as it is."""
    with contextlib.suppress(OSError):
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o077)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal. Raises: OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_writer(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends: readers see the old content or the new, never a part.

    The content and the name are on the disk then. After an exception the old file is still there. `mode`: permissions of the new
    file, before the process's umask.
    """
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` by ASCII text; see `atomic_writer`. Raises: OSError."""
    with atomic_writer(path) as file:
        file.write(text.encode("ascii"))
