"""Finds the files of an input and their names. Opens no file.

>>> find_files(["manual/", "notes/**/*.md"])
"""

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ragspec.errors import InputError
from ragspec.retrieval.reading.formats import NAMED_SUFFIXES, SUFFIXES

_READMES = frozenset(
    "authors changelog changes contributing copying copyright faq hacking history install licence license news notes notice "
    "readme release thanks todo".split()
)
_README_SUFFIXES = frozenset({"", ".debian", ".source"})
_KINDS = ", ".join(sorted(SUFFIXES))
_IN_FOLDERS = ", ".join(sorted({*SUFFIXES}.difference(NAMED_SUFFIXES)))
_MAGIC = frozenset("*?[")


def find_files(inputs: Iterable[str | Path], allow_none: bool = False) -> list[tuple[Path, str]]:
    """Every file to read, once, with its name. A file that several inputs match is named by the first.

    An input is a file, a folder, or a pattern ("docs/**/*.md"). Folders are searched in a fixed order; hidden files, links to
    folders and files of other kinds are left out, and those of NAMED_SUFFIXES unless the input ends so. Below a folder or the
    fixed part of a pattern, the name is that folder's name with the path inside it.
    Raises: InputError for an input that does not exist, has another suffix, cannot be searched or, unless `allow_none`, holds no
    file to read; and for two files of one name.
    """
    names: dict[Path, str] = {}  # by resolved path, in the order found
    found: dict[str, Path] = {}
    for path, name in (pair for given in inputs for pair in _files_of(Path(given), allow_none)):
        real = path.resolve()
        if real in names:
            continue
        if name in found:
            raise InputError(f"{found[name]} and {path} would both be named {name!r}: give a folder above both")
        names[real] = name
        found[name] = path
    return [(path, name) for name, path in found.items()]


def passed_over(inputs: Iterable[str | Path], known: Collection[str] = ()) -> list[Path]:
    """The files below the inputs' folders that are not read, in a fixed order, also pipes and links to nothing; hidden files are
    not counted. `known`: real paths that other inputs name.
    """
    folders = [Path(given) for given in inputs if Path(given).is_dir()]
    files = ((file, folder) for folder in folders for file in _walk(folder))
    found = {
        file for file, folder in files if not _is_hidden(file, folder) and not (is_readable(file) and file.is_file())
    }
    # Why not resolve: it refuses a link to itself
    return sorted(file for file in found if os.path.realpath(file) not in known)


def is_readable(file: Path, given: str = "") -> bool:
    """By its suffix, or by its name: README, INSTALL and the like are text without a suffix. `given`: the input of the file."""
    suffix = file.suffix.lower()
    is_readme = file.name.partition(".")[0].lower() in _READMES and suffix in _README_SUFFIXES
    is_named = suffix not in NAMED_SUFFIXES or given.lower().endswith(suffix)
    return (suffix in SUFFIXES and is_named) or is_readme


def input_root(given: str | Path) -> Path:
    """The resolved folder or file that contains all files of an input."""
    path = Path(given)
    return (path if path.exists() else _split(path)[0]).resolve()


def _files_of(given: Path, allow_none: bool) -> list[tuple[Path, str]]:
    try:
        return _search(given, allow_none)
    except OSError as cause:
        raise InputError(f"{given} cannot be searched: {cause.strerror}") from cause


def _search(given: Path, allow_none: bool) -> list[tuple[Path, str]]:
    if given.is_dir():
        return _named(given, _walk(given), "", allow_none)
    if given.exists():
        if not is_readable(given, given.name):
            raise InputError(
                f"{given} is of no kind that can be indexed ({_KINDS}); plain text can under a name with .txt"
            )
        if not given.is_file():  # Why: opening a named pipe waits for ever
            raise InputError(f"{given} is not a plain file")
        return [(given, given.name)]
    fixed, pattern = _split(given)
    if not pattern:
        raise InputError(f"{given} does not exist")
    return _named(fixed, _matches(fixed, pattern), pattern, allow_none)


def _split(given: Path) -> tuple[Path, str]:
    """The part before the first wildcard, and the rest: ("docs", "**/*.md")."""
    for number, part in enumerate(given.parts):
        if _MAGIC & set(part):
            return Path(*given.parts[:number]), str(Path(*given.parts[number:]))
    return given, ""


def _named(folder: Path, files: Iterable[Path], pattern: str, allow_none: bool) -> list[tuple[Path, str]]:
    wanted = sorted(file for file in files if _is_wanted(file, folder, pattern))
    if not (wanted or allow_none):
        if_named = f"; {', '.join(NAMED_SUFFIXES)} where a path or pattern ends so"
        raise InputError(f"{folder / pattern} holds no file to index ({_IN_FOLDERS}{if_named})")
    lead = folder.resolve().name
    return [(file, "/".join(filter(None, (lead, file.relative_to(folder).as_posix())))) for file in wanted]


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(cause: OSError) -> None:  # Why: left alone, a folder without permission looks like an empty one
        raise InputError(f"{cause.filename} cannot be searched: {cause.strerror}") from cause

    for inside, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(inside) / name for name in files)


def _matches(fixed: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from fixed.glob(pattern)
    except (ValueError, NotImplementedError) as cause:
        raise InputError(f"{fixed / pattern} is no pattern: {cause}") from cause


def _is_wanted(file: Path, folder: Path, pattern: str) -> bool:
    return not _is_hidden(file, folder) and is_readable(file, pattern) and file.is_file()


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
