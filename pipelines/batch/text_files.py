"""Text files as rows of a batch job, and corrected texts as files again.

    >>> rows = collect_texts(Path("manual"), Path("out"), print)     # out/input/texts.jsonl: one row a file, its path as the id
    >>> write_corrected_files(Path("out"))                           # out/files/...

A file of any length is one row. A file that is not UTF-8 is reported and left out. `out/files` holds the results of one run only.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.batch.rows import ROW_SUFFIXES
from ragspec.disk import TEMPORARY, make_folder, saving, write_atomically
from ragspec.errors import InputError
from ragspec.retrieval.reading import CORRECTABLE_SUFFIXES

_ROWS, _FILES = Path("input") / "texts.jsonl", Path("files")


def holds_texts(path: Path) -> bool:
    """Whether an input is text files rather than rows: a text file, or a folder with text files and no rows."""
    if not path.is_dir():
        return path.suffix in CORRECTABLE_SUFFIXES
    suffixes = {file.suffix for file in path.rglob("*")}
    return not suffixes.isdisjoint(CORRECTABLE_SUFFIXES) and suffixes.isdisjoint(ROW_SUFFIXES)


def collect_texts(inputs: Path, out: Path, warn: Callable[[str], None]) -> Path:
    """Writes text files as one file of rows; calls `warn` for every file left out. Raises: InputError, SaveError."""
    files = sorted(file for file in inputs.rglob("*") if file.is_file()) if inputs.is_dir() else [inputs]
    folder = inputs if inputs.is_dir() else inputs.parent
    rows = []
    for path in files:
        text = _text_of(path, warn) if path.suffix in CORRECTABLE_SUFFIXES else ""
        if text:
            rows.append({"id": path.relative_to(folder).as_posix(), "text": text})
    if not rows:
        raise InputError(f"{inputs} holds no text in UTF-8")
    path = out / _ROWS
    with saving(path):
        make_folder(path.parent)
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _text_of(path: Path, warn: Callable[[str], None]) -> str:
    """Empty, after a warning, for a file without text. Raises: InputError if the file cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as cause:
        warn(f"{path} is not UTF-8: byte {cause.start}")
        return ""
    except OSError as cause:
        raise InputError(f"cannot read {path}: {cause.strerror}") from cause
    if not text.strip():
        warn(f"{path} is empty")
        return ""
    return text


def write_corrected_files(out: Path) -> int:
    """Writes each text of the input that has a correction as a file; returns their number. Raises: InputError, SaveError."""
    failed = {row.get("id") for row in whole_lines(out / "errors.jsonl")}
    corrected = {row["id"] for row in whole_lines(out / _ROWS)} - failed
    new, old = out / f"{TEMPORARY}{_FILES}", out / f"{TEMPORARY}old-{_FILES}"
    records = (record for part in sorted(out.glob("answers-*.jsonl*")) for record in whole_lines(part))
    count = 0
    with saving(out / _FILES):
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)
        make_folder(new)
        for record in records:
            if record["id"] in corrected:
                path = new / record["id"]
                if not path.resolve().is_relative_to(new.resolve()):
                    raise InputError(f"{record['id']!r} is no file's name")
                make_folder(path.parent)
                path.write_bytes(record["corrected"].encode("utf-8"))
                count += 1
        if (out / _FILES).exists():
            (out / _FILES).rename(old)
        new.rename(out / _FILES)
        shutil.rmtree(old, ignore_errors=True)
    return count


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file, without a torn last line; none if there is no file."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            yield json.loads(line)
