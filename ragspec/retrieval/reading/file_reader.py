"""Reads the documents of a file, by its suffix. The only place where errors of parsing libraries become InputError.

>>> list(read_documents(["manual/", "faq.jsonl"]))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ragspec.core import Document, check_text
from ragspec.errors import InputError
from ragspec.retrieval.reading.file_search import find_files
from ragspec.retrieval.reading.markup import read_markdown, read_rst
from ragspec.retrieval.reading.parsed_file import ParsedFile, read_text
from ragspec.retrieval.reading.rows import read_csv, read_jsonl


def read_documents(inputs: Iterable[str | Path]) -> Iterator[Document]:
    """Raises: InputError with file, line and reason."""
    for path, name in find_files(inputs):
        yield from read_file(path, name)


def read_file(path: Path, name: str) -> Iterator[Document]:
    """The documents of one file. A text file without text gives none.

    Raises: InputError naming the file, the line or page if known, and the reason.
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
        yield from read_jsonl(path, name)
    elif suffix in (".csv", ".tsv"):
        yield from read_csv(path, name)
    else:
        found = _parsed_file(path, suffix)
        if found.text.strip():
            yield Document(
                id=name,
                text=found.text,
                title=found.title or path.stem,
                source=name,
                metadata=found.metadata,
                headings=found.headings,
            )


def _parsed_file(path: Path, suffix: str) -> ParsedFile:
    """Imports the parsers of other libraries late: a folder of text files needs none of them."""
    if suffix in (".html", ".htm", ".xhtml"):
        from ragspec.retrieval.reading.html import read_html

        return read_html(path)
    if suffix == ".pdf":
        from ragspec.retrieval.reading.pdf import read_pdf

        return read_pdf(path)
    if suffix == ".docx":
        from ragspec.retrieval.reading.docx import read_docx

        return read_docx(path)
    text = read_text(path)
    if suffix == ".rst":
        return read_rst(text)
    return read_markdown(text) if suffix in (".md", ".markdown") else ParsedFile(text)


def _reason(cause: Exception) -> str:
    lines = str(cause).strip().splitlines()
    return f"it is damaged ({lines[0].strip() if lines else type(cause).__name__})"
