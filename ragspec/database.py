"""One SQLite file, safe to use from several threads and processes.

A committed transaction survives a crash of the process. Deleted content is overwritten on disk. Error messages never contain
values of statements.

    >>> database = Database(Path("notes.sqlite"), "CREATE TABLE IF NOT EXISTS notes (id TEXT PRIMARY KEY, text TEXT);", schema=1)
    >>> with database.writing() as db:
    ...     db.execute("INSERT INTO notes VALUES (?, ?)", ("a", "It rained."))
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from ragspec.disk import make_folder, saving
from ragspec.errors import SaveError, StoreCorrupt

_BUSY_S = 5.0
"""How long to wait for another process's write."""


class Database:
    """Owns the connection. States: open -> closed."""

    def __init__(self, path: Path, tables: str, schema: int) -> None:
        """`tables`: the statements that create each table of version `schema` that is missing, with IF NOT EXISTS.

        Raises: SaveError if the file cannot be created, StoreCorrupt if it is damaged or has another schema.
        """
        self.path = path
        self._lock = threading.Lock()
        with saving(path), self._errors():
            make_folder(path.parent)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(tables, schema)
            except BaseException:
                self._db.close()
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Raises: SaveError, StoreCorrupt."""
        with self._lock, self._errors():
            yield self._db

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed as a whole or not at all. Raises: SaveError, StoreCorrupt."""
        with self._lock, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def truncate_log(self) -> None:
        """Remove deleted content from the write-ahead log, too, unless another process is reading it."""
        with self.reading() as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _prepare(self, tables: str, schema: int) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # Why enough: only a power loss can lose the latest changes
        self._db.execute("PRAGMA secure_delete=ON")
        self._db.execute("BEGIN IMMEDIATE")
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found in (0, schema):
            for statement in filter(str.strip, tables.split(";")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={schema:d}")
        self._db.execute("COMMIT")
        if found not in (0, schema):
            raise StoreCorrupt.of_schema(self.path, found, schema)
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise StoreCorrupt(f"{self.path} is damaged: remove it, or put back an older copy")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Why the library's messages are safe to show: they never quote values."""
        try:
            yield
        except sqlite3.OperationalError as cause:  # full, locked, read-only, cannot be opened
            raise SaveError(f"cannot use {self.path}: {cause}") from cause
        except sqlite3.ProgrammingError as cause:
            raise SaveError(f"cannot use {self.path}: it is closed") from cause
        except sqlite3.DatabaseError as cause:
            raise StoreCorrupt(f"{self.path} is damaged ({cause}): remove it, or put back an older copy") from cause
