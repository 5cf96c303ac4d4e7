"""The content key of an index: equal keys mean equal documents, encoder and settings, hence equal answers.

The keys of the documents are added modulo 2**256, so the order of insertions, and deleted documents, leave no trace.

>>> content_key(documents, encoder.identity, config) == read_current(index_dir)[1].content_key
"""

import hashlib
import json
from collections.abc import Iterable

from ragspec.config import IndexConfig
from ragspec.core import Document, check_characters
from ragspec.errors import InputError
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.index.manifest import FORMER
from ragspec.retrieval.search.analysis import Analyzer

KEY_BYTES = 32
_MODULUS = 2 ** (8 * KEY_BYTES)


class ContentSum:
    """The sum of the documents' keys."""

    def __init__(self, value: str = "") -> None:
        """`value`: `str()` of another sum."""
        self._sum = int(value, 16) if value else 0

    def add(self, key: bytes) -> None:
        self._sum = (self._sum + int.from_bytes(key, "little")) % _MODULUS

    def remove(self, key: bytes) -> None:
        self._sum = (self._sum - int.from_bytes(key, "little")) % _MODULUS

    def __str__(self) -> str:
        return f"{self._sum:0{2 * KEY_BYTES}x}"

    def key(self, encoder: EncoderIdentity, config: IndexConfig, analyzer: str) -> str:
        """The content key of an index of these documents. `analyzer`: the id of the index's `Analyzer`.

        Why the former schema: the key of an index stays the same until its documents change.
        """
        settings = [FORMER, encoder.fingerprint, encoder.dimension, config.model_dump(mode="json"), analyzer, str(self)]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class IdsByKey:
    """Maps keys to document ids. Few documents share a key, so a single id is stored without a table."""

    def __init__(self) -> None:
        self._ids: dict[bytes, str | dict[str, None]] = {}

    def ids(self, key: bytes) -> Iterable[str]:
        """The ids in the order of insertion."""
        found = self._ids.get(key, {})
        return (found,) if isinstance(found, str) else found

    def add(self, key: bytes, document_id: str) -> None:
        found = self._ids.setdefault(key, document_id)
        if isinstance(found, dict):
            found[document_id] = None
        elif found != document_id:
            self._ids[key] = {found: None, document_id: None}

    def remove(self, key: bytes, document_id: str) -> None:
        found = self._ids.get(key)
        if isinstance(found, dict):
            found.pop(document_id, None)
        if not found or found == document_id:
            self._ids.pop(key, None)


def content_key(documents: Iterable[Document], encoder: EncoderIdentity, config: IndexConfig) -> str:
    """The content key of a new index of these documents. Reads the documents once and encodes nothing."""
    total = ContentSum()
    for document in documents:
        total.add(document_key(check_document(document)))
    return total.key(encoder, config, Analyzer(config.words).id)


def document_key(document: Document) -> bytes:
    """SHA-256 of all fields of a document."""
    names = (document.id, document.title, document.source, document.owner, document.origin)
    added = filter(None, (json.dumps(document.blocks) if document.blocks else "", document.digest))
    return _digest((*names, metadata_json(document), headings_json(document), document.text, *added))


def text_key(document: Document) -> bytes:
    """SHA-256 of owner, metadata and text. Equal keys mean duplicates: the same readers find both by the same filters."""
    return _digest((document.owner, metadata_json(document), document.text))


def check_document(document: Document) -> Document:
    """Returns the document. Raises: InputError if an index cannot hold it unchanged."""
    if not isinstance(document.id, str) or not document.id:
        raise InputError("a document has no id")
    names = ("id", "text", "title", "source", "owner", "origin", "digest")
    headings = [("a heading", text) for each in document.headings for text in (each.text, each.anchor)]
    for name, value in [*((name, getattr(document, name)) for name in names), *headings]:
        check_characters(value, f"document {document.id!r}: {name}")
    metadata_json(document)
    ends = [0, *(place for block in document.blocks for place in block[:2]), len(document.text)]
    if ends != sorted(ends):
        raise InputError(f"document {document.id!r}: its blocks overlap, are out of order or lie outside its text")
    return document


def metadata_json(document: Document) -> str:
    """Raises: InputError if the metadata is not JSON."""
    try:
        return json.dumps(dict(document.metadata), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        raise InputError(f"document {document.id!r}: the metadata is not JSON: {cause}") from cause


def headings_json(document: Document) -> str:
    """Headings without an anchor as in the former schema, so that keys stay the same."""
    return json.dumps([each if each.anchor else each[:3] for each in document.headings])


def _digest(fields: Iterable[str]) -> bytes:
    digest = hashlib.sha256()
    for field in fields:
        raw = field.encode("utf-8")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()
