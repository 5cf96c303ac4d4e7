"""The manifest of an index: its segments, encoder and settings, and the hash of every file.

    index_dir/
      CURRENT                  one line: folder name of the generation in use and the SHA-256 of its manifest.json
      generation-000007/
        manifest.json          this record
        deleted-000002.npy     deleted documents of segment 2 (int64, sorted)
      segment-000002/
        vectors.npy            [K, E] float32, L2-normalised
        passages.arrow         spans inside documents, headings, anchors and blocks, one row per vector
        documents.arrow        id, title, source, owner, metadata, headings, keys, UTF-8 text, blocks
        terms.npy, ...         postings of the passages' words (`ragspec.retrieval.search.bm25`)
        dense.faiss            only for an approximate index
      originals/               files that documents were read from, each by its SHA-256

Segments and generations never change; generations share segments. Every hash is compared before a file is read.
"""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragspec.config import IndexConfig
from ragspec.disk import file_digest
from ragspec.errors import StoreCorrupt
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.index.pointer import CURRENT, POINTER, read_pointer

SCHEMA: Literal[3] = 3
FORMER: Literal[2] = 2
"""Without the documents' blocks. Segments of both schemas may be in one index."""

MANIFEST = "manifest.json"
VECTORS = "vectors.npy"
PASSAGES = "passages.arrow"
DOCUMENTS = "documents.arrow"
DENSE = "dense.faiss"

_HASHED_AT_ONCE = 4

Count = Annotated[int, Field(ge=0)]


class ManifestRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileChecksum(ManifestRecord):
    size_bytes: Count
    sha256: str


class SegmentRecord(ManifestRecord):
    """A segment in one generation. A file of the generation lists the `num_deleted` deleted documents."""

    number: Count
    num_documents: Count
    num_passages: Count
    num_deleted: Count = 0
    num_live_passages: Count
    files: dict[str, FileChecksum]
    deleted: FileChecksum | None = None

    @property
    def name(self) -> str:
        return f"segment-{self.number:06d}"

    @property
    def deleted_name(self) -> str:
        return f"deleted-{self.number:06d}.npy"


class Manifest(ManifestRecord):
    """Describes one generation of an index.

    `content_key`: SHA-256 of documents, encoder and settings. `content_sum`: the documents' part of that key. `analyzer`: the id
    of the `Analyzer` that turned texts into terms.
    """

    schema_version: Literal[2, 3] = SCHEMA
    generation: Count
    content_key: str
    content_sum: str
    created_by: str
    encoder: EncoderIdentity
    normalisation: Literal["l2"] = "l2"
    analyzer: str
    config: IndexConfig
    segments: tuple[SegmentRecord, ...]

    @property
    def num_documents(self) -> int:
        return sum(segment.num_documents - segment.num_deleted for segment in self.segments)

    @property
    def num_passages(self) -> int:
        return sum(segment.num_live_passages for segment in self.segments)

    @property
    def generation_id(self) -> str:
        """Names this generation and its content. An answer repeats only within the same generation."""
        return f"{self.generation}-{self.content_key[:12]}"


def read_current(index_dir: Path) -> tuple[Path, Manifest]:
    """The folder and manifest of the current generation.

    Raises: StoreMissing if there is no index, StoreCorrupt if the manifest's hash differs.
    """
    return read_generation(index_dir, read_pointer(index_dir))


def read_generation(index_dir: Path, pointer: str) -> tuple[Path, Manifest]:
    """As `read_current`, for a generation named by an earlier content of CURRENT."""
    match = POINTER.fullmatch(pointer)
    if not match:
        raise StoreCorrupt(f"{index_dir / CURRENT} does not name a generation of a ragspec index")
    folder = index_dir / match[1]
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as cause:
        raise StoreCorrupt(f"{folder / MANIFEST} cannot be read: {cause.strerror}") from cause
    if hashlib.sha256(raw).hexdigest() != match[2]:
        raise StoreCorrupt(f"{folder / MANIFEST} is not the manifest that {CURRENT} names (its sha256 differs)")
    return folder, _parsed(raw, folder / MANIFEST)


def verify_checksums(files: Iterable[tuple[Path, FileChecksum]]) -> None:
    """Compare size and hash of every file, several files at a time.

    Raises: StoreCorrupt naming the file and the difference.
    """
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        for _ in pool.map(lambda each: _check_file(*each), files):
            pass


def file_checksum(path: Path) -> FileChecksum:
    return FileChecksum(size_bytes=path.stat().st_size, sha256=file_digest(path))


def _check_file(path: Path, expected: FileChecksum) -> None:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            raise StoreCorrupt(f"{path} has {size_bytes} bytes, but its manifest says {expected.size_bytes}")
        found = file_checksum(path)
    except OSError as cause:
        raise StoreCorrupt(f"{path} cannot be read: {cause.strerror}") from cause
    if found.sha256 != expected.sha256:
        raise StoreCorrupt(f"{path} has sha256 {found.sha256}, but its manifest says {expected.sha256}")


def _parsed(raw: bytes, path: Path) -> Manifest:
    """Raises: StoreCorrupt naming the file and the reason."""
    try:
        fields = json.loads(raw)
        found = fields.get("schema_version") if isinstance(fields, dict) else None
        if found not in (SCHEMA, FORMER):
            raise StoreCorrupt.of_schema(path, found, SCHEMA)
        return Manifest.model_validate(fields)
    except (ValueError, RecursionError) as cause:
        raise StoreCorrupt(f"{path} is not a manifest: {str(cause).splitlines()[0]}") from cause
