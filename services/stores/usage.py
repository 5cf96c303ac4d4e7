"""What each tenant stores, read from a service's databases while it runs.

Owns no file and writes none.

    >>> stored_bytes(Path("/data/service"))["ann"].files
    1048576
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragspec.errors import SaveError
from services.stores.records import RECORD_BYTES

_WAIT_S = 30.0
_LIBRARY = f"""
SELECT tenant, COUNT(*), TOTAL(num_bytes + {RECORD_BYTES}) FROM files GROUP BY tenant
UNION ALL SELECT tenant, 0, TOTAL(LENGTH(name) + LENGTH(metadata) + {RECORD_BYTES}) FROM stores GROUP BY tenant
UNION ALL SELECT tenant, 0, TOTAL(LENGTH(attributes) + {RECORD_BYTES}) FROM members GROUP BY tenant
"""
_CONVERSATIONS = """
SELECT tenant, COUNT(*), TOTAL(num_bytes) FROM conversations GROUP BY tenant
UNION ALL SELECT tenant, 0, TOTAL(num_bytes) FROM shown GROUP BY tenant
"""


@dataclass(slots=True)
class StoredBytes:
    """Of one tenant, as its quotas count them. Files of each index have a quota of their own: `fullest_bytes` are the most."""

    num_files: int = 0
    file_bytes: int = 0
    fullest_bytes: int = 0
    num_conversations: int = 0
    conversation_bytes: int = 0


def stored_bytes(data_dir: Path) -> dict[str, StoredBytes]:
    """By tenant. Raises: SaveError if a database cannot be read."""
    found: dict[str, StoredBytes] = {}
    for path in sorted(data_dir.rglob("library.sqlite")):
        in_library = Counter[str]()
        for tenant, count, num_bytes in _rows(path, _LIBRARY):
            usage = found.setdefault(tenant, StoredBytes())
            usage.num_files, usage.file_bytes = usage.num_files + count, usage.file_bytes + int(num_bytes)
            in_library[tenant] += int(num_bytes)
        for tenant, total in in_library.items():
            found[tenant].fullest_bytes = max(found[tenant].fullest_bytes, total)
    for tenant, count, num_bytes in _rows(data_dir / "conversations.sqlite", _CONVERSATIONS):
        usage = found.setdefault(tenant, StoredBytes())
        usage.num_conversations, usage.conversation_bytes = (
            usage.num_conversations + count,
            usage.conversation_bytes + int(num_bytes),
        )
    return found


def _rows(path: Path, query: str) -> Iterator[tuple[str, int, float]]:
    if not path.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_WAIT_S)) as db:
            yield from db.execute(query).fetchall()
    except sqlite3.Error as cause:
        raise SaveError(f"{path} cannot be read: {cause}") from cause
