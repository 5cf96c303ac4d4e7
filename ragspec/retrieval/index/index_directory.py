"""The folder of an index as a writer changes it: stages, places, publishes and removes folders. Also the locks of readers.

A writer stages files in a temporary folder, flushes them to the disk and renames the folder; only then CURRENT names it. Removes
every folder that no generation in use needs. Never reads a segment.

A reader's lock is a locked file in the folder. It keeps a generation for a job that answers from it for hours while others write,
and ends with the process of its holder.

    >>> with locked_directory(index_dir) as directory:
    ...     directory.publish(manifest, files)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from ragspec.disk import TEMPORARY, atomic_writer, fsync, make_folder, write_atomically, writer_lock
from ragspec.errors import StoreError
from ragspec.retrieval.index.manifest import (
    MANIFEST,
    FileChecksum,
    Manifest,
    file_checksum,
    read_current,
    read_generation,
)
from ragspec.retrieval.index.pointer import CURRENT, read_pointer

ORIGINALS = "originals"
_PLACED = re.compile(r"(generation|segment)-(\d{6,})")
GRACE_S = 600.0
"""How long the generation before the current one is kept: a reader may have read CURRENT and not opened its files yet."""


@contextlib.contextmanager
def locked_directory(index_dir: Path) -> Iterator[IndexDirectory]:
    """Holds the writer's lock of the folder, which is made if it is missing. Cleans up on entering and on leaving.

    Raises: IndexBusy if another writer is at work, OSError.
    """
    make_folder(index_dir)
    with writer_lock(index_dir):
        directory = IndexDirectory(index_dir)
        directory.clean()
        try:
            yield directory
        finally:
            with contextlib.suppress(OSError):
                directory.clean()


class IndexDirectory:
    """Every method raises OSError where the disk refuses."""

    def __init__(self, index_dir: Path) -> None:
        self.path = index_dir

    def stage(self) -> Path:
        """A new empty folder. The clean-up removes it unless it is placed."""
        folder = self.path / f"{TEMPORARY}{secrets.token_hex(8)}"
        folder.mkdir()  # Why not tempfile: its folders are for one user alone, and an index has other readers
        return folder

    def place(self, staged: Path, name: str) -> dict[str, FileChecksum]:
        """Flush a staged folder to the disk and rename it. Returns the checksums of its files by name."""
        records = {}
        for path in sorted(staged.iterdir()):
            fsync(path)
            records[path.name] = file_checksum(path)
        fsync(staged)
        os.rename(staged, self.path / name)
        return records

    def free_number(self, kind: str) -> int:
        """One more than the highest number of a placed `generation` or `segment`."""
        return max((number for found, number in self._placed() if found == kind), default=0) + 1

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write a generation and make it the current one. Its segments must have been placed."""
        staged = self.stage()
        raw = manifest.model_dump_json(indent=1).encode()
        for name, content in {**files, MANIFEST: raw}.items():
            (staged / name).write_bytes(content)
        name = f"generation-{manifest.generation:06d}"
        self.place(staged, name)
        fsync(self.path)
        write_atomically(self.path / CURRENT, f"{name} {hashlib.sha256(raw).hexdigest()}\n")

    def keep_original(self, path: Path, digest: str) -> None:
        """Copies a file, unless it was changed and its SHA-256 is no longer `digest`."""
        kept = original_of(self.path, digest)
        if kept.exists():
            return
        make_folder(kept.parent)
        with atomic_writer(kept) as copy, open(path, "rb") as file:
            shutil.copyfileobj(file, copy)
        if file_checksum(kept).sha256 != digest:
            kept.unlink()

    def keep_originals(self, digests: Collection[str]) -> None:
        """Removes all originals but these."""
        for path in (self.path / ORIGINALS).glob("*"):
            if path.name not in digests:
                path.unlink()

    def _placed(self) -> list[tuple[str, int]]:
        matches = (_PLACED.fullmatch(path.name) for path in self.path.iterdir())
        return [(match[1], int(match[2])) for match in matches if match]

    def clean(self, keep_previous: bool = True) -> None:
        """Remove unfinished files and folders, and generations that no reader needs.

        If the folder holds no index or a damaged one, only unfinished files and folders are removed.
        """
        try:
            kept = self._needed(keep_previous)
        except StoreError:
            kept = {path.name for path in self.path.iterdir()}
        for path in self.path.iterdir():
            if path.name.startswith(TEMPORARY) and path.is_file():
                path.unlink(missing_ok=True)
            elif path.name.startswith(TEMPORARY) or (_PLACED.fullmatch(path.name) and path.name not in kept):
                shutil.rmtree(path, ignore_errors=True)

    def num_earlier(self) -> int:
        """How many generations are on the disk beside the current one."""
        return sum(kind == "generation" for kind, _ in self._placed()) - 1

    def _needed(self, keep_previous: bool) -> set[str]:
        """Folders of the current generation, of locked generations, and of the previous one if the current one is young.

        Raises: StoreError.
        """
        folder, manifest = read_current(self.path)
        kept = {folder.name, *(segment.name for segment in manifest.segments)}
        kept |= {name for pointer in locked_generations(self.path) for name in _folders(self.path, pointer.split()[0])}
        earlier = [n for kind, n in self._placed() if kind == "generation" and n < manifest.generation]
        is_young = time.time() - (folder / MANIFEST).stat().st_mtime < GRACE_S
        if earlier and keep_previous and is_young:
            kept |= _folders(self.path, f"generation-{max(earlier):06d}")
        return kept


def original_of(index_dir: Path, digest: str) -> Path:
    """Where the original of that SHA-256 is kept, if it is."""
    return index_dir / ORIGINALS / digest


def _folders(index_dir: Path, generation: str) -> set[str]:
    """The folders of a generation, whose hashes are not compared. Empty if its manifest cannot be read."""
    try:
        manifest = Manifest.model_validate_json((index_dir / generation / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return set()
    return {generation, *(segment.name for segment in manifest.segments)}


_PREFIX = ".lease-"


@contextlib.contextmanager
def reader_lock(index_dir: Path, pointer: str = "") -> Iterator[str]:
    """Yields the pointer of the current generation, or `pointer`; no writer removes the generation's files inside the block.

    A folder that is not writable gets no lock.

    Raises: StoreMissing, StoreCorrupt.
    """
    while True:
        locked = pointer or read_pointer(index_dir)
        with _held(index_dir, locked):
            if not pointer and read_pointer(index_dir) != locked:
                continue  # a writer may have removed it before the lock was there
            read_generation(index_dir, locked)
            yield locked
            return


@contextlib.contextmanager
def _held(index_dir: Path, pointer: str) -> Iterator[None]:
    name = secrets.token_hex(8)
    building, path = index_dir / f"{TEMPORARY}{name}", index_dir / f"{_PREFIX}{name}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            while not path.exists():
                file = stack.enter_context(open(building, "x", encoding="ascii"))
                fcntl.flock(file, fcntl.LOCK_SH)
                file.write(pointer)
                file.flush()
                with contextlib.suppress(FileNotFoundError):  # a writer's clean-up took it for an unfinished file
                    building.rename(path)  # Why last: a clean-up removes lock files that are not locked
            stack.callback(path.unlink, missing_ok=True)
        yield


def locked_generations(index_dir: Path) -> Iterator[str]:
    """Pointers of the locked generations; lock files of dead holders are removed."""
    for path in index_dir.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield file.read()
            else:
                path.unlink()
