"""The manifest of an index: what it holds, how it was made, and the hash of every file.

    index_dir/
      CURRENT                  one line: folder name and the SHA-256 of its manifest.json
      generation-000001/
        manifest.json          this record
        vectors.npy            [K, E] float32, L2-normalised
        passages.arrow         spans inside documents, one row per vector
        documents.arrow        id, title, source, metadata, UTF-8 text

A generation is never changed. Nothing of it is read before every hash has been compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ragspec.config import ChunkingConfig
from ragspec.errors import StoreCorrupt, StoreError, StoreMissing

SCHEMA: Literal[1] = 1
CURRENT = "CURRENT"
MANIFEST = "manifest.json"
VECTORS = "vectors.npy"
PASSAGES = "passages.arrow"
DOCUMENTS = "documents.arrow"
FILES = (VECTORS, PASSAGES, DOCUMENTS)

_POINTER = re.compile(r"(generation-\d{6,}) ([0-9a-f]{64})\n?")


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(Record):
    size_bytes: int
    sha256: str


class EncoderRecord(Record):
    """The encoder the vectors came from; see `ragspec.retrieval.encoder.EncoderIdentity`."""

    id: str
    fingerprint: str
    dimension: int


class Manifest(Record):
    """Everything that must be known before an index may be used.

    `content_key` is the SHA-256 of documents, encoder and chunking: equal keys mean the same index.
    """

    schema_version: Literal[1] = SCHEMA
    generation: int
    content_key: str
    created_by: str
    encoder: EncoderRecord
    normalisation: Literal["l2"] = "l2"
    chunking: ChunkingConfig
    num_documents: int
    num_passages: int
    files: dict[str, FileRecord]

    @property
    def generation_id(self) -> str:
        """Names this generation and its content; part of what makes an answer repeatable."""
        return f"{self.generation}-{self.content_key[:12]}"


def read_current(index_dir: Path) -> tuple[Path, Manifest]:
    """The folder and manifest of the generation in use.

    Raises: StoreMissing if there is no index, StoreCorrupt if its manifest is not the one that was written.
    """
    pointer = _read_pointer(index_dir)
    match = _POINTER.fullmatch(pointer)
    if not match:
        raise StoreCorrupt(f"{index_dir / CURRENT} does not name a generation of a ragspec index")
    folder = index_dir / match[1]
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as cause:
        raise StoreCorrupt(f"{folder / MANIFEST} cannot be read: {cause.strerror}") from cause
    if hashlib.sha256(raw).hexdigest() != match[2]:
        raise StoreCorrupt(f"{folder / MANIFEST} is not the manifest that {CURRENT} names (its sha256 differs)")
    return folder, _parse(raw, folder / MANIFEST)


def current_name(index_dir: Path) -> str | None:
    """The folder name of the generation in use, or None if there is no usable index."""
    try:
        return read_current(index_dir)[0].name
    except StoreError:
        return None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare size and hash of every file; large files are hashed side by side.

    Raises: StoreCorrupt with the file and what differs.
    """
    if set(manifest.files) != set(FILES):
        raise StoreCorrupt(f"{folder / MANIFEST} lists {sorted(manifest.files)}, not {sorted(FILES)}")
    with ThreadPoolExecutor(len(FILES)) as pool:
        for _ in pool.map(lambda name: _check_file(folder / name, manifest.files[name]), FILES):
            pass


def file_record(path: Path) -> FileRecord:
    with open(path, "rb") as file:
        return FileRecord(size_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _check_file(path: Path, expected: FileRecord) -> None:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            raise StoreCorrupt(f"{path} has {size_bytes} bytes, but its manifest says {expected.size_bytes}")
        found = file_record(path)
    except OSError as cause:
        raise StoreCorrupt(f"{path} cannot be read: {cause.strerror}") from cause
    if found.sha256 != expected.sha256:
        raise StoreCorrupt(f"{path} has sha256 {found.sha256}, but its manifest says {expected.sha256}")


def _read_pointer(index_dir: Path) -> str:
    try:
        return (index_dir / CURRENT).read_text(encoding="ascii")
    except FileNotFoundError as cause:
        if not index_dir.exists():
            raise StoreMissing(f"there is no index at {index_dir}: the folder does not exist") from cause
        raise StoreMissing(f"there is no ragspec index in {index_dir}: it has no file {CURRENT}") from cause
    except NotADirectoryError as cause:
        raise StoreMissing(f"there is no index at {index_dir}: it is a file") from cause
    except UnicodeDecodeError as cause:
        raise StoreCorrupt(f"{index_dir / CURRENT} does not name a generation of a ragspec index") from cause
    except OSError as cause:
        raise StoreMissing(f"the index at {index_dir} cannot be read: {cause.strerror}") from cause


def _parse(raw: bytes, path: Path) -> Manifest:
    try:
        fields = json.loads(raw)
        found = fields.get("schema_version") if isinstance(fields, dict) else None
        if found != SCHEMA:
            raise StoreCorrupt(f"{path} has schema {found!r}; this version of ragspec reads {SCHEMA}")
        return Manifest.model_validate(fields)
    except (ValueError, ValidationError) as cause:
        raise StoreCorrupt(f"{path} is not a manifest: {str(cause).splitlines()[0]}") from cause
