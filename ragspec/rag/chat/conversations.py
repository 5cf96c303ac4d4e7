"""Conversations and the passages shown in their turns, in one SQLite file.

A conversation has an id and stores its messages. The passages in a turn's prompt are stored under a digest of all turns up to it
(`turn_keys`). So they are also found for a client that sends all messages itself, and no message of such a client is stored.
A reader's feedback on a turn belongs to the turn's conversation.

Tenants see only their own entries. Entries not used for `ttl_s` are deleted, as are a tenant's oldest beyond
`max_bytes_per_tenant`.

    >>> store = ConversationStore(Path("conversations.sqlite"))
    >>> name = store.create("acme").id
    >>> store.append("acme", name, [QaPair("When did it rain?", "At dawn.")])
"""

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ragspec.config import PassageOrder
from ragspec.core import Passage, blocks_of
from ragspec.database import Database
from ragspec.errors import NoRoom, NotFound, StoreCorrupt
from ragspec.rag.wording import FORMER_RULES, TextRules
from ragspec.retrieval.expansion import JoinedPassage

MAX_BYTES_PER_TENANT = 64 * 2**20
_SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS conversations (
    tenant TEXT, id TEXT, created_s REAL, used_s REAL, num_bytes INTEGER, metadata TEXT, PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS said (
    tenant TEXT, conversation TEXT, number INTEGER, question TEXT, answer TEXT, PRIMARY KEY (tenant, conversation, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shown (
    tenant TEXT, key TEXT, conversation TEXT, used_s REAL, num_bytes INTEGER, generation TEXT, cited TEXT, passages TEXT,
    PRIMARY KEY (tenant, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS shown_by_use ON shown (used_s, tenant, num_bytes);
CREATE INDEX IF NOT EXISTS shown_by_conversation ON shown (tenant, conversation);
CREATE TABLE IF NOT EXISTS shown_documents (
    tenant TEXT, document TEXT, key TEXT, PRIMARY KEY (tenant, document, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS shown_documents_by_key ON shown_documents (tenant, key);
CREATE TABLE IF NOT EXISTS said_keys (
    tenant TEXT, conversation TEXT, number INTEGER, key TEXT, PRIMARY KEY (tenant, conversation, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS feedback (
    tenant TEXT, conversation TEXT, number INTEGER, rating TEXT, note TEXT, PRIMARY KEY (tenant, conversation, number)
) WITHOUT ROWID
"""
_OF_TURN = "WHERE tenant=? AND conversation=? AND number=?"
_RECORD_BYTES = 256
"""What a conversation counts beside its texts, so that empty ones count too."""
_CLEAN_EVERY = 16
"""Writes between two searches for entries to delete."""


class QaPair(NamedTuple):
    """A question and its answer; either may be empty."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class ShownPassages:
    """The passages of one prompt, in order, and their index generation. `cited`: ids of the passages that the answer cites.
    `ranks`: of the passages in the order "shared"; empty in the order "rank", and in turns from before there was another.
    `rules`: by which the turn was answered; turns from before there were others name none."""

    passages: tuple[Passage | JoinedPassage, ...]
    generation: str = ""
    cited: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    rules: TextRules = FORMER_RULES

    @property
    def order(self) -> PassageOrder:
        return "shared" if self.ranks else "rank"


class Feedback(NamedTuple):
    """A reader's verdict on an answer."""

    rating: Literal["up", "down"]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Times in seconds since the epoch."""

    id: str
    created_s: float
    used_s: float
    metadata: Mapping[str, str]


def turn_keys(visibility: str, pairs: Iterable[QaPair], question: str) -> list[str]:
    """A digest for each turn and for the new question: of its question, everything before it, and `visibility`."""
    digest, keys = hashlib.sha256(), []
    for text in (visibility, *(text for pair in pairs for text in pair), question):
        raw = text.encode("utf-8")
        digest.update(len(raw).to_bytes(8, "little") + raw)
        keys.append(digest.copy().hexdigest())
    return keys[1::2]


_ENTRIES_BY_AGE = (
    "SELECT used_s, tenant, num_bytes, 0, id FROM conversations {0} "
    "UNION ALL SELECT used_s, tenant, num_bytes, 1, key FROM shown {0} ORDER BY 1"
)


class ConversationStore:
    """Owns the file. Safe to call from several threads and processes."""

    def __init__(
        self,
        path: str | Path,
        *,
        ttl_s: float = 7 * 86_400.0,
        max_bytes_per_tenant: int = MAX_BYTES_PER_TENANT,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` gives seconds since the epoch; None: `_steady_clock`. Raises: SaveError, StoreCorrupt."""
        self.ttl_s, self._max_bytes, self._num_writes = ttl_s, max_bytes_per_tenant, 0
        self._database = Database(Path(path), _TABLES, _SCHEMA)
        self._clock = clock or _steady_clock(self._last_used_s(), ttl_s)
        with self._database.writing() as db:
            now_s = self._clock()
            for table in ("conversations", "shown"):  # Why: what a wrong clock wrote would never grow old
                db.execute(f"UPDATE {table} SET used_s=? WHERE used_s>?", (now_s, now_s))
            _delete_rows(db, self._expired(db))
        self._database.truncate_log()

    def create(
        self, tenant: str, metadata: Mapping[str, str] | None = None, turns: Sequence[QaPair] = ()
    ) -> Conversation:
        """A new conversation with these turns. Raises: SaveError."""
        now, text = self._clock(), json.dumps(dict(metadata or {}))
        conversation = Conversation(f"conv_{secrets.token_hex(12)}", now, now, dict(metadata or {}))
        with self._writing(tenant) as db:
            row = (tenant, conversation.id, now, now, _RECORD_BYTES + len(text), text)
            db.execute("INSERT INTO conversations VALUES (?,?,?,?,?,?)", row)
            self._append(db, tenant, conversation.id, turns)
        return conversation

    def find(self, tenant: str, conversation: str) -> Conversation:
        """Raises: NotFound, SaveError, StoreCorrupt."""
        for found in self._conversations(tenant, "AND id=?", conversation):
            return found
        raise _missing(conversation)

    def conversations(self, tenant: str) -> list[Conversation]:
        """Raises: SaveError, StoreCorrupt."""
        return self._conversations(tenant)

    def _conversations(self, tenant: str, condition: str = "", *values: object) -> list[Conversation]:
        query = f"SELECT id, created_s, used_s, metadata FROM conversations WHERE tenant=? AND used_s>=? {condition}"
        with self._database.reading() as db:
            rows = db.execute(query, (tenant, self._clock() - self.ttl_s, *values)).fetchall()
        return [Conversation(name, made_s, used_s, json.loads(text)) for name, made_s, used_s, text in rows]

    def change(self, tenant: str, conversation: str, metadata: Mapping[str, str]) -> Conversation:
        """Replace its metadata. Raises: NotFound, SaveError, StoreCorrupt."""
        old, text = self.find(tenant, conversation), json.dumps(dict(metadata))
        with self._writing(tenant) as db:
            self._use(db, tenant, conversation, len(text) - len(json.dumps(dict(old.metadata))))
            db.execute("UPDATE conversations SET metadata=? WHERE tenant=? AND id=?", (text, tenant, conversation))
        return self.find(tenant, conversation)

    def turns(self, tenant: str, conversation: str) -> list[QaPair]:
        """The turns of a conversation, the oldest first. Raises: NotFound, SaveError, StoreCorrupt."""
        self.find(tenant, conversation)
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT question, answer FROM said WHERE tenant=? AND conversation=? ORDER BY number",
                (tenant, conversation),
            ).fetchall()
        return [QaPair(*row) for row in rows]

    def append(self, tenant: str, conversation: str, turns: Sequence[QaPair], keys: Sequence[str] = ()) -> None:
        """Append all turns or none. `keys`: of each turn, under which its passages are kept.

        Raises: NotFound, NoRoom, SaveError, StoreCorrupt.
        """
        with self._writing(tenant) as db:
            first = self._append(db, tenant, conversation, turns)
            rows = [(tenant, conversation, number, key) for number, key in enumerate(keys, first)]
            db.executemany("INSERT INTO said_keys VALUES (?,?,?,?)", rows)

    def shown(self, tenant: str, conversation: str) -> dict[int, ShownPassages]:
        """The passages that turns of a conversation were shown, by the turn's number. Raises: SaveError, StoreCorrupt."""
        query = "SELECT number, key FROM said_keys WHERE tenant=? AND conversation=?"
        with self._database.reading() as db:
            keys = dict(db.execute(query, (tenant, conversation)).fetchall())
        found = self.load_shown(tenant, list(keys.values()))
        return {number: found[key] for number, key in keys.items() if key in found}

    def rate(self, tenant: str, conversation: str, number: int, feedback: Feedback | None) -> None:
        """Keep feedback on a turn, or none, in place of the earlier. Raises: NotFound, NoRoom, SaveError, StoreCorrupt."""
        place = (tenant, conversation, number)
        with self._writing(tenant) as db:
            if not db.execute(f"SELECT 1 FROM said {_OF_TURN}", place).fetchone():
                raise NotFound(f"conversation {conversation!r} has no turn {number}")
            earlier = db.execute(f"DELETE FROM feedback {_OF_TURN} RETURNING note", place).fetchall()
            more = len(feedback.note.encode()) if feedback else 0
            self._use(db, tenant, conversation, more - sum(len(note.encode()) for (note,) in earlier))
            if feedback:
                db.execute("INSERT INTO feedback VALUES (?,?,?,?,?)", (*place, *feedback))

    def feedback(self, tenant: str, conversation: str) -> dict[int, Feedback]:
        """By the turn's number. Raises: SaveError, StoreCorrupt."""
        query = "SELECT number, rating, note FROM feedback WHERE tenant=? AND conversation=?"
        with self._database.reading() as db:
            rows = db.execute(query, (tenant, conversation)).fetchall()
        return {number: Feedback(*rest) for number, *rest in rows}

    def _use(self, db: sqlite3.Connection, tenant: str, conversation: str, num_bytes: int) -> None:
        """Mark as used, and count `num_bytes` more. Raises: NotFound, NoRoom."""
        row = db.execute(
            "UPDATE conversations SET used_s=?, num_bytes=num_bytes+? WHERE tenant=? AND id=? RETURNING num_bytes",
            (self._clock(), num_bytes, tenant, conversation),
        ).fetchone()
        if row is None:
            raise _missing(conversation)
        if row[0] > self._max_bytes:
            raise NoRoom(f"conversation {conversation!r} would have more than {self._max_bytes} bytes")

    def _append(self, db: sqlite3.Connection, tenant: str, conversation: str, turns: Sequence[QaPair]) -> int:
        """The number of the first of these turns."""
        self._use(db, tenant, conversation, sum(len(text.encode()) for turn in turns for text in turn))
        (number,) = db.execute(
            "SELECT COALESCE(MAX(number), -1) + 1 FROM said WHERE tenant=? AND conversation=?", (tenant, conversation)
        ).fetchone()
        rows = [(tenant, conversation, number + n, *turn) for n, turn in enumerate(turns)]
        db.executemany("INSERT INTO said VALUES (?,?,?,?,?)", rows)
        return int(number)

    def save_shown(
        self, tenant: str, key: str, shown: ShownPassages, *, conversation: str = "", earlier: Sequence[str] = ()
    ) -> None:
        """Replace the passages of a turn, and mark the `earlier` turns as used. Raises: SaveError, StoreCorrupt."""
        ranks = [{"rank": rank} for rank in shown.ranks] or [{}] * len(shown.passages)
        rows = [asdict(passage) | rank for passage, rank in zip(shown.passages, ranks, strict=True)]
        for first in rows[:1]:
            first["rules"] = shown.rules.to_json()
        now, text, cited = self._clock(), json.dumps(rows), json.dumps(shown.cited)
        with self._writing(tenant) as db:
            _delete_shown(db, tenant, key)
            row = (tenant, key, conversation, now, len(text), shown.generation, cited, text)
            db.execute("INSERT INTO shown VALUES (?,?,?,?,?,?,?,?)", row)
            documents = {passage.document_id for passage in shown.passages}
            db.executemany("INSERT INTO shown_documents VALUES (?,?,?)", [(tenant, each, key) for each in documents])
            db.executemany("UPDATE shown SET used_s=? WHERE tenant=? AND key=?", [(now, tenant, k) for k in earlier])

    def drop_shown(self, tenant: str, key: str) -> None:
        """Delete the passages of a turn. Raises: SaveError, StoreCorrupt."""
        with self._database.writing() as db:
            _delete_shown(db, tenant, key)
        self._database.truncate_log()

    def load_shown(self, tenant: str, keys: Sequence[str]) -> dict[str, ShownPassages]:
        """The stored passages of these turns, by key; unknown keys are left out. Raises: SaveError, StoreCorrupt."""
        oldest_s = self._clock() - self.ttl_s
        shown: dict[str, ShownPassages] = {}
        if not keys:
            return shown
        with self._database.reading() as db:
            for key in keys:
                row = db.execute(
                    "SELECT passages, generation, cited FROM shown WHERE tenant=? AND key=? AND used_s>=?",
                    (tenant, key, oldest_s),
                ).fetchone()
                if row is not None:
                    shown[key] = self._read(*row)
        return shown

    def delete(self, tenant: str, conversation: str) -> None:
        """Delete a conversation and its passages. Raises: NotFound, SaveError, StoreCorrupt."""
        with self._database.writing() as db:
            if not _delete_conversation(db, tenant, conversation):
                raise _missing(conversation)
        self._database.truncate_log()

    def forget_documents(self, tenant: str, documents: Iterable[str]) -> None:
        """Delete the passages of every turn that was shown one of these documents. Raises: SaveError, StoreCorrupt."""
        with self._database.writing() as db:
            for document in documents:
                query = "SELECT key FROM shown_documents WHERE tenant=? AND document=?"
                for (key,) in db.execute(query, (tenant, document)).fetchall():
                    _delete_shown(db, tenant, key)
        self._database.truncate_log()

    def close(self) -> None:
        self._database.close()

    def _read(self, passages: str, generation: str, cited: str) -> ShownPassages:
        try:
            kinds = {False: Passage, True: JoinedPassage}
            rows = json.loads(passages)
            ranks = tuple(fields.pop("rank") for fields in rows if "rank" in fields)
            rules = [TextRules.from_json(fields.pop("rules")) for fields in rows[:1] if "rules" in fields]
            read = tuple(kinds["hit_start" in fields](**_with_blocks(fields)) for fields in rows)
            return ShownPassages(read, generation, tuple(json.loads(cited)), ranks, *rules)
        except (ValueError, TypeError) as cause:
            raise StoreCorrupt(f"{self._database.path} holds a passage that this version cannot read") from cause

    @contextmanager
    def _writing(self, tenant: str) -> Iterator[sqlite3.Connection]:
        """A write transaction that also deletes expired and surplus entries from the disk."""
        with self._database.writing() as db:
            yield db
            dropped = self._clean(db, tenant)
        if dropped:
            self._database.truncate_log()

    def _clean(self, db: sqlite3.Connection, tenant: str) -> bool:
        """Delete expired entries of all tenants and surplus entries of this one; whether there were any."""
        self._num_writes += 1
        if self._num_writes % _CLEAN_EVERY:
            return False
        rows, own = self._expired(db), db.execute(_ENTRIES_BY_AGE.format("WHERE tenant=?"), (tenant, tenant)).fetchall()
        surplus = sum(num_bytes for _, _, num_bytes, _, _ in own) - self._max_bytes
        for row in own[:-1]:
            if surplus > 0:
                rows.append(row)
                surplus -= row[2]
        _delete_rows(db, rows)
        return bool(rows)

    def _last_used_s(self) -> float:
        entries = "SELECT used_s FROM conversations UNION ALL SELECT used_s FROM shown"
        with self._database.reading() as db:
            return float(db.execute(f"SELECT max(used_s) FROM ({entries})").fetchone()[0] or 0.0)

    def _expired(self, db: sqlite3.Connection) -> list[Any]:
        oldest_s = self._clock() - self.ttl_s
        return db.execute(_ENTRIES_BY_AGE.format("WHERE used_s<?"), (oldest_s, oldest_s)).fetchall()


_CLOCK_IS_SET_S = 1_577_836_800.0
"""2020. A machine that tells an earlier time does not know it."""


def _steady_clock(least_s: float, most_ahead_s: float) -> Callable[[], float]:
    """Seconds since the epoch as the machine tells them now, but at least `least_s`; from now on they pass one by one.

    Why: a clock that is set right while the service runs, a week ahead, would delete every conversation, and one that was set
    back would keep none that is used before it has caught up. A clock that is set is followed to within `most_ahead_s`, so one
    entry that was written a century ahead does not stop time.
    """
    now_s = time.time()
    if now_s > _CLOCK_IS_SET_S:
        least_s = min(least_s, now_s + most_ahead_s)
    offset_s = max(now_s, least_s) - time.monotonic()
    return lambda: time.monotonic() + offset_s


def _with_blocks(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"headings": tuple(fields.get("headings", ())), "blocks": blocks_of(fields.get("blocks", ()))}


def _delete_rows(db: sqlite3.Connection, rows: Sequence[Any]) -> None:
    """Delete rows of `_ENTRIES_BY_AGE`."""
    for _, owner, _, is_shown, name in rows:
        (_delete_shown if is_shown else _delete_conversation)(db, owner, name)


def _missing(conversation: str) -> NotFound:
    return NotFound(f"there is no conversation {conversation!r}")


def _delete_conversation(db: sqlite3.Connection, tenant: str, conversation: str) -> bool:
    """Whether the conversation existed."""
    keys = db.execute("SELECT key FROM shown WHERE tenant=? AND conversation=?", (tenant, conversation)).fetchall()
    for (key,) in keys:
        _delete_shown(db, tenant, key)
    for table in ("said", "said_keys", "feedback"):
        db.execute(f"DELETE FROM {table} WHERE tenant=? AND conversation=?", (tenant, conversation))
    return bool(db.execute("DELETE FROM conversations WHERE tenant=? AND id=?", (tenant, conversation)).rowcount)


def _delete_shown(db: sqlite3.Connection, tenant: str, key: str) -> None:
    db.execute("DELETE FROM shown_documents WHERE tenant=? AND key=?", (tenant, key))
    db.execute("DELETE FROM shown WHERE tenant=? AND key=?", (tenant, key))
