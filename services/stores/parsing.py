"""Parses an uploaded file into documents of its tenant and vector store.

Owns the limits of parsing. Files other than plain text are parsed in a process with limits of memory and time, so that a damaged
or hostile file cannot take the service down. Whose documents they are is never read from the file.

    python -m services.stores.parsing FILE NAME OUTPUT MAX_BYTES MAX_DOCUMENTS MAX_S   # the process: one JSON object a line
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from ragspec.core import Document, Heading, blocks_of
from ragspec.errors import InputError
from ragspec.retrieval.reading import SUFFIXES, format_of, has_rows, read_file

if TYPE_CHECKING:
    from services.stores.records import FileRecord, StoreMember

STORE, FILE = "vector_store_id", "file_id"
"""Keys of a document's metadata that the service sets; users cannot."""

_MAX_REASON_CHARS = 300
_MEMORY_BYTES = 2 * 2**30
_REFUSED = 3
"""Exit status of the process; its standard output is the reason."""


class UnsupportedFile(InputError):
    """A type of file that cannot be parsed."""


class ParseLimits(NamedTuple):
    """`max_documents`: rows of a file. `timeout_s`: wall-clock time. Processor time is limited to half of it."""

    max_text_bytes: int = 64 * 2**20
    max_documents: int = 100_000
    timeout_s: float = 120.0


def parsed(path: Path, filename: str, limits: ParseLimits) -> TextIO:
    """An open file without a name, one JSON object a line: the documents, of nobody yet.

    Raises: InputError with a reason that names the file as its owner does; UnsupportedFile.
    """
    if Path(filename).suffix.lower() not in SUFFIXES:
        raise UnsupportedFile(f"files of this type cannot be read; these can: {', '.join(sorted(SUFFIXES))}")
    with tempfile.TemporaryDirectory(prefix="ragspec-parse-") as folder:
        output = Path(folder) / "documents.jsonl"
        try:
            if format_of(filename).is_safe:
                write_documents(path, filename, output, limits)
            else:
                _parse_in_process(path, filename, output, limits)
        except InputError as cause:
            raise InputError(str(cause).replace(str(path), filename)[:_MAX_REASON_CHARS]) from cause
        return open(output, encoding="utf-8")


def documents(lines: TextIO, file: FileRecord, member: StoreMember) -> Iterator[Document]:
    """The documents of a parsed file in a vector store."""
    numbered = has_rows(file.filename)
    for number, line in enumerate(lines, 1):
        yield _document(json.loads(line), file, member, f":{number}" if numbered else "")


def _parse_in_process(path: Path, filename: str, output: Path, limits: ParseLimits) -> None:
    numbers = [str(limits.max_text_bytes), str(limits.max_documents), str(max(1, int(limits.timeout_s / 2)))]
    command = [sys.executable, "-m", "services.stores.parsing", str(path), filename, str(output), *numbers]
    root = Path(__file__).parents[2]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limits.timeout_s, cwd=root, check=False
        )
    except subprocess.TimeoutExpired as cause:
        raise InputError(f"reading it took longer than {limits.timeout_s:g} s") from cause
    if ended.returncode == _REFUSED:
        raise InputError(ended.stdout.decode("utf-8", "replace"))
    if ended.returncode:
        raise InputError("reading it took too much memory or time, or crashed the parser")


def write_documents(path: Path, name: str, output: Path, limits: ParseLimits) -> None:
    """Writes the file's documents to `output`. Raises: InputError, also for more text or rows than allowed."""
    num_bytes = 0
    with open(output, "w", encoding="utf-8") as lines:
        for number, document in enumerate(read_file(path, name), 1):
            num_bytes += len(document.text.encode())
            if num_bytes > limits.max_text_bytes:
                raise InputError(f"it holds more than {limits.max_text_bytes} bytes of text")
            if number > limits.max_documents:
                raise InputError(f"it holds more than {limits.max_documents} rows: split it")
            fields: dict[str, Any] = {"text": document.text, "title": document.title, "source": document.source}
            fields |= {"metadata": dict(document.metadata), "headings": document.headings, "blocks": document.blocks}
            lines.write(json.dumps(fields) + "\n")


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


def main(path: str, name: str, output: str, max_bytes: str, max_documents: str, max_s: str) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(max_s), int(max_s)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        write_documents(Path(path), name, Path(output), ParseLimits(int(max_bytes), int(max_documents)))
    except InputError as cause:
        sys.stdout.write(str(cause))
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
