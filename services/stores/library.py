"""Files and vector stores of all tenants over one index.

Owns records, files and the worker that changes the index. Knows no HTTP.

    >>> with closing(Library(data_dir, index_dir, encoder, forget)) as library:
    ...     file = library.upload("acme", "faq.md", "assistants", content)
    ...     store = library.create_store("acme", "help")
    ...     library.attach("acme", store.id, file.id, {})

A vector store is a metadata key of its tenant's documents. A tenant sees only its own files and stores. Acknowledged changes
survive a crash; the next process goes on with unfinished ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ragspec.disk import TEMPORARY, atomic_writer, make_folder, make_private, saving
from ragspec.errors import InputError, NoRoom, SaveError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.pointer import configured_index_dir
from ragspec.retrieval.reading import SUFFIXES
from services.settings import ServiceConfig, ServiceSettings
from services.stores import records
from services.stores.index_updater import Forget
from services.stores.ingest import IngestWorker

_MAX_NAME_CHARS = 255
_CHUNK_BYTES = 2**20
_RESERVED_BYTES = 8 * 2**20
_SWEEP_AGE_S = 3600.0


def open_library(config: ServiceConfig, encoder: TextEncoder, forget: Forget) -> Library:
    """Raises: ConfigError without an index folder, SaveError, StoreCorrupt."""
    index_dir = configured_index_dir(config.retriever)
    return Library(library_folder(config.service, index_dir), index_dir, encoder, forget)


def library_folder(service: ServiceSettings, index_dir: Path) -> Path:
    """`service.library_dir`, or a folder for this index alone.

    Why not one folder for several indexes: a deletion changes the served index, and would leave the text in the others.
    """
    if service.library_dir:
        return Path(service.library_dir)
    if not service.data_dir:
        return index_dir.with_name(f"{index_dir.name}.library")
    place = str(index_dir.resolve()).encode("utf-8", "surrogateescape")
    return Path(service.data_dir) / "libraries" / f"{index_dir.name}-{hashlib.sha256(place).hexdigest()[:16]}"


class Library:
    """Safe to call from several threads. Plain methods may block."""

    def __init__(
        self, data_dir: Path, index_dir: Path, encoder: TextEncoder, forget: Forget = lambda tenant, documents: None
    ) -> None:
        """`forget` is called for documents that leave the index. Raises: SaveError, StoreCorrupt."""
        self.records = records.Records(data_dir / "library.sqlite")
        make_private(data_dir)
        self.blobs = Blobs(data_dir / "files")
        self.disk_reserve = DiskReserve(data_dir / "reserve")
        self.blobs.remove_unrecorded(self.records.all_files())
        self._lock, self._reserved = threading.Lock(), Counter[str]()  # bytes that are being written, by tenant
        self.ingest = IngestWorker(self.records, index_dir, encoder, self.blobs.path, forget)
        self.ingest.start()

    def upload(self, tenant: str, filename: str, purpose: str, content: BinaryIO) -> records.FileRecord:
        """Raises: InputError, SaveError, NoRoom if the tenant has no space left."""
        name = _plain_name(filename)
        num_bytes = content.seek(0, os.SEEK_END)
        content.seek(0)
        file = records.FileRecord(tenant, f"file-{secrets.token_hex(12)}", name, purpose, num_bytes, time.time())
        with self._room(tenant, num_bytes):
            self.blobs.write(file, content)
            try:
                self.records.add_file(file)
            except BaseException:
                self.blobs.remove(file)
                raise
        return file

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Deletes a file and removes it from all stores; no later answer quotes it. Raises: NotFound, SaveError."""
        await self._deleting(lambda: self._delete_file(tenant, file_id))

    async def _delete_file(self, tenant: str, file_id: str) -> None:
        file = await asyncio.to_thread(self.records.file, tenant, file_id)
        members = await asyncio.to_thread(self.records.members_of_file, tenant, file_id)
        await self.ingest.delete(members)
        await asyncio.to_thread(self.blobs.remove, file)
        await asyncio.to_thread(self.records.drop_file, tenant, file_id)
        meanwhile = await asyncio.to_thread(self.records.members_of_file, tenant, file_id)
        await self.ingest.delete(meanwhile)

    async def _deleting(self, delete: Callable[[], Awaitable[None]]) -> None:
        """Deletes; on a full disk once more, with the reserve given up."""
        try:
            await delete()
        except SaveError:
            if not self.disk_reserve.give_up():
                raise
            await delete()
        await asyncio.to_thread(self.disk_reserve.fill)

    def create_store(
        self, tenant: str, name: str = "", metadata: Mapping[str, str] | None = None, file_ids: Collection[str] = ()
    ) -> records.StoreRecord:
        """A store with these files, or none. Raises: NotFound, InputError, Overloaded, SaveError, NoRoom."""
        metadata = metadata or {}
        with self._room(tenant, _num_bytes(metadata)):
            store = self.records.add_store(tenant, name, metadata)
        try:
            if file_ids:
                self.attach_all(tenant, store.id, {file_id: {} for file_id in file_ids})
        except BaseException:
            self.records.drop_store(tenant, store.id)
            raise
        return store

    def change_store(
        self, tenant: str, store_id: str, name: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> records.StoreRecord:
        """None keeps the value. Raises: NotFound, InputError, SaveError."""
        old = self.records.store(tenant, store_id)
        kept = old.metadata if metadata is None else metadata
        with self._room(tenant, _num_bytes(kept)):
            self.records.change_store(tenant, store_id, old.name if name is None else name, kept)
        return self.records.store(tenant, store_id)

    async def delete_store(self, tenant: str, store_id: str) -> None:
        """Deletes a store; its files stay. Raises: NotFound, SaveError."""
        await self._deleting(lambda: self._delete_store(tenant, store_id))

    async def _delete_store(self, tenant: str, store_id: str) -> None:
        await self.ingest.delete(await asyncio.to_thread(self.records.members, tenant, store_id))
        await asyncio.to_thread(self.records.drop_store, tenant, store_id)

    def attach(self, tenant: str, store_id: str, file_id: str, attributes: records.Attributes) -> records.StoreMember:
        """Starts to index a file in a store. Raises: NotFound, InputError, Overloaded, SaveError, NoRoom."""
        return self.attach_all(tenant, store_id, {file_id: attributes})[0]

    def attach_all(
        self, tenant: str, store_id: str, files: Mapping[str, records.Attributes]
    ) -> list[records.StoreMember]:
        """Starts to index files, each with its attributes, as a batch. Raises as `attach`, before any is added."""
        self.ingest.check_room(len(files))
        num_bytes = sum(map(_num_bytes, files.values())) + (len(files) - 1) * records.RECORD_BYTES
        with self._room(tenant, num_bytes):
            members = self.records.add_members(tenant, store_id, files)
        for member in members:
            self.ingest.add(member)
        return members

    @contextmanager
    def _room(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Reserves room for a record and its bytes while they are written. Raises: NoRoom, SaveError."""
        num_bytes += records.RECORD_BYTES
        with self._lock:
            room = records.MAX_BYTES_PER_TENANT - self._reserved[tenant] - self.records.used_bytes(tenant)
            if num_bytes > room:
                left = max(0, room - records.RECORD_BYTES)
                raise NoRoom(f"there is room for {left} bytes more: delete files or vector stores that are not needed")
            self._reserved[tenant] += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._reserved[tenant] -= num_bytes
                self._reserved += Counter()  # drops zeros

    async def detach(self, tenant: str, store_id: str, file_id: str) -> None:
        """Removes a file from a store; the next query does not find it there. Raises: NotFound, SaveError."""
        member = await asyncio.to_thread(self.records.member, tenant, store_id, file_id)
        await self._deleting(lambda: self.ingest.delete([member]))

    def close(self) -> None:
        """Returns after the current change of the index."""
        self.ingest.stop()
        self.records.close()


def _num_bytes(fields: records.Attributes) -> int:
    return sum(len(key) + len(str(value)) for key, value in fields.items())


def _plain_name(filename: str) -> str:
    """The printable characters of the path's last part. Raises: InputError if none are left or there are too many."""
    last = filename.replace("\\", "/").rsplit("/", 1)[-1]
    name = "".join(char for char in last if char.isprintable()).strip()
    if name in ("", ".", "..") or len(name) > _MAX_NAME_CHARS:
        raise InputError(f"a file needs a name of 1 to {_MAX_NAME_CHARS} printable characters")
    return name


class DiskReserve:
    """A file that is given up when the disk is full, so that deletions, which write too, still succeed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fill()

    def fill(self) -> None:
        """Takes the room again, if there is any."""
        if not self.path.exists():
            try:
                with open(self.path, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
            except OSError:
                self.give_up()

    def give_up(self) -> bool:
        """Returns whether the reserve existed."""
        with contextlib.suppress(OSError):
            self.path.unlink()
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

    def remove_unrecorded(self, known: Iterable[records.FileRecord]) -> None:
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

    def path(self, file: records.FileRecord) -> Path:
        suffix = Path(file.filename).suffix.lower()
        owner = hashlib.sha256(file.tenant.encode()).hexdigest()[:32]
        return self._folder / owner / (file.id + (suffix if suffix in SUFFIXES else ""))

    def write(self, file: records.FileRecord, content: BinaryIO) -> None:
        """Writes `content` durably. Raises: SaveError."""
        path = self.path(file)
        with saving(self._folder):
            make_folder(path.parent)
            with atomic_writer(path) as copy:
                shutil.copyfileobj(content, copy, _CHUNK_BYTES)

    def remove(self, file: records.FileRecord) -> None:
        with saving(self._folder):
            self.path(file).unlink(missing_ok=True)


def _owner_and_id(path: Path) -> tuple[str, str]:
    """The hashed tenant and the file's id, without the suffix."""
    return path.parent.name, path.name.partition(".")[0]
