"""The content key of an index: equal keys mean the same documents, encoder and chunking, hence the same index.

>>> content_key(documents, encoder.identity, chunking) == read_current(index_dir)[1].content_key
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.manifest import SCHEMA


class ContentKey:
    """A SHA-256 that documents are added to, in the order they are indexed in."""

    def __init__(self, encoder: EncoderIdentity, chunking: ChunkingConfig) -> None:
        settings = [SCHEMA, encoder.fingerprint, encoder.dimension, chunking.model_dump(mode="json")]
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())

    def add(self, document: Document) -> None:
        fields = (document.id, document.title, document.source, metadata_json(document), document.text)
        for field in fields:
            raw = field.encode("utf-8")
            self._digest.update(len(raw).to_bytes(8, "little"))
            self._digest.update(raw)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def content_key(documents: Iterable[Document], encoder: EncoderIdentity, chunking: ChunkingConfig) -> str:
    """The key that an index of these documents has or would have; reads the documents once, encodes nothing."""
    key = ContentKey(encoder, chunking)
    for document in documents:
        key.add(checked(document))
    return key.hexdigest()


def checked(document: Document) -> Document:
    """Raises: InputError if an index could not hold the document as it is."""
    if not isinstance(document.id, str) or not document.id:
        raise InputError("a document has no id")
    for name, value in (
        ("id", document.id),
        ("text", document.text),
        ("title", document.title),
        ("source", document.source),
    ):
        if not isinstance(value, str):
            raise InputError(f"document {document.id!r}: {name} must be a string, not {type(value).__name__}")
        if "\0" in value:
            raise InputError(f"document {document.id!r}: {name} holds a NUL character")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as cause:
            raise InputError(
                f"document {document.id!r}: {name} holds a lone surrogate at character {cause.start}"
            ) from cause
    metadata_json(document)
    return document


def metadata_json(document: Document) -> str:
    """Raises: InputError if the metadata is not JSON."""
    try:
        return json.dumps(dict(document.metadata), sort_keys=True)
    except (TypeError, ValueError) as cause:
        raise InputError(f"document {document.id!r}: the metadata is not JSON: {cause}") from cause
