"""An index opened for reading: mapped files, checked against their manifest before a byte of them is used.

A store never changes after it was opened; a rebuild beside it makes a new generation, and this one stays readable.

    >>> store = Store.open(Path("index"), encoder.identity)
    >>> store.passage(0).text
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from ragspec.config import ChunkingConfig
from ragspec.core import Document, Passage
from ragspec.errors import EncoderMismatch, StoreCorrupt, StoreError
from ragspec.retrieval.content import content_key
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray
from ragspec.retrieval.manifest import DOCUMENTS, PASSAGES, VECTORS, Manifest, check_files, read_current


class Store:
    """One generation of an index. Rows are numbered as in `vectors` [K, E] (float32, L2-normalised, mapped)."""

    def __init__(self, manifest: Manifest, vectors: FloatArray, passages: pa.Table, documents: pa.Table) -> None:
        self.manifest = manifest
        self.vectors = vectors
        self._spans = (
            np.column_stack([column.to_numpy() for column in passages.columns]) if len(passages) else _NO_SPANS
        )
        self._ids, self._titles, self._sources, self._metadata, self._texts = documents.columns

    @classmethod
    def open(cls, index_dir: str | Path, encoder: EncoderIdentity | None = None) -> Store:
        """Open the current generation; with `encoder`, only if it is the one the vectors came from.

        Raises: StoreMissing, StoreCorrupt or EncoderMismatch, each with the exact reason; then nothing was loaded.
        """
        folder, manifest = read_current(Path(index_dir))
        if encoder is not None:
            check_encoder(manifest, encoder)
        check_files(folder, manifest)
        try:
            vectors = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
            passages, documents = _mapped(folder / PASSAGES), _mapped(folder / DOCUMENTS)
        except (OSError, ValueError, pa.ArrowException) as cause:
            raise StoreCorrupt(f"{folder} cannot be read: {cause}") from cause
        expected = (manifest.num_passages, manifest.encoder.dimension)
        if vectors.shape != expected or len(passages) != expected[0] or len(documents) != manifest.num_documents:
            raise StoreCorrupt(
                f"{folder} holds {vectors.shape} vectors, {len(passages)} passages and {len(documents)} documents, "
                f"but its manifest says {expected} and {manifest.num_documents} documents"
            )
        return cls(manifest, vectors, passages, documents)

    def __len__(self) -> int:
        return int(self.manifest.num_passages)

    @property
    def generation(self) -> str:
        return self.manifest.generation_id

    def passage(self, row: int, score: float = 0.0) -> Passage:
        document, ordinal, start, end, start_byte, end_byte = self._spans[row].tolist()
        return Passage(
            document_id=self._ids[document].as_py(),
            ordinal=ordinal,
            text=str(memoryview(self._texts[document].as_buffer())[start_byte:end_byte], "utf-8"),
            start=start,
            end=end,
            title=self._titles[document].as_py(),
            source=self._sources[document].as_py(),
            score=score,
        )

    def passage_key(self, row: int) -> tuple[str, int]:
        """(document id, ordinal): what orders passages of equal score."""
        document, ordinal = self._spans[row, :2].tolist()
        return self._ids[document].as_py(), ordinal

    def document(self, row: int) -> Document:
        """Document number `row`, in the order of the build."""
        return Document(
            id=self._ids[row].as_py(),
            text=str(self._texts[row].as_buffer(), "utf-8"),
            title=self._titles[row].as_py(),
            source=self._sources[row].as_py(),
            metadata=json.loads(self._metadata[row].as_py()),
        )


_NO_SPANS = np.empty((0, 6), np.int64)


def check_encoder(manifest: Manifest, encoder: EncoderIdentity) -> None:
    """Raises: EncoderMismatch if `encoder` would place its vectors in another space than the index's."""
    built = manifest.encoder
    if (built.fingerprint, built.dimension) != (encoder.fingerprint, encoder.dimension):
        raise EncoderMismatch(
            f"the index was built by {built.id} (fingerprint {built.fingerprint[:12]}, {built.dimension} dimensions); "
            f"the encoder in use is {encoder.id} (fingerprint {encoder.fingerprint[:12]}, {encoder.dimension} dimensions)"
        )


def index_matches(
    index_dir: str | Path, documents: Iterable[Document], encoder: EncoderIdentity, chunking: ChunkingConfig
) -> bool:
    """Whether the index there is exactly the one these documents, encoder and chunking would give.

    Reads the documents once and encodes nothing. False also for a missing or foreign index; the files' hashes are left to `open`.
    """
    try:
        _, manifest = read_current(Path(index_dir))
    except StoreError:
        return False
    return manifest.content_key == content_key(documents, encoder, chunking)


def _mapped(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
