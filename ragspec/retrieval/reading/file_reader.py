"""From a file to its documents, and the one place where errors of other libraries become ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ragspec.core import Document, check_text
from ragspec.errors import InputError
from ragspec.retrieval.reading import csv, jsonl, markdown, rst
from ragspec.retrieval.reading.file_search import find_files
from ragspec.retrieval.reading.parsed_file import ParsedFile, read_text


def read_documents(inputs: Iterable[str | Path]) -> Iterator[Document]:
    """Raises: InputError with file, line and reason."""
    for path, name in find_files(inputs):
        yield from read_file(path, name)


def read_file(path: Path, name: str) -> Iterator[Document]:
    """The documents of one file; a text file without any text gives none.

    Raises: InputError naming the file, and where there are any the line and the page, with the reason.
    """
    try:
        for document in _documents(path, name):
            for field in (document.id, document.text, document.title, document.source, document.owner):
                if field.strip():
                    check_text(field, f"{path}: document {document.id!r}")
            yield document
    except InputError:
        raise
    except MemoryError as cause:
        raise InputError(f"{path} cannot be read: it does not fit into the memory") from cause
    except RecursionError as cause:
        raise InputError(f"{path} cannot be read: it is nested too deeply") from cause
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause.strerror or cause}") from cause
    except Exception as cause:  # Why: pypdf and python-docx document that a damaged file may raise anything
        raise InputError(f"{path} cannot be read: {_reason(cause)}") from cause


def _documents(path: Path, name: str) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        yield from jsonl.read(path, name)
    elif suffix in (".csv", ".tsv"):
        yield from csv.read(path, name)
    else:
        found = _readable(path, suffix)
        if found.text.strip():
            yield Document(
                id=name,
                text=found.text,
                title=found.title or path.stem,
                source=name,
                metadata=found.metadata,
                headings=found.headings,
            )


def _readable(path: Path, suffix: str) -> ParsedFile:
    """Libraries are imported here: a folder of text files needs none of them."""
    if suffix in (".html", ".htm", ".xhtml"):
        from ragspec.retrieval.reading import html

        return html.read(path)
    if suffix == ".pdf":
        from ragspec.retrieval.reading import pdf

        return pdf.read(path)
    if suffix == ".docx":
        from ragspec.retrieval.reading import docx

        return docx.read(path)
    text = read_text(path)
    if suffix == ".rst":
        return rst.readable(text)
    return markdown.readable(text) if suffix in (".md", ".markdown") else ParsedFile(text)


def _reason(cause: Exception) -> str:
    lines = str(cause).strip().splitlines()
    return f"it is damaged ({lines[0].strip() if lines else type(cause).__name__})"
