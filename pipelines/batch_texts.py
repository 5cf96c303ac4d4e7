"""Files of text as rows of a batch job, and its results as files again.

    >>> rows = gathered(Path("manual"), Path("out"))     # out/input/texts.jsonl, a row a file, named by its place in the folder
    >>> spread(Path("out"))                              # out/files/..., corrected

A file is a row whatever its length; one that is no UTF-8 is named and left out. Results are written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ragspec.errors import InputError
from ragspec.retrieval.disk import make_folder, replace_text, saving

SUFFIXES = (".txt", ".md", ".rst", ".html", ".tex")
_ROWS, _FILES = Path("input") / "texts.jsonl", Path("files")


def is_text(path: Path) -> bool:
    """Whether an input is of texts rather than of rows: such a file, or a folder that holds some and no rows."""
    if path.is_dir():
        found = {file.suffix for file in path.rglob("*")}
        return bool(found & set(SUFFIXES)) and not found & {".jsonl", ".parquet"}
    return path.suffix in SUFFIXES


def gathered(inputs: Path, out: Path, tell: Callable[[str], None]) -> Path:
    """A file of rows. `tell` hears of files that are left out. Raises: InputError, SaveError."""
    rows = list(_rows(inputs, tell))
    if not rows:
        raise InputError(f"{inputs} holds no text in UTF-8")
    path = out / _ROWS
    with saving(path):
        make_folder(path.parent)
        replace_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def spread(out: Path) -> int:
    """Every corrected text as a file; how many there are. Raises: InputError, SaveError."""
    count = 0
    for part in sorted([*out.glob("answers-*.jsonl"), *out.glob("answers-*.jsonl.part")]):
        for line in part.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                record: dict[str, Any] = json.loads(line)
                _write(_place(out / _FILES, record["id"]), record["corrected"])
                count += 1
    return count


def _rows(inputs: Path, tell: Callable[[str], None]) -> Iterator[dict[str, str]]:
    folder = inputs if inputs.is_dir() else inputs.parent
    files = sorted(inputs.rglob("*")) if inputs.is_dir() else [inputs]
    for path in files:
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as cause:
            tell(f"{path} is not UTF-8: byte {cause.start}")
            continue
        except OSError as cause:
            raise InputError(f"cannot read {path}: {cause.strerror}") from cause
        if not text.strip():
            tell(f"{path} is empty")
            continue
        yield {"id": path.relative_to(folder).as_posix(), "text": text}


def _place(folder: Path, name: str) -> Path:
    """Raises: InputError for a result that is of no file in a folder."""
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{name!r} is no file's name")
    return folder / name


def _write(path: Path, text: str) -> None:
    with saving(path):
        make_folder(path.parent)
        beside = path.with_name(f".{path.name}.part")
        beside.write_bytes(text.encode("utf-8"))
        beside.replace(path)
