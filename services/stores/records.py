"""Records of files, vector stores and their members in one SQLite file; never their content.

A member is a file in a vector store. Its states: in_progress -> completed or failed; any -> deleting -> gone. When a process
ends, the next one goes on with members that are in_progress or deleting.

A new column of a table: `_TABLES` with the next `_SCHEMA`, the dataclass of the row, and `schemas` for clients.

    >>> stored_bytes(Path("/data/service"))["ann"].file_bytes       # read beside a running service, for `ragspec keys usage`
    1048576
"""

import contextlib
import json
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ragspec.database import Database
from ragspec.errors import InputError, NotFound, SaveError

_SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    tenant TEXT, id TEXT, filename TEXT, purpose TEXT, num_bytes INTEGER, created_s REAL, PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stores (
    tenant TEXT, id TEXT, name TEXT, created_s REAL, used_s REAL, metadata TEXT, PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    tenant TEXT, store TEXT, file TEXT, created_s REAL, status TEXT, code TEXT, message TEXT, attributes TEXT,
    num_bytes INTEGER, PRIMARY KEY (tenant, store, file)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS members_by_status ON members (status)
"""

_KEY = "tenant=? AND store=? AND file=?"
RECORD_BYTES = 4096
"""Bytes that a file, a store or a member counts beside its content, so that empty ones count too."""
MAX_BYTES_PER_TENANT = 2**30
"""Quota of a tenant in one library."""
_BYTES_BY_RECORD = f"""
SELECT tenant, 1 AS is_file, num_bytes + {RECORD_BYTES} AS bytes FROM files
UNION ALL SELECT tenant, 0, LENGTH(name) + LENGTH(metadata) + {RECORD_BYTES} FROM stores
UNION ALL SELECT tenant, 0, LENGTH(attributes) + {RECORD_BYTES} FROM members
"""
_BYTES_BY_CONVERSATION = """
SELECT tenant, 1 AS is_file, num_bytes AS bytes FROM conversations UNION ALL SELECT tenant, 0, num_bytes FROM shown
"""
_READ_TIMEOUT_S = 30.0

Attributes = Mapping[str, str | float | bool]


@dataclass(frozen=True, slots=True)
class FileRecord:
    tenant: str
    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: float


@dataclass(frozen=True, slots=True)
class StoreRecord:
    tenant: str
    id: str
    name: str
    created_s: float
    used_s: float
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoreMember:
    """A file in a vector store. `code` and `message`: the error of a failed member. `num_bytes`: its indexed text."""

    tenant: str
    store: str
    file: str
    created_s: float
    status: str
    code: str
    message: str
    attributes: Attributes
    num_bytes: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.tenant, self.store, self.file

    @property
    def batch_id(self) -> str:
        """Equal for members of a store that were attached together."""
        return f"vsfb_{round(self.created_s * 1e6):x}"


class Records:
    """Owns the file. Safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        """Raises: SaveError, StoreCorrupt; so does every method."""
        self._database = Database(path, _TABLES, _SCHEMA)

    def add_file(self, file: FileRecord) -> None:
        self._write("INSERT INTO files VALUES (?,?,?,?,?,?)", astuple(file))

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises: NotFound."""
        rows = self._rows("SELECT * FROM files WHERE tenant=? AND id=?", tenant, file_id)
        if not rows:
            raise NotFound(f"there is no file {file_id!r}")
        return FileRecord(*rows[0])

    def all_files(self) -> list[FileRecord]:
        """Files of all tenants."""
        return [FileRecord(*row) for row in self._rows("SELECT * FROM files")]

    def files(self, tenant: str) -> list[FileRecord]:
        return [FileRecord(*row) for row in self._rows("SELECT * FROM files WHERE tenant=?", tenant)]

    def used_bytes(self, tenant: str) -> int:
        """Bytes of a tenant's files and records."""
        return int(self._rows(f"SELECT TOTAL(bytes) FROM ({_BYTES_BY_RECORD}) WHERE tenant=?", tenant)[0][0])

    def drop_file(self, tenant: str, file_id: str) -> None:
        self._write("DELETE FROM files WHERE tenant=? AND id=?", (tenant, file_id))
        self._database.truncate_log()

    def add_store(self, tenant: str, name: str, metadata: Mapping[str, str]) -> StoreRecord:
        now = time.time()
        record = StoreRecord(tenant, f"vs_{secrets.token_hex(12)}", name, now, now, dict(metadata))
        self._write("INSERT INTO stores VALUES (?,?,?,?,?,?)", (*astuple(record)[:-1], json.dumps(record.metadata)))
        return record

    def store(self, tenant: str, store_id: str) -> StoreRecord:
        """Raises: NotFound."""
        rows = self._rows("SELECT * FROM stores WHERE tenant=? AND id=?", tenant, store_id)
        if not rows:
            raise NotFound(f"there is no vector store {store_id!r}")
        return _store(rows[0])

    def stores(self, tenant: str) -> list[StoreRecord]:
        return [_store(row) for row in self._rows("SELECT * FROM stores WHERE tenant=?", tenant)]

    def change_store(self, tenant: str, store_id: str, name: str, metadata: Mapping[str, str]) -> None:
        values = (name, json.dumps(dict(metadata)), time.time(), tenant, store_id)
        self._write("UPDATE stores SET name=?, metadata=?, used_s=? WHERE tenant=? AND id=?", values)

    def drop_store(self, tenant: str, store_id: str) -> None:
        self._write("DELETE FROM stores WHERE tenant=? AND id=?", (tenant, store_id))
        self._database.truncate_log()

    def add_members(self, tenant: str, store_id: str, files: Mapping[str, Attributes]) -> list[StoreMember]:
        """Adds or restarts members with these attributes, all or none.

        Raises: NotFound for the store or a file, InputError while a member is being deleted.
        """
        now = time.time()
        keys = [(tenant, store_id, file_id) for file_id in files]
        with self._database.writing() as db:
            if not db.execute("SELECT 1 FROM stores WHERE tenant=? AND id=?", (tenant, store_id)).fetchone():
                raise NotFound(f"there is no vector store {store_id!r}")
            for key in keys:
                if not db.execute("SELECT 1 FROM files WHERE tenant=? AND id=?", (tenant, key[2])).fetchone():
                    raise NotFound(f"there is no file {key[2]!r}")
                found = db.execute(f"SELECT status FROM members WHERE {_KEY}", key).fetchone()
                if found and found[0] == "deleting":
                    raise InputError(f"file {key[2]!r} is being deleted from {store_id!r}")
            rows = ((*key, now, "in_progress", "", "", json.dumps(dict(files[key[2]])), 0) for key in keys)
            db.executemany("INSERT OR REPLACE INTO members VALUES (?,?,?,?,?,?,?,?,?)", rows)
            db.execute("UPDATE stores SET used_s=? WHERE tenant=? AND id=?", (now, tenant, store_id))
        return [StoreMember(*key, now, "in_progress", "", "", files[key[2]], 0) for key in keys]

    def member(self, tenant: str, store_id: str, file_id: str) -> StoreMember:
        """Raises: NotFound, also while it is being deleted."""
        self.store(tenant, store_id)
        members = self._members(f"{_KEY} AND status<>'deleting'", tenant, store_id, file_id)
        if not members:
            raise NotFound(f"there is no file {file_id!r} in vector store {store_id!r}")
        return members[0]

    def members(self, tenant: str, store_id: str) -> list[StoreMember]:
        """Raises: NotFound for the store."""
        self.store(tenant, store_id)
        return self._members("tenant=? AND store=? AND status<>'deleting'", tenant, store_id)

    def batch(self, tenant: str, store_id: str, batch_id: str) -> list[StoreMember]:
        """The members that were attached together. A member that is attached again leaves the batch. Raises: NotFound."""
        found = [member for member in self.members(tenant, store_id) if member.batch_id == batch_id]
        if not found:
            raise NotFound(f"there is no batch {batch_id!r} in vector store {store_id!r}")
        return found

    def members_of_file(self, tenant: str, file_id: str) -> list[StoreMember]:
        return self._members("tenant=? AND file=?", tenant, file_id)

    def unfinished(self) -> list[StoreMember]:
        """Members of all tenants that are in_progress or deleting, oldest first."""
        return self._members("status IN ('in_progress', 'deleting') ORDER BY created_s")

    def completed(self) -> list[StoreMember]:
        """Members of all tenants."""
        return self._members("status='completed'")

    def is_in_progress(self, member: StoreMember) -> bool:
        """False if the member has ended, is being deleted or was attached again."""
        where = f"{_KEY} AND created_s=? AND status='in_progress'"
        return bool(self._members(where, *member.key, member.created_s))

    def end(self, member: StoreMember, status: str, code: str = "", message: str = "", num_bytes: int = 0) -> None:
        """Ends a member that is in progress. Does nothing if it was restarted or deleted meanwhile."""
        self._write(
            "UPDATE members SET status=?, code=?, message=?, num_bytes=? "
            f"WHERE {_KEY} AND created_s=? AND status='in_progress'",
            (status, code, message, num_bytes, *member.key, member.created_s),
        )

    def restart(self, members: Sequence[StoreMember]) -> None:
        """Sets completed members to in_progress."""
        keys = [member.key for member in members]
        self._write(f"UPDATE members SET status='in_progress' WHERE {_KEY} AND status='completed'", *keys)

    def set_status(self, members: Sequence[StoreMember], status: str) -> None:
        self._write(f"UPDATE members SET status=? WHERE {_KEY}", *((status, *member.key) for member in members))

    def still_deleting(self, members: Sequence[StoreMember]) -> list[StoreMember]:
        """The members that were neither deleted nor restarted meanwhile."""
        found = {(each.key, each.created_s) for each in self.unfinished() if each.status == "deleting"}
        return [member for member in members if (member.key, member.created_s) in found]

    def drop_members(self, members: Sequence[StoreMember]) -> None:
        """Removes the members that are still deleting; the others were restarted."""
        keys = [(*member.key, member.created_s) for member in members]
        self._write(f"DELETE FROM members WHERE {_KEY} AND created_s=? AND status='deleting'", *keys)
        self._database.truncate_log()

    def close(self) -> None:
        self._database.close()

    def _write(self, statement: str, *rows: Sequence[Any]) -> None:
        """Runs the statement for every row, in one transaction."""
        with self._database.writing() as db:
            db.executemany(statement, rows)

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._database.reading() as db:
            return db.execute(query, values).fetchall()

    def _members(self, where: str, *values: object) -> list[StoreMember]:
        rows = self._rows(f"SELECT * FROM members WHERE {where}", *values)
        return [StoreMember(*[*row[:-2], json.loads(row[-2]), row[-1]]) for row in rows]


def _store(row: Sequence[Any]) -> StoreRecord:
    return StoreRecord(*[*row[:-1], json.loads(row[-1])])


@dataclass(slots=True)
class StoredBytes:
    """Stored bytes of one tenant, as its quotas count them. `fullest_bytes`: the most in one index, as each has its own quota."""

    num_files: int = 0
    file_bytes: int = 0
    fullest_bytes: int = 0
    num_conversations: int = 0
    conversation_bytes: int = 0


def stored_bytes(data_dir: Path) -> dict[str, StoredBytes]:
    """Bytes by tenant in the databases of a service, which may be running. Raises: SaveError."""
    found = defaultdict[str, StoredBytes](StoredBytes)
    for path in sorted(data_dir.rglob("library.sqlite")):
        for tenant, count, num_bytes in _totals(path, _BYTES_BY_RECORD):
            usage = found[tenant]
            usage.num_files += count
            usage.file_bytes += num_bytes
            usage.fullest_bytes = max(usage.fullest_bytes, num_bytes)
    for tenant, count, num_bytes in _totals(data_dir / "conversations.sqlite", _BYTES_BY_CONVERSATION):
        found[tenant].num_conversations += count
        found[tenant].conversation_bytes += num_bytes
    return dict(found)


def _totals(path: Path, query: str) -> list[tuple[str, int, int]]:
    """Tenant, count and bytes; nothing where there is no database."""
    if not path.exists():
        return []
    with read_only(path) as db:
        return db.execute(
            f"SELECT tenant, SUM(is_file), CAST(TOTAL(bytes) AS INTEGER) FROM ({query}) GROUP BY tenant"
        ).fetchall()


@contextlib.contextmanager
def read_only(path: Path, timeout_s: float = _READ_TIMEOUT_S) -> Iterator[sqlite3.Connection]:
    """A database that another process may be writing. Raises: SaveError."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=timeout_s)) as db:
            yield db
    except sqlite3.Error as cause:
        raise SaveError(f"{path} cannot be read: {cause}") from cause
