"""Parses an uploaded file into documents of its tenant and vector store.

Files other than plain text are parsed in a process of their own, so that a hostile file reaches no other tenant's. Whose
documents they are is never read from the file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ragspec.core import Document, Heading, blocks_of
from ragspec.errors import InputError
from ragspec.retrieval.reading import SUFFIXES, format_of, has_rows
from ragspec.retrieval.reading.bounded_reader import BoundedReader, ReadLimits, write_documents

if TYPE_CHECKING:
    from services.stores.records import FileRecord, StoreMember

STORE, FILE = "vector_store_id", "file_id"
"""Keys of a document's metadata that the service sets; users cannot."""

_MAX_REASON_CHARS = 300


class UnsupportedFile(InputError):
    """A type of file that cannot be parsed."""


def parsed(path: Path, filename: str, limits: ReadLimits) -> TextIO:
    """An open file without a name, one JSON object a line: the documents, of nobody yet.

    Raises: InputError with a reason that names the file as its owner does; UnsupportedFile.
    """
    if Path(filename).suffix.lower() not in SUFFIXES:
        raise UnsupportedFile(f"files of this type cannot be read; these can: {', '.join(sorted(SUFFIXES))}")
    with tempfile.TemporaryDirectory(prefix="ragspec-parse-") as folder:
        output = Path(folder) / "documents.jsonl"
        try:
            if format_of(filename).is_safe:
                write_documents(path, filename, output, limits, [])
            else:
                with BoundedReader(limits) as reader:
                    reader.write(path, filename, output)
        except InputError as cause:
            raise InputError(str(cause).replace(str(path), filename)[:_MAX_REASON_CHARS]) from cause
        return open(output, encoding="utf-8")


def documents(lines: TextIO, file: FileRecord, member: StoreMember) -> Iterator[Document]:
    """The documents of a parsed file in a vector store."""
    numbered = has_rows(file.filename)
    for number, line in enumerate(lines, 1):
        yield _document(json.loads(line), file, member, f":{number}" if numbered else "")


def _document(fields: dict[str, Any], file: FileRecord, member: StoreMember, row: str) -> Document:
    title = fields["title"]
    if not row and title in ("", Path(file.id).stem):
        title = Path(file.filename).stem
    return Document(
        id=f"{member.store}:{member.file}{row}",
        text=fields["text"],
        title=title,
        source=(fields["source"] if row else "") or file.filename,
        metadata={**fields["metadata"], **member.attributes, STORE: member.store, FILE: member.file},
        owner=member.tenant,
        headings=tuple(Heading(*heading) for heading in fields["headings"]),
        blocks=blocks_of(fields["blocks"]),
        origin=origin_of(member),
    )


def origin_of(member: StoreMember) -> str:
    """The `origin` in the index of a member's documents."""
    return f"{member.store}:{member.file}"
