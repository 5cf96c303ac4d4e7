"""`ragspec correct`: prints corrected files, shows a diff, or writes the corrections back.

Owns files and output; corrections are `Grammar`'s. A file keeps its line endings, byte order mark and mode, and is replaced whole
or not at all. Files that are not UTF-8 are refused. Exit codes are a linter's: 0 without corrections or after writing them, 1 if
`--diff` shows any, 2 if a file could not be corrected.

    $ ragspec correct --diff letter.txt
"""

import difflib
import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from ragspec.cli.terminal import loading, note, one_line, print_error, safe, stay_offline, stderr_console
from ragspec.config import PipelineConfig
from ragspec.core import check_text
from ragspec.disk import atomic_writer, saving
from ragspec.errors import InputError, SaveError
from ragspec.rag.grammar.correction import DEFAULT_PARAMS, Correction
from ragspec.rag.grammar.edit_filters import EditFilter
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.steps import default_params

STDIN = "-"
_CHUNK = 64
"""Files corrected together."""


Output = Literal["text", "diff", "file"]
"""Where corrections go: as whole texts or as a diff to stdout, or into the files."""


class _InputFile(NamedTuple):
    name: str
    text: str


def run_correct(
    files: Sequence[str], settings: PipelineConfig, edit_filter: EditFilter, output: Output, *, speculation: bool
) -> int:
    """Returns the exit code. Reads every file before it loads a model. Raises: RagspecError for errors that concern all files."""
    tally, errors = Counter[str](), stderr_console()
    read = list(_read_files(files, tally))
    if read:
        stay_offline(settings.target)
        params = replace(default_params(settings.generation), max_tokens=DEFAULT_PARAMS.max_tokens)
        with loading(errors, "loading the target") as say:
            grammar = Grammar.from_config(settings, say)
        with grammar, loading(errors, "correcting") as say:
            for begin in range(0, len(read), _CHUNK):
                say("correcting", begin, len(read))
                chunk = read[begin : begin + _CHUNK]
                texts = [file.text for file in chunk]
                corrections = grammar.correct_many(texts, params, edit_filter=edit_filter, speculation=speculation)
                for file, correction in zip(chunk, corrections, strict=True):
                    _show(file, correction, output, tally)
    errors.print(_summary(tally), style="dim")
    return 2 if tally["failed"] else int(output == "diff" and tally["changed"] > 0)


def _show(file: _InputFile, correction: Correction, output: Output, tally: Counter[str]) -> None:
    for name in ("edits", "withheld", "unfinished"):
        tally[name] += len(getattr(correction, name))
    tally.update(files=1, changed=int(bool(correction.edits)))
    if language := correction.other_language:
        name = "standard input" if file.name == STDIN else file.name
        note(stderr_console(), f"{name} stays as it is: it seems to be {language}, and only English is corrected")
    if output == "diff":
        _write("".join(_diff(file, correction)))
    elif output == "text" or file.name == STDIN:
        _write(correction.corrected)
    elif correction.edits:
        try:
            _replace(Path(file.name), file.text.encode("utf-8"), correction.corrected.encode("utf-8"))
        except SaveError as error:
            print_error(one_line(error))
            tally["failed"] += 1


def _read_files(files: Sequence[str], tally: Counter[str]) -> Iterator[_InputFile]:
    """Yields the readable files, and prints an error for each of the others."""
    for name in dict.fromkeys(files):
        try:
            yield _read_file(name)
        except InputError as error:
            print_error(one_line(error))
            tally["failed"] += 1


def _read_file(name: str) -> _InputFile:
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
    return _InputFile(name, check_text(text, shown) if text.strip() else text)


def _diff(file: _InputFile, correction: Correction) -> Iterator[str]:
    """A unified diff for `patch`. Lines end at line feeds only, so a carriage return belongs to its line."""
    before, after = (io.StringIO(text, newline="\n").readlines() for text in (file.text, correction.corrected))
    for line in difflib.unified_diff(before, after, file.name, f"{file.name} (corrected)"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _write(text: str) -> None:
    """Removes control characters if stdout is a terminal, else writes byte for byte."""
    if sys.stdout.isatty():
        sys.stdout.write(safe(text.replace("\r\n", "\n")))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.flush()


def _replace(path: Path, before: bytes, content: bytes) -> None:
    """Replaces the content `before` in one step, keeping the mode; follows links.

    Raises: SaveError, also if the file no longer holds `before` because another process wrote to it.
    """
    path = path.resolve()
    with saving(path), atomic_writer(path, mode=0o600) as file:
        os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
        file.write(content)
        if path.read_bytes() != before:
            raise SaveError(f"{path} was changed meanwhile and stays as it is")


def _summary(tally: Counter[str]) -> str:
    parts = [f"{tally['files']} files, {tally['changed']} with corrections, {tally['edits']} in all"]
    if tally["withheld"]:
        parts.append(f"{tally['withheld']} withheld (names, numbers, quotation marks, code, too much of a sentence)")
    if tally["unfinished"]:
        parts.append(f"{tally['unfinished']} sentences left as they are, for their correction had no end")
    return "; ".join(parts)


def edit_filter_of(max_edit_ratio: float, ignore: Sequence[str], ignore_file: Path | None) -> EditFilter:
    """`ignore_file` holds one word or phrase a line. Raises: InputError."""
    words = list(ignore)
    if ignore_file is not None:
        try:
            words += [line for line in ignore_file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as cause:
            raise InputError(f"cannot read {ignore_file}: {cause}") from cause
    return EditFilter(max_edit_ratio, frozenset(words))
