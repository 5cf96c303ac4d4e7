"""Writes one generation of an index: all of it, or nothing.

Files go to a temporary folder beside the generations, are flushed to the disk, renamed, and only then named by CURRENT. Any
failure on the way (disk full, no permission) removes the temporary folder and leaves the index as it was. One writer at a time.

    with SegmentWriter(index_dir, encoder, chunking) as writer:
        writer.add(document, passages, vectors)
        manifest = writer.publish()
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ragspec.config import ChunkingConfig
from ragspec.core import Document, Passage
from ragspec.errors import SaveError
from ragspec.retrieval.content import ContentKey, metadata_json
from ragspec.retrieval.disk import exclusive, replace_text, saving, sync
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.files import DOCUMENT_SCHEMA, PASSAGE_SCHEMA, ArrowFile, byte_spans, npy_header
from ragspec.retrieval.manifest import (
    CURRENT,
    DOCUMENTS,
    FILES,
    MANIFEST,
    PASSAGES,
    VECTORS,
    EncoderRecord,
    Manifest,
    current_name,
    file_record,
)

_TEMPORARY = ".building-"


class SegmentWriter:
    """States: open (entered) -> published or abandoned; leaving the block without `publish` abandons."""

    def __init__(self, index_dir: Path, encoder: EncoderIdentity, chunking: ChunkingConfig) -> None:
        self._index_dir = index_dir
        self._encoder = encoder
        self._chunking = chunking
        self._key = ContentKey(encoder, chunking)
        self._folder: Path | None = None
        self._cleanup = contextlib.ExitStack()
        self.num_documents = 0
        self.num_passages = 0

    def __enter__(self) -> SegmentWriter:
        try:
            with saving(self._index_dir):
                self._open()
        except SaveError:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def add(self, document: Document, passages: Sequence[Passage], vectors: NDArray[np.float32]) -> None:
        """Append one document; row i of `vectors` [len(passages), E] belongs to passage i.

        Raises: SaveError.
        """
        assert vectors.shape == (len(passages), self._encoder.dimension) and vectors.dtype == np.float32
        raw = document.text.encode("utf-8")
        with saving(self._index_dir):
            self._vectors.write(np.ascontiguousarray(vectors).data)
            for passage, (start_byte, end_byte) in zip(passages, byte_spans(document.text, passages), strict=True):
                span = (passage.start, passage.end, start_byte, end_byte)
                self._passages.append((self.num_documents, passage.ordinal, *span), num_bytes=48)
            row = (document.id, document.title, document.source, metadata_json(document), raw)
            self._documents.append(row, num_bytes=len(raw))
        self._key.add(document)
        self.num_documents += 1
        self.num_passages += len(passages)

    def publish(self) -> Manifest:
        """Make what was added the index's current generation; readers of the old one keep it.

        Raises: SaveError.
        """
        assert self._folder is not None, "publish() needs an open writer"
        with saving(self._index_dir):
            self._finish_files()
            generation = max(_generations(self._index_dir), default=0) + 1
            manifest = self._manifest(generation)
            raw = manifest.model_dump_json(indent=1).encode()
            (self._folder / MANIFEST).write_bytes(raw)
            sync(self._folder / MANIFEST)
            sync(self._folder)
            previous = current_name(self._index_dir)
            final = self._index_dir / f"generation-{generation:06d}"
            os.rename(self._folder, final)
            self._folder = final  # removed on the way out, unless CURRENT comes to name it
            sync(self._index_dir)
            replace_text(self._index_dir / CURRENT, f"{final.name} {hashlib.sha256(raw).hexdigest()}\n")
            self._folder = None
        with contextlib.suppress(OSError):  # the new generation is in use already
            sync(self._index_dir)
            _remove_generations(self._index_dir, keep={final.name, previous})
        return manifest

    def _open(self) -> None:
        self._index_dir.mkdir(parents=True, exist_ok=True)
        self._cleanup.enter_context(exclusive(self._index_dir))
        for stale in self._index_dir.glob(_TEMPORARY + "*"):  # of a killed build: the lock is ours
            shutil.rmtree(stale)
        self._folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._index_dir))
        self._cleanup.callback(self._remove_folder)
        self._vectors = open(self._folder / VECTORS, "wb")  # noqa: SIM115 - closed by the stack
        self._cleanup.callback(_close_quietly, self._vectors)
        self._vectors.write(npy_header(0, self._encoder.dimension))
        self._passages = ArrowFile(self._folder / PASSAGES, PASSAGE_SCHEMA)
        self._cleanup.callback(_close_quietly, self._passages)
        self._documents = ArrowFile(self._folder / DOCUMENTS, DOCUMENT_SCHEMA)
        self._cleanup.callback(_close_quietly, self._documents)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _finish_files(self) -> None:
        self._vectors.seek(0)
        self._vectors.write(npy_header(self.num_passages, self._encoder.dimension))
        for file in (self._vectors, self._passages, self._documents):
            file.close()
        assert self._folder is not None
        for name in FILES:
            sync(self._folder / name)

    def _manifest(self, generation: int) -> Manifest:
        assert self._folder is not None
        return Manifest(
            generation=generation,
            content_key=self._key.hexdigest(),
            created_by=f"ragspec {_own_version()}",
            encoder=EncoderRecord(**dataclasses.asdict(self._encoder)),
            chunking=self._chunking,
            num_documents=self.num_documents,
            num_passages=self.num_passages,
            files={name: file_record(self._folder / name) for name in FILES},
        )


def _generations(index_dir: Path) -> dict[int, Path]:
    found = ((re.fullmatch(r"generation-(\d{6,})", path.name), path) for path in index_dir.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _remove_generations(index_dir: Path, keep: set[str | None]) -> None:
    """Why the previous one is kept: a reader may have read CURRENT and not opened the files yet."""
    for path in _generations(index_dir).values():
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def _close_quietly(file: ArrowFile | IO[bytes]) -> None:
    with contextlib.suppress(OSError, pa.ArrowException):
        file.close()


def _own_version() -> str:
    try:
        return version("ragspec")
    except PackageNotFoundError:
        return "(not installed)"
