"""The folder of a batch job's results; a finished row stays in it, whatever happens.

    job.json                  the settings that decide the texts; a folder is never continued with other settings
    answers-00000.jsonl       finished parts; never changed again
    answers-00001.jsonl.part  the part that is being written; every line that ends in a newline counts
    errors.jsonl              rows without an answer, with the reasons; of the last run that reached its end
    .lock                     held while a job runs

One process writes. A line is on the disk before it is counted; parts and errors get their final names by rename.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragspec.disk import fsync, saving, write_atomically, writer_lock
from ragspec.errors import ConfigError, IndexBusy, SaveError, StoreCorrupt
from ragspec.old_keys import with_new_keys

FORMAT = "ragspec-batch/1"
ROWS_PER_PART = 10_000


class JsonLines:
    """A growing file of JSON lines; its name ends in `.part` until it is published."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        with saving(path):
            self._file = open(self._part, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, lines: Sequence[str]) -> None:
        """Returns when the lines are on the disk. Raises: SaveError; then none of them is in the file."""
        size = os.fstat(self._file.fileno()).st_size
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            with saving(self._path):
                while data:
                    data = data[os.write(self._file.fileno(), data) :]
                os.fsync(self._file.fileno())
        except SaveError as error:
            os.ftruncate(self._file.fileno(), size)
            raise SaveError(f"{error}; what was finished is kept") from error

    def close(self) -> None:
        self._file.close()

    def publish(self) -> None:
        """Closes the file and gives it its final name. Raises: SaveError."""
        self._file.close()
        _rename(self._part, self._path)


class OutputFolder(contextlib.AbstractContextManager["OutputFolder"]):
    """The answers and errors of one job; holds the folder's lock until it is closed."""

    def __init__(self, folder: Path, rows_per_part: int = ROWS_PER_PART) -> None:
        """Raises: SaveError, ConfigError when another job writes there."""
        self.folder = folder
        self._rows_per_part, self._rows_in_part = rows_per_part, 0
        self._part: JsonLines | None = None
        self._errors: JsonLines | None = None
        self._lock = contextlib.ExitStack()
        try:
            with saving(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(writer_lock(folder))
        except IndexBusy as cause:
            raise ConfigError(f"another job writes to {folder}") from cause

    def begun(self) -> dict[str, Any]:
        """The settings of the folder's job, under the names of today; empty without one. Raises: StoreCorrupt, ConfigError."""
        path = self.folder / "job.json"
        return with_new_keys(_json_object(path.read_bytes(), str(path))) if path.exists() else {}

    def open_job(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Continue the folder's job, or begin one; without `resume`, the folder's results are removed.

        Raises: ConfigError when the folder's job has other settings, StoreCorrupt, SaveError.
        """
        path = self.folder / "job.json"
        settings = {"format": FORMAT, **settings}
        if not resume:
            self._remove()
        if path.exists():
            _check_same(self.begun(), settings, self.folder)
        elif self._finished_parts() or self._open_parts():
            raise StoreCorrupt(f"{self.folder} holds answers, but no job.json says how they were made")
        with saving(self.folder):
            if not path.exists():
                write_atomically(path, json.dumps(settings, indent=2) + "\n")
            for part in self._open_parts():
                _cut_torn_line(part)
                _rename(part, part.with_suffix(""))
            (self.folder / "errors.jsonl.part").unlink(missing_ok=True)  # Why: rows that failed are tried again
        self._errors = JsonLines(self.folder / "errors.jsonl")

    def answers(self) -> Iterator[dict[str, Any]]:
        """Every recorded answer. Raises: StoreCorrupt that names file and line, and says how the job can go on."""
        for path in self._finished_parts():
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        yield _json_object(line, f"{path}, line {number}")
                    except StoreCorrupt as error:
                        raise StoreCorrupt(
                            f"{error}. A finished file was changed or torn after it was written; delete line {number} of "
                            "that file (or the whole file) and run the command again: it answers those rows anew"
                        ) from error

    def append(self, lines: Sequence[str]) -> None:
        """Record finished rows. Raises: SaveError."""
        if self._part is None:
            number = max((int(path.stem.removeprefix("answers-")) for path in self._finished_parts()), default=-1) + 1
            self._part, self._rows_in_part = JsonLines(self.folder / f"answers-{number:05d}.jsonl"), 0
        self._part.append(lines)
        self._rows_in_part += len(lines)
        if self._rows_in_part >= self._rows_per_part:
            self._finish_part()

    def append_errors(self, lines: Sequence[str]) -> None:
        """Raises: SaveError."""
        assert self._errors is not None, "open_job comes first"
        self._errors.append(lines)

    def finish(self) -> None:
        """The run has reached its end: its errors replace those of the run before. Raises: SaveError."""
        errors, self._errors = self._errors, None
        if errors is not None:
            errors.publish()

    def __exit__(self, *_: object) -> None:
        """Finishes the open part and releases the lock. Raises: SaveError."""
        with self._lock:
            if self._errors is not None:
                self._errors.close()
            self._finish_part()

    def _finish_part(self) -> None:
        if self._part is not None:
            part, self._part = self._part, None
            part.publish()

    def _finished_parts(self) -> list[Path]:
        return sorted(self.folder.glob("answers-*.jsonl"))

    def _open_parts(self) -> list[Path]:
        return sorted(self.folder.glob("answers-*.jsonl.part"))

    def _remove(self) -> None:
        with saving(self.folder):
            for path in [*self._finished_parts(), *self._open_parts()]:
                path.unlink()
            for name in ("errors.jsonl", "job.json"):  # job.json last: it says how the answers were made
                (self.folder / name).unlink(missing_ok=True)


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    for name in sorted(new.keys() | old.keys()):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"{folder} holds a job with {name} {old.get(name)!r}, not {new.get(name)!r}: use another folder, or "
                "--no-resume to discard its answers"
            )


def _json_object(text: bytes, where: str) -> dict[str, Any]:
    """Raises: StoreCorrupt."""
    try:
        value = json.loads(text)
    except ValueError as cause:
        raise StoreCorrupt(f"{where}: not JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise StoreCorrupt(f"{where}: no JSON object")
    return value


def _cut_torn_line(path: Path) -> None:
    """Why: a process that is killed may leave the beginning of a line behind."""
    with open(path, "rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
        os.fsync(file.fileno())


def _rename(part: Path, final: Path) -> None:
    with saving(final):
        os.replace(part, final)
        fsync(final.parent)
