"""The index as those see it who put files in: a file of a vector store is some documents of one origin.

Every change is one commit. Another process that writes is waited for, a while.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ragspec.core import Document
from ragspec.errors import IndexBusy, StoreMissing
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.document_map import DocumentMap
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from services.stores.parsing import origin_of
from services.stores.records import Member

Forget = Callable[[str, Sequence[str]], None]
"""Called with a tenant and the ids of its documents that are gone."""

TRIES, _TRY_AGAIN_S = 20, 0.5


class MembersIndex:
    """`forget` clears the caches of what was deleted or replaced."""

    def __init__(self, index_dir: Path, encoder: TextEncoder, forget: Forget) -> None:
        self._index_dir, self._encoder, self._forget = index_dir, encoder, forget
        self._hurries = False

    def hurry(self) -> None:
        """From any thread: wait for no other process any more."""
        self._hurries = True

    def knows_any(self, members: Sequence[Member]) -> bool:
        """Whether a document of any of them is there. Raises: StoreCorrupt."""
        try:
            live = DocumentMap(Store.open(self._index_dir), with_texts=False)
        except StoreMissing:
            return False
        there = {(owner, origin) for _, owner, origin in live.origins()}
        return any((member.tenant, origin_of(member)) in there for member in members)

    def replace(self, members: Sequence[Member], documents: Sequence[Document]) -> bool:
        """What the index has of these members is replaced by these documents, in one commit; whether it had anything.

        Raises: IndexBusy, SaveError, InputError.
        """
        origins = {(member.tenant, origin_of(member)) for member in members}
        with self.opened() as writer:
            old = [name for name, owner, origin in writer.origins() if (owner, origin) in origins]
            new = {document.id for document in documents}
            for document in documents:
                writer.upsert(document)
            for name in old:
                if name not in new:
                    writer.delete(name)
            writer.commit()
        gone: dict[str, list[str]] = {}
        owners = {origin_of(member): member.tenant for member in members}
        for name in old:
            gone.setdefault(owners[":".join(name.split(":")[:2])], []).append(name)
        for tenant, names in gone.items():
            self._forget(tenant, names)
        return bool(old)

    @contextlib.contextmanager
    def opened(self) -> Iterator[IndexWriter]:
        """Raises: IndexBusy, SaveError."""
        with contextlib.ExitStack() as stack:
            for attempt in range(TRIES):
                try:
                    writer = stack.enter_context(IndexWriter(self._index_dir, self._encoder))
                    break
                except IndexBusy:
                    if attempt == TRIES - 1 or self._hurries:
                        raise
                    time.sleep(_TRY_AGAIN_S)
            yield writer
