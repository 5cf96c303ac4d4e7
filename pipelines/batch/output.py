"""The folder of a batch job: what is finished stays, whatever happens.

    job.json                what decides the texts; a folder is never continued with something else
    answers-00000.jsonl     finished parts, never touched again
    answers-00001.jsonl.part  the part being written; every line that ends in a newline counts
    errors.jsonl            the rows without an answer and why, of the last run that reached its end
    .lock                   held while a job runs

One process writes. A line is on the disk before it is counted; parts and errors get their names by rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ragspec.disk import fsync, write_atomically
from ragspec.errors import ConfigError, SaveError, StoreCorrupt

FORMAT = "ragspec-batch/1"
ROWS_PER_PART = 10_000
_ERRORS = "errors.jsonl"


class JsonLines:
    """A growing file of JSON lines. `append` returns when the lines are on the disk; a failed one leaves no trace."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _saving(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, lines: Sequence[str]) -> None:
        """Raises: SaveError; what was appended before stays."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            with _saving(self._path):
                _write_all(self._file.fileno(), "".join(f"{line}\n" for line in lines).encode())
                os.fsync(self._file.fileno())
        except SaveError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def close(self, final: Path | None = None) -> None:
        """Give the file its final name, if there is one. Raises: SaveError."""
        self._file.close()
        if final is not None:
            _rename(self._path, final)


class OutputFolder:
    """The answers and errors of one job; holds the folder's lock until it is closed."""

    def __init__(self, folder: Path, rows_per_part: int = ROWS_PER_PART) -> None:
        """Raises: SaveError, ConfigError when another job writes there."""
        self.folder = folder
        self._rows_per_part = rows_per_part
        self._part: JsonLines | None = None
        self._rows_in_part = 0
        self._errors: JsonLines | None = None
        with _saving(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / ".lock", "wb")  # noqa: SIM115 - closed by close()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            self._lock.close()
            if isinstance(cause, BlockingIOError):
                raise ConfigError(f"another job writes to {folder}") from cause
            raise SaveError(f"cannot lock {folder}: {cause.strerror or cause}") from cause

    def open_job(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Continue the folder's job, or begin one; without `resume`, what the folder holds is removed.

        Raises: ConfigError when the folder's job has other settings, StoreCorrupt, SaveError.
        """
        path = self.folder / "job.json"
        if not resume:
            self._remove()
        if path.exists():
            _check_same(_load(path), {"format": FORMAT, **settings}, self.folder)
        elif self._finished_parts() or self._open_parts():
            raise StoreCorrupt(f"{self.folder} holds answers, but no job.json says how they were made")
        else:
            with _saving(path):
                write_atomically(path, json.dumps({"format": FORMAT, **settings}, indent=2) + "\n")
                fsync(self.folder)
        for part in self._open_parts():
            _cut_torn_line(part)
            _rename(part, part.with_suffix(""))
        errors = self.folder / f"{_ERRORS}.part"
        with _saving(errors):
            errors.unlink(missing_ok=True)  # Why: rows that failed are tried again
        self._errors = JsonLines(errors)

    def answers(self) -> Iterator[dict[str, Any]]:
        """Every recorded answer. Raises: StoreCorrupt naming file and line."""
        for path in self._finished_parts():
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    yield _parsed(line, f"{path}, line {number}")

    def append(self, lines: Sequence[str]) -> None:
        """Record finished rows. Raises: SaveError."""
        if self._part is None:
            self._part_path = self.folder / f"answers-{self._next_part():05d}.jsonl.part"
            self._part, self._rows_in_part = JsonLines(self._part_path), 0
        self._part.append(lines)
        self._rows_in_part += len(lines)
        if self._rows_in_part >= self._rows_per_part:
            self._seal()

    def append_errors(self, lines: Sequence[str]) -> None:
        """Raises: SaveError."""
        assert self._errors is not None, "open_job comes first"
        self._errors.append(lines)

    def finish(self) -> None:
        """The run has reached its end: its errors replace those of the run before. Raises: SaveError."""
        errors, self._errors = self._errors, None
        if errors is not None:
            errors.close(self.folder / _ERRORS)

    def close(self) -> None:
        try:
            self._seal()
        finally:
            if self._errors is not None:
                self._errors.close()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _seal(self) -> None:
        if self._part is not None:
            part, self._part = self._part, None
            part.close(self._part_path.with_suffix(""))

    def _finished_parts(self) -> list[Path]:
        return sorted(self.folder.glob("answers-*.jsonl"))

    def _open_parts(self) -> list[Path]:
        return sorted(self.folder.glob("answers-*.jsonl.part"))

    def _next_part(self) -> int:
        parts = self._finished_parts()
        return int(parts[-1].stem.removeprefix("answers-")) + 1 if parts else 0

    def _remove(self) -> None:
        with _saving(self.folder):
            for path in [*self._finished_parts(), *self._open_parts(), self.folder / _ERRORS, self.folder / "job.json"]:
                path.unlink(missing_ok=True)


def _check_same(old: Any, new: Mapping[str, Any], folder: Path) -> None:
    if not isinstance(old, dict):
        raise StoreCorrupt(f"{folder / 'job.json'} is no JSON object")
    for name in sorted(new.keys() | old.keys()):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"{folder} holds a job with {name} {old.get(name)!r}, not {new.get(name)!r}: use another folder, or "
                "--no-resume to discard its answers"
            )


def _load(path: Path) -> Any:
    return _parsed(path.read_bytes(), str(path))


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as cause:
        raise StoreCorrupt(f"{where}: not JSON: {cause}") from cause


def _cut_torn_line(path: Path) -> None:
    """Why: a process that is killed may leave the beginning of a line behind."""
    with _saving(path), open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        os.fsync(file.fileno())


def _rename(part: Path, final: Path) -> None:
    with _saving(final):
        os.replace(part, final)
        fsync(final.parent)


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


@contextlib.contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise SaveError(f"cannot write {path}: {cause.strerror or cause}; what was finished is kept") from cause
