"""Datastore drafting: what follows the output's last tokens in all documents that the requester may read, retrieved or not.

A segment's texts are tokenised and their suffixes sorted once, at start or, after a commit, by a thread. The result is kept
beside the segment as `suffixes-<hash of tokenizer and documents>.npy` and mapped. Counts cover live documents of the requester's
tenant and of the public alone; a segment with other documents that is too large to count so is left out.

    >>> drafter = DatastoreDrafter(Datastore(Path("index"), target.tokenizer))

Source: REST (He et al. 2023, arXiv 2311.08252); here with counts of all matches, and exact at every temperature.
"""

import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ragspec.core import Request
from ragspec.disk import atomic_writer
from ragspec.drafting.acceptance import MAX_TENANTS
from ragspec.drafting.counted import CountedAcceptance, CountedDrafts, compile_searches
from ragspec.drafting.drafter import Budget, Drafter, SequenceView
from ragspec.drafting.suffix_index import NO_TOKENS, SEPARATOR, Ints, SortedSuffixes, VisibleSuffixes
from ragspec.errors import StoreError
from ragspec.retrieval.index.manifest import DOCUMENTS
from ragspec.retrieval.index.segment_files import mapped_array, npy_bytes, unchanged
from ragspec.retrieval.index.store import IndexSegment, LiveSegment, Store
from ragspec.tenants import TenantStates, tenant_of
from ragspec.tree import Proposal

log = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 256
_VISIBLE_BYTES = 2**28
"""Of counts of visible suffixes: 4 bytes a token for each tenant and segment with documents that it may not read."""


class Datastore:
    """The sorted suffixes of an index's current generation. `views` may be called from several threads."""

    def __init__(self, index_dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises: StoreError."""
        self._tokenizer, self._tokenizer_id = tokenizer, _tokenizer_id(tokenizer)
        self._lock = threading.Lock()
        self._store = Store.open(index_dir)
        self._suffixes: dict[str, SortedSuffixes] = {}  # by file
        self._visible: OrderedDict[tuple[str, str, str], Ints] = OrderedDict()  # the least recently used first
        self._builder: threading.Thread | None = None
        self._build(self._store.segments)

    def views(self, tenant: str) -> list[VisibleSuffixes]:
        """The suffixes that a tenant may read, of the segments that are sorted so far. Raises: StoreError."""
        with self._lock:
            self._store = self._store.refreshed()
            names = {self._path(live.segment).name for live in self._store.segments}
            self._suffixes = {name: suffixes for name, suffixes in self._suffixes.items() if name in names}
            if names - self._suffixes.keys() and not (self._builder and self._builder.is_alive()):
                self._builder = threading.Thread(target=self._build, args=(self._store.segments,), daemon=True)
                self._builder.start()
            return list(self._views(tenant))

    def wait(self) -> None:
        """Wait for the segments of the latest commit that was seen."""
        if self._builder:
            self._builder.join()

    def _views(self, tenant: str) -> Iterator[VisibleSuffixes]:
        for live in self._store.segments:
            suffixes = self._suffixes.get(self._path(live.segment).name)
            readable = live.is_live & live.segment.readable(tenant)
            if suffixes is None or not readable.any():
                continue
            if readable.all():
                yield VisibleSuffixes(suffixes)
            elif 4 * len(suffixes.tokens) <= _VISIBLE_BYTES:
                yield VisibleSuffixes(suffixes, self._visible_of(live.segment, suffixes, readable, tenant))

    def _visible_of(
        self, segment: IndexSegment, suffixes: SortedSuffixes, readable: NDArray[np.bool_], tenant: str
    ) -> Ints:
        key = segment.name, self._store.generation, tenant
        if key not in self._visible:
            ends = np.flatnonzero(suffixes.tokens == SEPARATOR)  # one a document
            with unchanged(segment.folder):
                seen = readable[np.searchsorted(ends, suffixes.order)]
            self._visible[key] = np.concatenate([[0], np.cumsum(seen)]).astype(np.int32)
        self._visible.move_to_end(key)
        while sum(visible.nbytes for visible in self._visible.values()) > _VISIBLE_BYTES + 4:
            self._visible.popitem(last=False)
        return self._visible[key]

    def _build(self, segments: Iterable[LiveSegment]) -> None:
        for segment in (live.segment for live in segments):
            path = self._path(segment)
            if path.name in self._suffixes:
                continue
            try:
                suffixes = _kept(path, segment.record.num_documents) or self._sorted(segment, path)
            except Exception:  # left out for good: every request would begin it again
                log.exception("the drafter datastore leaves %s out", segment.folder)
                suffixes = SortedSuffixes(NO_TOKENS, NO_TOKENS)
            with self._lock:
                self._suffixes[path.name] = suffixes

    def _sorted(self, segment: IndexSegment, path: Path) -> SortedSuffixes:
        """Tokenise and sort a segment's documents, and keep the result if the folder can be written."""
        suffixes = SortedSuffixes.build(np.concatenate(list(self._token_runs(segment))))
        try:
            with atomic_writer(path) as file:
                file.write(npy_bytes(np.stack(suffixes)))
        except OSError as cause:
            log.warning("sorted suffixes are not kept: cannot write %s: %s", path, cause.strerror or cause)
        return suffixes

    def _token_runs(self, segment: IndexSegment) -> Iterator[Ints]:
        """Each document's tokens and a separator. Why a space first: that is how a text's words stand inside an answer."""
        for first in range(0, segment.record.num_documents, _TEXTS_AT_ONCE):
            numbers = range(first, min(first + _TEXTS_AT_ONCE, segment.record.num_documents))
            texts = [" " + segment.text(number) for number in numbers]
            for ids in self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                yield np.array([*ids, SEPARATOR], np.int32)

    def _path(self, segment: IndexSegment) -> Path:
        documents = segment.record.files[DOCUMENTS].sha256
        name = hashlib.sha256(f"{self._tokenizer_id} {documents}".encode()).hexdigest()[:24]
        return segment.folder / f"suffixes-{name}.npy"


class DatastoreDrafter(Drafter):
    """See the module. A request sees the generation that was current when it was submitted."""

    name = "datastore"

    def __init__(self, datastore: Datastore) -> None:
        self._datastore = datastore
        compile_searches()
        self._acceptance = TenantStates(MAX_TENANTS, CountedAcceptance)

    def prepare(self, request: Request) -> list[VisibleSuffixes]:
        return self._datastore.views(tenant_of(request.salt))

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        return [self._propose(s, budget.max_nodes, depth) for s, depth in zip(sequences, budget.depths, strict=True)]

    def _propose(self, sequence: SequenceView, max_nodes: int, depth: int) -> list[Proposal]:
        views = sequence.prepared.get(self.name) or ()
        acceptance = self._acceptance.used(tenant_of(sequence.request.salt))
        return CountedDrafts(self.name, views, acceptance).grow(sequence.tokens, max_nodes, depth)[0]

    def purge(self, salt: str) -> None:
        self._acceptance.purge(salt)


def _kept(path: Path, num_documents: int) -> SortedSuffixes | None:
    """The suffixes in a file, mapped, if it is whole."""
    if not path.exists():
        return None
    try:
        both = mapped_array(path)
        tokens, order = both
        places = np.bincount(order, minlength=len(tokens))
        is_order = both.dtype == np.int32 and len(places) == len(tokens) and (places == 1).all()
        if is_order and tokens.min() == SEPARATOR and np.count_nonzero(tokens == SEPARATOR) == num_documents:
            return SortedSuffixes(tokens, order)
        log.warning("%s holds no sorted suffixes of its segment and is made anew", path)
    except (StoreError, ValueError, TypeError) as cause:
        log.warning("%s is made anew: %s", path, cause)
    return None


def _tokenizer_id(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()
