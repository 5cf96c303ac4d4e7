"""What a writer did to an index, document by document and counted."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class UpsertOutcome(StrEnum):
    """What an upsert did."""

    ADDED = "added"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    DUPLICATE = "duplicate"


@dataclasses.dataclass(slots=True)
class ChangeCounts:
    """Counts of one writer. `encoded` passages went through the encoder, `reused` ones kept the vector they had."""

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    duplicate: int = 0
    deleted: int = 0
    encoded: int = 0
    reused: int = 0
