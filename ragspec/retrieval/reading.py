"""Files become documents: .txt, .md, .rst, .jsonl, and folders of them.

A text file is one document, named by its path below the input it came from. A line of a .jsonl file is one document with `text`
and, if given, `id`, `title`, `source` and `metadata`.

    >>> list(read_documents([Path("manual/"), Path("faq.jsonl")]))
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ragspec.core import Document
from ragspec.errors import InputError

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst"})
SUFFIXES = TEXT_SUFFIXES | {".jsonl"}
_KEYS = frozenset({"id", "text", "title", "source", "metadata"})


def find_files(inputs: Iterable[str | Path]) -> list[tuple[Path, str]]:
    """Every file to read with the name it goes by; folders are searched in a fixed order, hidden files are left out.

    Raises: InputError for an input that does not exist, is of another kind, or a folder without any such file.
    """
    found: list[tuple[Path, str]] = []
    for path in map(Path, inputs):
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if _wanted(file, path)]
            if not inside:
                raise InputError(f"{path} holds no file to index ({', '.join(sorted(SUFFIXES))})")
            found += [(file, f"{path.resolve().name}/{file.relative_to(path).as_posix()}") for file in inside]
        elif not path.exists():
            raise InputError(f"{path} does not exist")
        elif path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path} is of no kind that can be indexed ({', '.join(sorted(SUFFIXES))})")
        else:
            found.append((path, path.name))
    return found


def read_documents(inputs: Iterable[str | Path]) -> Iterator[Document]:
    """Raises: InputError with file, line and reason."""
    for path, name in find_files(inputs):
        yield from read_file(path, name)


def read_file(path: Path, name: str) -> Iterator[Document]:
    """The documents of one file; text files without any text give none."""
    try:
        if path.suffix.lower() == ".jsonl":
            with open(path, encoding="utf-8-sig") as lines:
                yield from (_row(line, path, name, number) for number, line in enumerate(lines, 1) if line.strip())
            return
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as cause:
        raise InputError(f"{path} is not UTF-8 text (byte {cause.start})") from cause
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause.strerror}") from cause
    if text.strip():
        yield Document(id=name, text=text, title=_title(text, path), source=name)


def _row(line: str, path: Path, name: str, number: int) -> Document:
    place = f"{path}, line {number}"
    try:
        row: Any = json.loads(line)
    except ValueError as cause:
        raise InputError(f"{place}: not JSON: {cause}") from cause
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise InputError(f"{place}: not an object with a string `text`")
    given_id = row.get("id", f"{name}:{number}")
    fields = {"id": str(given_id) if isinstance(given_id, int) else given_id}
    fields |= {key: row.get(key) or "" for key in ("title", "source")}
    for key, value in fields.items():
        if not isinstance(value, str) or (key == "id" and not value):
            raise InputError(f"{place}: `{key}` must be a {'non-empty ' if key == 'id' else ''}string")
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise InputError(f"{place}: `metadata` must be an object")
    others = {key: value for key, value in row.items() if key not in _KEYS}
    return Document(text=row["text"], metadata={**others, **metadata}, **fields)


def _title(text: str, path: Path) -> str:
    first = text.lstrip().split("\n", 1)[0]
    return first.lstrip("# ").strip() if path.suffix.lower() == ".md" and first.startswith("# ") else path.stem


def _wanted(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden and file.suffix.lower() in SUFFIXES
