"""Reads the documents of a file, by its suffix. The only place where errors of parsing libraries become InputError.

>>> list(read_documents(["manual/", "faq.jsonl"]))
"""

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from ragspec.core import Document, check_characters
from ragspec.errors import InputError
from ragspec.retrieval.reading.file_search import find_files
from ragspec.retrieval.reading.formats import ReaderInput, format_of
from ragspec.retrieval.reading.parsed_file import WINDOWS, ParsedFile, Unread, encoding_of, read_text

_SHOWN_PARTS, _SHOWN_REASONS = 10, 4


def read_documents(inputs: Iterable[str | Path]) -> Iterator[Document]:
    """Raises: InputError with file, line and reason."""
    for path, name in find_files(inputs):
        yield from read_file(path, name)


def read_file(path: Path, name: str, unread: list[Unread] | None = None) -> Iterator[Document]:
    """The documents of one file. A text file without text gives none.

    `unread`: gets the parts of the file that were not read, and an encoding that was guessed.
    Raises: InputError naming the file, the line or page if known, and the reason.
    """
    try:
        for document in _documents(path, name, [] if unread is None else unread):
            for field in (document.id, document.text, document.title, document.source, document.owner):
                check_characters(field, f"{path}: document {document.id!r}")
            yield document
    except InputError as cause:
        if str(path) in str(cause):
            raise
        raise InputError(f"{path} {str(cause).removeprefix('it ')}") from cause
    except MemoryError as cause:
        raise InputError(f"{path} cannot be read: it does not fit into the memory") from cause
    except RecursionError as cause:
        raise InputError(f"{path} cannot be read: it is nested too deeply") from cause
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause.strerror or cause}") from cause
    except Exception as cause:  # Why: pypdf and python-docx document that a damaged file may raise anything
        raise InputError(f"{path} cannot be read: {_reason(cause)}") from cause


def _documents(path: Path, name: str, unread: list[Unread]) -> Iterator[Document]:
    found = format_of(path)
    module, _, function = found.reader.rpartition(".")
    # Why here: parsers of other libraries take seconds to import, and a folder of text files needs none of them
    reader = getattr(importlib.import_module(f"ragspec.retrieval.reading.{module}"), function)
    if found.is_plain and encoding_of(path) == WINDOWS:
        unread.append(Unread("", "it is no UTF-8 text and was read as windows-1252"))
    if found.reader_input is ReaderInput.ROWS:
        yield from reader(path, name, unread)
        return
    parsed: ParsedFile = reader(read_text(path) if found.reader_input is ReaderInput.TEXT else path)
    unread += parsed.unread
    if parsed.unread and not parsed.text.strip():
        raise InputError(f"cannot be read: {'; '.join(map(str, parsed.unread[:_SHOWN_REASONS]))}")
    metadata = dict(parsed.metadata)
    if parsed.unread:
        metadata["unread"] = "; ".join(map(str, parsed.unread[:_SHOWN_PARTS]))
    if parsed.text.strip():
        names = {"id": name, "title": parsed.title or path.stem, "source": name}
        yield Document(text=parsed.text, metadata=metadata, headings=parsed.headings, blocks=parsed.blocks, **names)


def _reason(cause: Exception) -> str:
    lines = str(cause).strip().splitlines()
    return f"it is damaged ({lines[0].strip() if lines else type(cause).__name__})"
