"""Changes the index for uploaded files: replaces the documents of members, and later removes deleted text from the disk.

Owns the commits of one service to the index. Each change is one commit; another process that writes is waited for. A member is a
file in a vector store; its documents share an origin.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from ragspec.config import IndexConfig
from ragspec.core import Document
from ragspec.disk import make_private
from ragspec.errors import IndexBusy, StoreError, StoreMissing
from ragspec.retrieval.encoder import FloatArray, TextEncoder
from ragspec.retrieval.index.content_key import check_document
from ragspec.retrieval.index.embedding import Chunker, EmbeddedDocument
from ragspec.retrieval.index.index_directory import GRACE_S
from ragspec.retrieval.index.pointer import CURRENT
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from services.stores.records import StoreMember
from services.stores.uploads import origin_of

log = logging.getLogger(__name__)

Forget = Callable[[str, Sequence[str]], None]
"""Called with a tenant and the ids of its documents that left the index."""

TRIES = 20
"""Attempts to take the index's lock while another process writes."""
_RETRY_S = 0.5
"""Time between two attempts."""
SCRUB_WAIT_S = 600.0
"""From a deletion to the removal of its text from the disk. A scrub rewrites a whole segment, so deletions are collected."""


class PartsMissing(Exception):
    """Parts of a file that were committed are gone: their deletion failed half-way, or the index was rebuilt."""


class IndexUpdater:
    """For one thread, apart from `chunked` and `stop_waiting`. `forget` clears caches of deleted and replaced documents."""

    def __init__(self, index_dir: Path, encoder: TextEncoder, forget: Forget) -> None:
        self._index_dir, self._encoder, self._forget = index_dir, encoder, forget
        self._is_stopping = False
        self.scrub_due_s: float | None = None
        """Time of the next scrub, of time.monotonic; None: nothing to remove."""

    def stop_waiting(self) -> None:
        """No longer waits for other processes. Callable from any thread."""
        self._is_stopping = True

    def has_any(self, members: Sequence[StoreMember]) -> bool:
        """Whether the index has a document of any of the members. Raises: StoreCorrupt."""
        try:
            segments = Store.open(self._index_dir).segments
        except StoreMissing:
            return False
        origins = {each for live in segments for each in live.fields("owner", "origin")}
        return any((member.tenant, origin_of(member)) in origins for member in members)

    def chunked(self, documents: Sequence[Document], *, may_be_known: bool) -> list[EmbeddedDocument]:
        """Cuts documents into passages. Callable from any thread.

        `may_be_known`: passages that the index holds already keep their vectors.
        Raises: InputError for a document that no index can hold; RetrievalError if the encoder does not count tokens.
        """
        chunking, known = IndexConfig().chunking, dict[str, FloatArray]()
        with contextlib.suppress(StoreError):  # then the commit says so
            store = Store.open(self._index_dir, self._encoder.identity, only=None if may_be_known else frozenset())
            chunking, known = store.manifest.config.chunking, store.vectors_of({each.id for each in documents})
        chunker = Chunker(self._encoder, chunking)
        found = [chunker.chunked(check_document(document)) for document in documents]
        for each in found:
            each.reuse(known)
        return found

    def replace(
        self, members: Sequence[StoreMember], documents: Sequence[EmbeddedDocument], kept: Collection[str] = ()
    ) -> None:
        """Adds `documents` and deletes all others of `members`, except those `kept`, in one commit.

        Raises: IndexBusy, SaveError, InputError; PartsMissing if the index lacks documents that are `kept`.
        """
        owners = {origin_of(member): member.tenant for member in members}
        new = {each.document.id for each in documents}
        if documents:
            make_private(self._index_dir)  # Why: until the first upload it was the index of whoever built it
        with self._writer() as writer:
            origins = list(writer.origins())
            if not {name for name, *_ in origins}.issuperset(kept):
                raise PartsMissing
            old = [
                (name, owner)
                for name, owner, origin in origins
                if name in new or (owners.get(origin) == owner and name not in kept)
            ]
            for each in documents:
                writer.upsert(each.document, each)
            for name, _ in old:
                if name not in new:
                    writer.delete(name)
            writer.commit()
        for tenant in {owner for _, owner in old}:
            self._forget(tenant, [name for name, owner in old if owner == tenant])
        if old:
            self.schedule_scrub()

    def schedule_scrub(self) -> None:
        if self.scrub_due_s is None:
            self.scrub_due_s = time.monotonic() + SCRUB_WAIT_S

    def scrub_if_due(self) -> None:
        """Removes deleted text of at most one segment from the disk, so that other changes get their turn.

        Only indexes with exact search are scrubbed: a rewritten HNSW or IVF index may find other neighbours.
        """
        if self.scrub_due_s is None or time.monotonic() < self.scrub_due_s:
            return
        self.scrub_due_s = None
        if not (self._index_dir / CURRENT).exists():
            return
        try:
            with self._writer() as writer:
                is_clean = writer.scrub()
        except IndexBusy:
            self.scrub_due_s = time.monotonic() + SCRUB_WAIT_S
            return
        except Exception as cause:
            log.warning("deleted text is still in the index's files: %s", type(cause).__name__)
            return
        if not is_clean:
            self.scrub_due_s = time.monotonic()
        elif len(list(self._index_dir.glob("generation-*"))) > 1:  # readers may still open the old generation
            self.scrub_due_s = time.monotonic() + GRACE_S + 1.0

    @contextlib.contextmanager
    def _writer(self) -> Iterator[IndexWriter]:
        """Raises: IndexBusy, SaveError."""
        with contextlib.ExitStack() as stack:
            for attempt in range(TRIES):
                try:
                    writer = stack.enter_context(IndexWriter(self._index_dir, self._encoder))
                    break
                except IndexBusy:
                    if attempt == TRIES - 1 or self._is_stopping:
                        raise
                    time.sleep(_RETRY_S)
            yield writer
