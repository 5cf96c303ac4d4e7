"""The folder of an index in a writer's hands: what is staged, what is placed, what becomes current, what is removed.

Everything is written to a temporary folder, flushed to the disk and renamed; only then does CURRENT name it. On entering and
leaving, all that no generation in use needs is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

from ragspec.disk import TEMPORARY, fsync, make_folder, write_atomically, writer_lock
from ragspec.errors import StoreError
from ragspec.retrieval.index.manifest import (
    CURRENT,
    MANIFEST,
    FileChecksum,
    Manifest,
    SegmentRecord,
    file_checksum,
    read_current,
    segment_folders,
)
from ragspec.retrieval.index.reader_lock import locked_generations
from ragspec.retrieval.index.segment import SegmentWriter

_PLACED = re.compile(r"(generation|segment)-(\d{6,})")
GRACE_S = 600.0
"""How long the generation before the current one is kept: a reader may have read CURRENT and not opened its files yet."""


class IndexDirectory:
    """Holds the writer's lock while entered. Every method raises OSError where the disk refuses."""

    def __init__(self, index_dir: Path) -> None:
        self._dir = index_dir
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> IndexDirectory:
        """Raises: IndexBusy if another writer is at work."""
        make_folder(self._dir)
        self._lock.enter_context(writer_lock(self._dir))
        try:
            self.clean()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.clean()
        self._lock.close()

    def stage(self) -> Path:
        """A new empty folder, removed on leaving unless it is placed."""
        folder = self._dir / f"{TEMPORARY}{secrets.token_hex(8)}"
        folder.mkdir()  # Why not tempfile: its folders are for one user alone, and an index has other readers
        return folder

    def place(self, staged: Path, name: str) -> dict[str, FileChecksum]:
        """Flush a staged folder to the disk and give it its name; the records of its files."""
        records = {}
        for path in sorted(staged.iterdir()):
            fsync(path)
            records[path.name] = file_checksum(path)
        fsync(staged)
        os.rename(staged, self._dir / name)
        return records

    def place_segment(self, writer: SegmentWriter) -> SegmentRecord:
        """A finished segment gets its name."""
        number = self.free_number("segment")
        files = self.place(writer.folder, f"segment-{number:06d}")
        return SegmentRecord(
            number=number,
            num_documents=writer.num_documents,
            num_passages=writer.num_passages,
            num_live_passages=writer.num_passages,
            files=files,
        )

    def free_number(self, kind: str) -> int:
        """One more than the highest number of a placed `generation` or `segment`."""
        return max((number for found, number in self._placed() if found == kind), default=0) + 1

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Write a generation and make it the current one; the segments it names are placed."""
        staged = self.stage()
        raw = manifest.model_dump_json(indent=1).encode()
        for name, content in {**files, MANIFEST: raw}.items():
            (staged / name).write_bytes(content)
        name = f"generation-{manifest.generation:06d}"
        self.place(staged, name)
        fsync(self._dir)
        write_atomically(self._dir / CURRENT, f"{name} {hashlib.sha256(raw).hexdigest()}\n")
        fsync(self._dir)

    def _placed(self) -> list[tuple[str, int]]:
        matches = (_PLACED.fullmatch(path.name) for path in self._dir.iterdir())
        return [(match[1], int(match[2])) for match in matches if match]

    def clean(self, keep_previous: bool = True) -> None:
        """Remove what a crash or an abandoned change left, and generations that nobody needs any more.

        Of a folder without an index, or of a damaged one, nothing is removed but what was being built.
        """
        try:
            kept = self._needed(keep_previous)
        except StoreError:
            kept = {path.name for path in self._dir.iterdir()}
        for path in self._dir.iterdir():
            if path.name.startswith(TEMPORARY) and path.is_file():
                path.unlink(missing_ok=True)
            elif path.name.startswith(TEMPORARY) or (_PLACED.fullmatch(path.name) and path.name not in kept):
                shutil.rmtree(path, ignore_errors=True)

    def num_earlier(self) -> int:
        """Generations on the disk beside the current one."""
        return sum(kind == "generation" for kind, _ in self._placed()) - 1

    def _needed(self, keep_previous: bool) -> set[str]:
        """Folders of the current generation, of those on lease, and of the one before if the current one is young.

        Raises: StoreError.
        """
        folder, manifest = read_current(self._dir)
        kept = {folder.name, *segment_folders(manifest)}
        kept |= {name for pointer in locked_generations(self._dir) for name in _folders(self._dir, pointer.split()[0])}
        earlier = [n for kind, n in self._placed() if kind == "generation" and n < manifest.generation]
        is_young = time.time() - (folder / MANIFEST).stat().st_mtime < GRACE_S
        if earlier and keep_previous and is_young:
            kept |= _folders(self._dir, f"generation-{max(earlier):06d}")
        return kept


def _folders(index_dir: Path, generation: str) -> set[str]:
    """The folders of a generation that is not checked; none if it cannot be read."""
    try:
        manifest = Manifest.model_validate_json((index_dir / generation / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return set()
    return {generation, *segment_folders(manifest)}


def own_version() -> str:
    try:
        return version("ragspec")
    except PackageNotFoundError:
        return "(not installed)"
