"""Queries to passages, and documents to an index.

Owns the order of the two steps (encode, search) and nothing else: the encoder, the store and the search each know their own part.

    >>> build_index(documents, Path("index"), encoder, ChunkingConfig())
    >>> Retriever.from_config(RetrieverConfig(index_dir="index"), EncoderConfig()).retrieve(["When did it rain?"], k=3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ragspec.config import ChunkingConfig, EncoderConfig, RetrieverConfig
from ragspec.core import Document, Passage, check_text
from ragspec.errors import ConfigError, InputError
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.content import checked
from ragspec.retrieval.dense import DenseIndex, ExactIndex
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.manifest import Manifest, read_current
from ragspec.retrieval.store import Store, check_encoder
from ragspec.retrieval.writer import SegmentWriter

Progress = Callable[[int, int], None]
"""Called with (documents, passages) done so far."""

_PASSAGES_PER_ENCODE = 1024
"""Enough texts at once that many have the same token length and share a forward."""


class Retriever:
    """Finds the passages nearest in meaning. Safe to call from several threads; never changes after it was built."""

    def __init__(self, encoder: TextEncoder, store: Store, index: DenseIndex | None = None) -> None:
        """`index` searches `store.vectors`; exact search if none is given. Raises: EncoderMismatch."""
        check_encoder(store.manifest, encoder.identity)
        self._encoder = encoder
        self._store = store
        self._index = index or ExactIndex(store.vectors, store.passage_key)

    @classmethod
    def from_config(cls, config: RetrieverConfig, encoder: EncoderConfig) -> Retriever:
        """Raises: ConfigError without an index folder, StoreError or ModelError if index or encoder cannot be used."""
        if not config.index_dir:
            raise ConfigError("retriever.index_dir is not set: build an index first, then name its folder")
        read_current(Path(config.index_dir))  # Why first: a missing index is told before seconds of loading a model
        loaded = Encoder.load(encoder)
        return cls(loaded, Store.open(config.index_dir, loaded.identity))

    @property
    def generation(self) -> str:
        """Names the index's generation and content; equal generations give equal passages."""
        return self._store.generation

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The `k` best passages of each query, best first, with their scores (cosine); fewer if the index has fewer.

        A query's result does not depend on the others. Equal scores are ordered by (document id, ordinal).
        Raises: InputError if a query is empty or not text.
        """
        for query in queries:
            check_text(query, "the question")
        if not queries:
            return []
        found = self._index.search(self._encoder.encode(queries, "query"), k)
        return [[self._store.passage(hit.row, hit.score) for hit in hits] for hits in found]


def build_index(
    documents: Iterable[Document],
    index_dir: str | Path,
    encoder: TextEncoder,
    chunking: ChunkingConfig,
    progress: Progress | None = None,
) -> Manifest:
    """Chunk, encode and write `documents` as the index's next generation; the one before stays usable meanwhile.

    Streams: only some thousand passages are in memory at a time.
    Raises: InputError for a document that cannot be indexed or an id that comes twice, SaveError if writing fails; then the
    index is as it was.
    """
    with SegmentWriter(Path(index_dir), encoder.identity, chunking) as writer:
        for some in _groups(_unique(documents), chunking):
            vectors = encoder.encode([_embedded_text(passage) for _, passages in some for passage in passages])
            for document, passages in some:
                writer.add(document, passages, vectors[: len(passages)])
                vectors = vectors[len(passages) :]
            if progress is not None:
                progress(writer.num_documents, writer.num_passages)
        if writer.num_passages == 0:
            raise InputError("there is nothing to index: no document holds any text")
        return writer.publish()


def _embedded_text(passage: Passage) -> str:
    """The title leads, if there is one: a docstring, or a passage in the middle of a document, does not name its subject."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def _groups(documents: Iterable[Document], chunking: ChunkingConfig) -> Iterator[list[tuple[Document, list[Passage]]]]:
    """Chunked documents, at least `_PASSAGES_PER_ENCODE` passages together."""
    group: list[tuple[Document, list[Passage]]] = []
    num_passages = 0
    for document in documents:
        passages = chunk(document, chunking)
        group.append((document, passages))
        num_passages += len(passages)
        if num_passages >= _PASSAGES_PER_ENCODE:
            yield group
            group, num_passages = [], 0
    if group:
        yield group


def _unique(documents: Iterable[Document]) -> Iterator[Document]:
    seen: set[str] = set()
    for document in documents:
        if checked(document).id in seen:
            raise InputError(f"two documents have the id {document.id!r}")
        seen.add(document.id)
        yield document
