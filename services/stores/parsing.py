"""An uploaded file becomes documents of its tenant and vector store."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.core import Document, Heading
from ragspec.errors import InputError
from ragspec.retrieval.reading import SUFFIXES
from services.stores.parse_file import REFUSED, write_documents
from services.stores.records import FileRecord, Member

STORE, FILE = "vector_store_id", "file_id"
"""Keys of the metadata that say where a document comes from; nobody else sets them."""

ROWS = frozenset({".jsonl", ".csv", ".tsv"})
PLAIN = frozenset({".txt", ".md", ".markdown"})
"""Read as they are: there is nothing to take apart, and no need for a process."""

_MAX_REASON = 300


class Unsupported(InputError):
    """A kind of file that is not read."""


class ParseLimits(NamedTuple):
    """`timeout_s`: of the clock; half as much of a processor."""

    max_text_bytes: int = 64 * 2**20
    timeout_s: float = 120.0


def parsed(path: Path, file: FileRecord, member: Member, limits: ParseLimits) -> Iterator[Document]:
    """The documents of a file as a member of a store. Whose they are is never what the file says.

    Raises: InputError with a reason that names the file as its owner does; Unsupported.
    """
    suffix = Path(file.filename).suffix.lower()
    if suffix not in SUFFIXES:
        raise Unsupported(f"files of this kind are not read; those that are: {', '.join(sorted(SUFFIXES))}")
    with tempfile.TemporaryDirectory(prefix="ragspec-parse-") as folder:
        output = Path(folder) / "documents.jsonl"
        if suffix in PLAIN:
            _write(path, file.filename, output, limits)
        else:
            _run(path, file.filename, output, limits)
        with open(output, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _document(json.loads(line), file, member, f":{number}" if suffix in ROWS else "")


def _write(path: Path, filename: str, output: Path, limits: ParseLimits) -> None:
    try:
        write_documents(path, filename, output, limits.max_text_bytes)
    except InputError as cause:
        raise InputError(str(cause).replace(str(path), filename)[:_MAX_REASON]) from cause


def _run(path: Path, filename: str, output: Path, limits: ParseLimits) -> None:
    numbers = [str(limits.max_text_bytes), str(max(1, int(limits.timeout_s / 2)))]
    command = [sys.executable, "-m", "services.stores.parse_file", str(path), filename, str(output), *numbers]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limits.timeout_s, cwd=_ROOT, check=False
        )
    except subprocess.TimeoutExpired as cause:
        raise InputError(f"reading it took longer than {limits.timeout_s:g} s") from cause
    if ended.returncode == REFUSED:
        reason = ended.stdout.decode("utf-8", "replace").replace(str(path), filename)
        raise InputError(reason[:_MAX_REASON])
    if ended.returncode:
        raise InputError("reading it took too much memory or time, or broke what reads it")


def _document(fields: dict[str, Any], file: FileRecord, member: Member, row: str) -> Document:
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
        origin=origin_of(member),
    )


def origin_of(member: Member) -> str:
    """Names in the index what belongs to a member."""
    return f"{member.store}:{member.file}"


_ROOT = Path(__file__).parents[2]
