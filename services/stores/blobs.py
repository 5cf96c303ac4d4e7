"""The bytes of uploaded files, one folder a tenant, and some room for deletions on a full disk.

Owns the folder. Paths never hold names that users chose.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from ragspec.disk import TEMPORARY, atomic_writer, make_folder, saving
from ragspec.retrieval.reading import SUFFIXES
from services.stores.records import FileRecord

_CHUNK_BYTES = 2**20
_RESERVED_BYTES = 8 * 2**20
_SWEEP_AGE_S = 3600.0


class DiskReserve:
    """A file that is given up when the disk is full, so that deletions, which write too, still succeed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fill()

    def fill(self) -> None:
        """Takes the room again, if there is any."""
        if not self._path.exists():
            try:
                with open(self._path, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
            except OSError:
                self.give_up()

    def give_up(self) -> bool:
        """Whether there was something to give up."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            return True
        return False


class Blobs:
    def __init__(self, folder: Path) -> None:
        """Raises: SaveError."""
        self._folder = folder
        with saving(folder):
            make_folder(folder)
            for left in folder.glob(f"*/{TEMPORARY}*"):
                left.unlink(missing_ok=True)

    def remove_unrecorded(self, known: Iterable[FileRecord]) -> None:
        """Removes files without a record: their upload was cut off.

        Keeps files younger than an hour, which another process may be receiving. Removes nothing if there are no records at all:
        then the records were lost, not the files.
        """
        kept, oldest_s = {_owner_and_id(self.path(file)) for file in known}, time.time() - _SWEEP_AGE_S
        with saving(self._folder):
            for path in self._folder.glob("*/file-*") if kept else ():
                with contextlib.suppress(FileNotFoundError):  # another process may remove it at the same time
                    if _owner_and_id(path) not in kept and path.is_file() and path.stat().st_mtime < oldest_s:
                        path.unlink()

    def path(self, file: FileRecord) -> Path:
        return self._path(file.tenant, file.id, file.filename)

    def write(self, tenant: str, file_id: str, filename: str, content: BinaryIO) -> None:
        """Writes `content` durably. Raises: SaveError."""
        path = self._path(tenant, file_id, filename)
        with saving(self._folder):
            make_folder(path.parent)
            with atomic_writer(path) as copy:
                shutil.copyfileobj(content, copy, _CHUNK_BYTES)

    def remove(self, file: FileRecord) -> None:
        with saving(self._folder):
            self.path(file).unlink(missing_ok=True)

    def _path(self, tenant: str, file_id: str, filename: str) -> Path:
        suffix = Path(filename).suffix.lower()
        owner = hashlib.sha256(tenant.encode()).hexdigest()[:32]
        return self._folder / owner / (file_id + (suffix if suffix in SUFFIXES else ""))


def _owner_and_id(path: Path) -> tuple[str, str]:
    """The hashed tenant and the file's id, without the suffix."""
    return path.parent.name, path.name.partition(".")[0]
