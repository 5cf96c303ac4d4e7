"""Files without their mistakes: shown, compared or written back.

A file keeps its line endings, its byte order mark and its mode; it is replaced whole or not at all; one that is no UTF-8 is
refused. Ends as a linter does: 0 where nothing is to be corrected or all of it was written, 1 where `--diff` shows something, 2
if a file could not be corrected.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ragspec.cli.terminal import one_line, print_error, safe, stay_offline, stderr_console
from ragspec.config import load_config
from ragspec.core import SamplingParams, check_text
from ragspec.disk import fsync, saving
from ragspec.errors import InputError, SaveError
from ragspec.rag.grammar.correction import DEFAULT_PARAMS, Correction
from ragspec.rag.grammar.edit_filters import EditFilter
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.steps import default_params

STDIN = "-"
_CHUNK = 64
"""Files corrected together."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is done with a correction; neither: it is printed."""

    diff: bool = False
    in_place: bool = False
    speculation: bool = True


class _Read(NamedTuple):
    """A file as it was."""

    name: str
    text: str


class _Tally:
    """How it went."""

    def __init__(self) -> None:
        self.num_files = self.num_changed = self.num_edits = self.num_withheld = self.num_unfinished = 0
        self.failed = False

    def add(self, correction: Correction) -> None:
        self.num_files += 1
        self.num_changed += bool(correction.edits)
        self.num_edits += len(correction.edits)
        self.num_withheld += len(correction.withheld)
        self.num_unfinished += len(correction.unfinished)


def run_correct(
    files: Sequence[str], config: Path | None, overrides: Mapping[str, Any], edit_filter: EditFilter, wanted: Wanted
) -> int:
    """The exit code. Every file is read before a model is loaded. Raises: RagspecError where nothing can be corrected."""
    settings, tally = load_config(config, **overrides), _Tally()
    errors = stderr_console()
    read = list(_read(files, wanted, tally))
    if read:
        stay_offline(settings.target.model)
        params = replace(default_params(settings.generation), max_tokens=DEFAULT_PARAMS.max_tokens)
        with errors.status("Opening the target …"):
            grammar = Grammar.from_config(settings)
        with grammar:
            _correct(grammar, read, params, edit_filter, wanted, tally, errors)
    errors.print(_summary(tally), style="dim")
    return 2 if tally.failed else int(wanted.diff and tally.num_changed > 0)


def _correct(
    grammar: Grammar,
    read: Sequence[_Read],
    params: SamplingParams,
    edit_filter: EditFilter,
    wanted: Wanted,
    tally: _Tally,
    errors: Console,
) -> None:
    columns = (TextColumn("Correcting"), BarColumn(), MofNCompleteColumn(), TextColumn("files"))
    with Progress(*columns, console=errors, transient=True) as progress:
        bar = progress.add_task("", total=len(read))
        for begin in range(0, len(read), _CHUNK):
            chosen = read[begin : begin + _CHUNK]
            texts = [each.text for each in chosen]
            corrections = grammar.correct_many(texts, params, edit_filter=edit_filter, speculation=wanted.speculation)
            for file, correction in zip(chosen, corrections, strict=True):
                _show(file, correction, wanted, tally)
                progress.advance(bar)


def _show(file: _Read, correction: Correction, wanted: Wanted, tally: _Tally) -> None:
    tally.add(correction)
    if wanted.diff:
        _write("".join(_diff(file, correction)))
    elif not wanted.in_place or file.name == STDIN:
        _write(correction.corrected)
    elif correction.edits:
        try:
            _replace(Path(file.name), file.text.encode("utf-8"), correction.corrected.encode("utf-8"))
        except SaveError as error:
            print_error(one_line(error))
            tally.failed = True


def _read(files: Sequence[str], wanted: Wanted, tally: _Tally) -> Iterator[_Read]:
    """Files that can be corrected; what is wrong with the others is said."""
    for name in dict.fromkeys(files):
        try:
            yield _one(name)
        except InputError as error:
            print_error(one_line(error))
            tally.failed = True


def _one(name: str) -> _Read:
    """Raises: InputError."""
    shown = "standard input" if name == STDIN else name
    try:
        raw = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as cause:
        raise InputError(f"cannot read {shown}: {cause.strerror}") from cause
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise InputError(f"{shown} is not UTF-8: byte {cause.start}; it was left as it is") from cause
    return _Read(name, check_text(text, shown) if text.strip() else text)


def _diff(file: _Read, correction: Correction) -> Iterator[str]:
    """Unified, for `patch`: lines end at a line feed only, and what is before it belongs to the line."""
    before, after = (io.StringIO(text, newline="\n").readlines() for text in (file.text, correction.corrected))
    for line in difflib.unified_diff(before, after, file.name, f"{file.name} (corrected)"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _write(text: str) -> None:
    """To a terminal without control characters, to a pipe byte for byte."""
    if sys.stdout.isatty():
        sys.stdout.write(safe(text.replace("\r\n", "\n")))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.flush()


def _replace(path: Path, before: bytes, content: bytes) -> None:
    """The file's content, whole or not at all; where it is a link, that of the file it leads to.

    Raises: SaveError, also where the file is no longer what was corrected: somebody else wrote to it meanwhile.
    """
    path = path.resolve()
    with saving(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.read_bytes() != before:
                raise SaveError(f"{path} was changed meanwhile and stays as it is")
            os.replace(name, path)
            fsync(path.parent)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _summary(tally: _Tally) -> str:
    parts = [f"{tally.num_files} files, {tally.num_changed} with corrections, {tally.num_edits} in all"]
    if tally.num_withheld:
        parts.append(f"{tally.num_withheld} withheld (names, numbers, code, too much of a sentence)")
    if tally.num_unfinished:
        parts.append(f"{tally.num_unfinished} sentences left as they are, for their correction had no end")
    return "; ".join(parts)


def edit_filter_of(max_edit_ratio: float, ignore: Sequence[str], ignore_file: Path | None) -> EditFilter:
    """`ignore_file`: a word or phrase a line. Raises: InputError."""
    words = list(ignore)
    if ignore_file is not None:
        try:
            words += [line for line in ignore_file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as cause:
            raise InputError(f"cannot read {ignore_file}: {cause}") from cause
    return EditFilter(max_edit_ratio, frozenset(words))
