"""Files of text as rows of a batch job, and its results as files again.

    >>> rows = gathered(Path("manual"), Path("out"))     # out/input/texts.jsonl, a row a file, named by its place in the folder
    >>> spread(Path("out"))                              # out/files/..., corrected

A file is a row whatever its length; one that is no UTF-8 is named and left out. The files of results are all of one run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ragspec.disk import TEMPORARY, make_folder, saving, write_atomically
from ragspec.errors import InputError

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
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def spread(out: Path) -> int:
    """Every text of the input that has a correction as a file, and no other; their number. Raises: InputError, SaveError."""
    wanted = {row["id"] for row in _lines(out / _ROWS)} - {row.get("id") for row in _lines(out / "errors.jsonl")}
    new, old = out / f"{TEMPORARY}{_FILES}", out / f"{TEMPORARY}old-{_FILES}"
    count = 0
    with saving(out / _FILES):
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        make_folder(new)
        for part in sorted([*out.glob("answers-*.jsonl"), *out.glob("answers-*.jsonl.part")]):
            for record in _lines(part):
                if record["id"] in wanted:
                    path = _place(new, record["id"])
                    make_folder(path.parent)
                    path.write_bytes(record["corrected"].encode("utf-8"))
                    count += 1
        if (out / _FILES).exists():
            (out / _FILES).rename(old)
        new.rename(out / _FILES)
        shutil.rmtree(old, ignore_errors=True)
    return count


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, if there is one."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield json.loads(line)


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
