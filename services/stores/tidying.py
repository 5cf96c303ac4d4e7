"""An index's files after deletions: text that nobody can find any more leaves the disk some time later.

Owns when that is, never what is deleted. Only where search is exact: after a merge HNSW and IVF may find other neighbours.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from ragspec.errors import IndexBusy
from ragspec.retrieval.index.index_directory import GRACE_S
from ragspec.retrieval.index.manifest import CURRENT
from ragspec.retrieval.index.writer import IndexWriter

log = logging.getLogger(__name__)

WAIT_S = 600.0
"""From a deletion until its text is taken out, together with all that is deleted meanwhile: a segment is written anew for it."""


class Tidying:
    """For one thread. `due_s`: when there is something to do, of time.monotonic; None: nothing that is known."""

    def __init__(self, index_dir: Path, opened: Callable[[], AbstractContextManager[IndexWriter]]) -> None:
        self._index_dir, self._opened = index_dir, opened
        self.due_s: float | None = None

    def note(self) -> None:
        """Something was deleted, or may have been by an earlier process."""
        if self.due_s is None:
            self.due_s = time.monotonic() + WAIT_S

    def run(self) -> None:
        """One step, if it is due: at most one segment is written anew, so that others have their turn."""
        if self.due_s is None or time.monotonic() < self.due_s:
            return
        self.due_s = None
        if not (self._index_dir / CURRENT).exists():
            return
        try:
            with self._opened() as writer:
                is_clean = writer.scrub()
        except IndexBusy:
            self.due_s = time.monotonic() + WAIT_S
            return
        except Exception as cause:
            log.warning("deleted text is still in the index's files: %s", type(cause).__name__)
            return
        if not is_clean:
            self.due_s = time.monotonic()
        elif len(list(self._index_dir.glob("generation-*"))) > 1:  # readers may be opening the one before
            self.due_s = time.monotonic() + GRACE_S + 1.0
