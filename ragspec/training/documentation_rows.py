"""Documentation packages of Debian to train on, and rows of questions about them.

Owns which packages may be read, and which of their files. A package whose name's SHA-256 is 0 modulo 5, or of a source that an
evaluation uses, is refused: `is_for_evaluation` and `EVALUATED_SOURCES` are the rule. A package gives its English files in
formats that the index reads. Needs dpkg-deb, and apt-get for packages that are not at hand.

A row names its file by package, version, path and hash, and holds the spans of passage and quote in the text that the index's
reader makes of the file. No text of a document is in it but the question. `restored` finds the spans again: where a reader has
changed since, it looks for the quote nearby.

Rules ask in the documents' words. Questions in the words of users are written by a reader, a person or a model, who sees a
passage as numbered parts and names the parts that answer.

    >>> for reading in readings(debs): row = reading.row("Where does pumpd read its settings from?", [1])
    >>> rows = [row for deb in debian_packages(["apache2-doc"], folder) for row in rule_rows(deb, "apache2", 100)]
    >>> write_packed(rows, Path("rows.jsonl.gz"))
    >>> for text in restored(read_packed(Path("rows.jsonl.gz")), folder): ...
"""

import gzip
import hashlib
import itertools
import json
import re
import subprocess
import tarfile
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ragspec.config import ChunkingConfig
from ragspec.core import BlockKind, Document, Passage
from ragspec.disk import atomic_writer
from ragspec.errors import InputError
from ragspec.retrieval.chunking import Span, chunk, embedded_text
from ragspec.retrieval.reading import SUFFIXES, read_file
from ragspec.training.documentation import (
    UNANSWERABLE,
    WRITTEN,
    Neighbours,
    is_for_evaluation,
    may_answer,
    rule_questions,
)
from ragspec.training.sentences import Part, is_quotable, quotable_parts

EVALUATED_SOURCES = ("git", "borgbackup", "debian-faq", "debian-policy")
_SUFFIXES = frozenset(SUFFIXES) & {".txt", ".md", ".rst", ".adoc", ".asciidoc", ".html", ".htm", ".xhtml"}
_LEFT_OUT = re.compile(
    r"(?i)\.(?!en)[a-z]{2}(?:[-_][a-zA-Z]+)?\.\w+(?:\.gz)?$|(?:^|/)(?:_sources|_modules|_static|po|locale|(?!en)[a-z]{2}(?:_[A-Z]{2})?)/|(?:^|/)[^/]*(?:change|news|copy|licen[cs]e|author|thank"
    r"|credit|todo|index|search|contents|toc|readme\.debian)[^/]*$"
)
_MAX_FILE_BYTES, _MIN_CHARS = 2_000_000, 1500
_ENGLISH = frozenset("the of to is and in for that this".split())
_LEAST_ENGLISH = 0.12
"""The share of the commonest words of English in its texts is a fifth."""
_FILES_ALL = re.compile(r"^Files:\s*\*\s*$.*?^License:\s*(\S[^\n]*)$", re.MULTILINE | re.DOTALL)
_MAX_LICENCE_WORDS = 9
"""Of a licence's name; more are its text."""
_LICENCE = re.compile(r"^License:\s*(\S[^\n]*)$", re.MULTILINE)
_NAMED = re.compile(
    r"(?i)common-licenses/(\S*[\w])|(Apache License|GNU Free Documentation License|MIT License|BSD|public domain)"
)


class PackageFile(NamedTuple):
    """A file's origin: `path` and `sha256` are of the file as packed. `licence`: as the package's copyright file names it."""

    package: str
    version: str
    path: str
    sha256: str
    licence: str


def check_package(name: str, source: str = "") -> None:
    """Raises: InputError for a package that is kept out of training."""
    if is_for_evaluation(name) or source in EVALUATED_SOURCES:
        raise InputError(f"{name} is kept for evaluation: no text of it may be trained on")


def debian_packages(names: Iterable[str], folder: Path) -> Iterator[Path]:
    """The packages' files in `folder`, fetched there where they are missing. `name=version` asks for one version.

    Raises: InputError for a package that is refused or cannot be fetched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        package, _, version = name.partition("=")
        check_package(package)
        pattern = f"{package}_{version.replace(':', '%3a') or '*'}_*.deb"
        if not (found := sorted(folder.glob(pattern))):
            fetched = subprocess.run(["apt-get", "download", name], cwd=folder, capture_output=True, text=True)
            if not (found := sorted(folder.glob(pattern))):
                raise InputError(f"{name} cannot be fetched: {fetched.stderr.strip() or fetched.stdout.strip()}")
        yield found[-1]


def package_files(deb: Path, paths: Container[str] | None = None) -> Iterator[tuple[PackageFile, bytes]]:
    """The files of one package that are documentation, in an order that mixes its folders, each with its content; none of a
    package that holds no licence.

    `paths`: only these. Raises: InputError for a package that is refused or damaged.
    """
    name, version, source = _fields(deb)
    check_package(name, source)
    with tempfile.TemporaryFile() as whole:
        if subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=whole).returncode:
            raise InputError(f"{deb} is no Debian package")
        whole.seek(0)
        with tarfile.open(fileobj=whole) as tar:
            files = (each for each in tar if each.isfile())
            members = sorted(files, key=lambda each: hashlib.sha256(each.name.encode()).digest())
            licence = next((_licence(_content(tar, each)) for each in members if each.name.endswith("/copyright")), "")
            for member in members if licence else ():
                path = member.name.removeprefix("./")
                is_read = _is_documentation(path) and (paths is None or path in paths)
                if is_read and 0 < member.size <= _MAX_FILE_BYTES:
                    content = _content(tar, member)
                    yield PackageFile(name, version, path, hashlib.sha256(content).hexdigest(), licence), content


def document_of(file: PackageFile, content: bytes) -> Document | None:
    """The file as the index reads it; None if it is too short, cannot be read, or is not English."""
    suffix = _plain_name(file.path).suffix
    try:
        content = gzip.decompress(content) if file.path.endswith(".gz") else content
        with tempfile.NamedTemporaryFile(suffix=suffix) as copy:
            copy.write(content)
            copy.flush()
            document = next(read_file(Path(copy.name), f"{file.package}/{file.path}"), None)
    except (InputError, OSError, EOFError, zlib.error):
        return None
    return document if document and len(document.text) >= _MIN_CHARS and _is_english(document.text) else None


def _fields(deb: Path) -> tuple[str, str, str]:
    """Name, version and source."""
    shown = subprocess.run(["dpkg-deb", "-f", str(deb), "Package", "Version", "Source"], capture_output=True, text=True)
    fields = dict(line.split(": ", 1) for line in shown.stdout.splitlines() if ": " in line)
    if "Package" not in fields:
        raise InputError(f"{deb} is no Debian package: {shown.stderr.strip()}")
    return fields["Package"], fields["Version"], fields.get("Source", fields["Package"]).partition(" ")[0]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _licence(copyright_file: bytes) -> str:
    text = copyright_file.decode("utf-8", "replace")
    found = _FILES_ALL.search(text) or _LICENCE.search(text)
    if found and len(found[1].split()) <= _MAX_LICENCE_WORDS:
        return found[1].strip()
    named = sorted({each[1] or each[2] for each in _NAMED.finditer(text)})
    return " / ".join(named) or "see the copyright file"


def _plain_name(path: str) -> PurePosixPath:
    """Without the endings of packing and of language: "ssl.html.en" is a web page."""
    return PurePosixPath(path.removesuffix(".gz").removesuffix(".en"))


def _is_documentation(path: str) -> bool:
    return _plain_name(path).suffix.lower() in _SUFFIXES and not _LEFT_OUT.search(path.removeprefix("usr/share/doc/"))


def _is_english(text: str) -> bool:
    words = re.findall(r"[a-z]+", text[:20_000].lower())
    return sum(word in _ENGLISH for word in words) >= _LEAST_ENGLISH * max(1, len(words))


_MAX_SHIFT_CHARS = 4000
_CHECK_CHARS = 8
_NEAR, _ONE_ABSENT_IN = 20, 7
_ENOUGH = 2
"""Files are read until there are so many times the rows that are wanted."""


class Row(NamedTuple):
    """`passage` and `quote`: spans of the document's text; an empty quote: the passage does not answer. `check`: the beginning
    of the hash of the quote, or of a passage that does not answer."""

    file: PackageFile
    question: str
    kind: str
    passage: Span
    quote: Span
    check: str


class TextRow(NamedTuple):
    """A row with its texts. `quote` is a slice of `passage`, or empty. `lead`: the titles above the passage, as an encoder reads
    them before it."""

    question: str
    lead: str
    passage: str
    quote: str
    kind: str
    path: str
    licence: str


def row_of(file: PackageFile, document: Document, question: str, kind: str, passage: Span, quote: Span) -> Row:
    return Row(file, question, kind, passage, quote, _check(document.text, quote if quote[0] < quote[1] else passage))


def rule_rows(deb: Path, tool: str, limit: int) -> list[Row]:
    """The questions that rules make of a package, and questions that the passage shown does not answer: one in seven.

    At most `limit` rows, the kinds alike as far as they go. Raises: InputError.
    """
    kinds, asked, num_asked = defaultdict[str, list[Row]](list), list[tuple[Row, str]](), Counter[str]()
    for file, content in package_files(deb):
        document = document_of(file, content) if len(asked) < _ENOUGH * limit else None
        if document is None:
            continue
        for passage, found in rule_questions(document, tool, num_asked):
            span, quote = (passage.start, passage.end), (found.start, found.end)
            row = row_of(file, document, found.question, found.kind, span, quote)
            kinds[found.kind].append(row)
            asked.append((row, passage.text))
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds))))
    chosen = [row for row in rounds if row is not None][: limit - limit // _ONE_ABSENT_IN]
    return chosen + _not_answered(chosen, asked)


def _not_answered(rows: Sequence[Row], asked: Sequence[tuple[Row, str]]) -> list[Row]:
    """Every sixth row's question over a passage that is like its own and does not hold the answer."""
    places = {text: row for row, text in asked}
    texts, found = list(places), list[Row]()
    neighbours = Neighbours(texts)
    quotes = {(row.file.path, row.quote): text for row, text in asked}
    for row in rows[:: _ONE_ABSENT_IN - 1]:
        own = quotes[row.file.path, row.quote]
        near = [texts[number] for number in neighbours.nearest(row.question, _NEAR)]
        apart = [text for text in near if text != own and not may_answer(row.question, text)]
        if apart:
            text = min(apart, key=lambda each: hashlib.sha256(f"{row.question}\n{each}".encode()).digest())
            place, check = places[text], hashlib.sha256(text.encode()).hexdigest()[:_CHECK_CHARS]
            found.append(Row(place.file, row.question, UNANSWERABLE, place.passage, (0, 0), check))
    return found


def write_packed(rows: Iterable[Row], path: Path) -> int:
    """One line of JSON a file of a package, compressed; each question of a file once. Returns the number of rows."""
    files: dict[PackageFile, dict[Any, list[Any]]] = defaultdict(dict)
    for row in rows:
        key = (row.question, row.quote[0] < row.quote[1])
        files[row.file].setdefault(key, [row.question, row.kind, *row.passage, *row.quote, row.check])
    with atomic_writer(path) as out, gzip.GzipFile("", "wb", mtime=0, fileobj=out) as packed:
        for file, found in sorted(files.items()):
            content = {**file._asdict(), "rows": list(found.values())}
            line = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            packed.write(f"{line}\n".encode())
    return sum(map(len, files.values()))


def read_packed(path: Path) -> Iterator[Row]:
    """Raises: OSError."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            file = PackageFile(**{name: line[name] for name in PackageFile._fields})
            for question, kind, start, end, first, last, check in line["rows"]:
                yield Row(file, question, kind, (start, end), (first, last), check)


def restored(rows: Iterable[Row], folder: Path, lost: Counter[str] | None = None) -> Iterator[TextRow]:
    """The rows with their texts, read from the packages in `folder`, which are fetched where they are missing.

    `lost`: gets, for each package, the number of rows whose file or spans differ, or whose package cannot be had.
    Raises: InputError for a package that is refused.
    """
    lost = Counter() if lost is None else lost
    packages: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        packages[row.file.package, row.file.version][row.file.path].append(row)
    for (package, version), files in packages.items():
        found = 0
        for deb in _at_hand(package, version, folder):
            for text_row in _texts(deb, files):
                found += 1
                yield text_row
        if missing := sum(map(len, files.values())) - found:
            lost[package] = missing


def _at_hand(package: str, version: str, folder: Path) -> Iterator[Path]:
    """The package of that version, or of the archive's present one, or none."""
    check_package(package)
    for name in (f"{package}={version}", package):
        try:
            yield from debian_packages([name], folder)
            return
        except InputError:
            continue


def _texts(deb: Path, files: Mapping[str, Sequence[Row]]) -> Iterator[TextRow]:
    for file, content in package_files(deb, files):
        rows = [row for row in files[file.path] if row.file.sha256 == file.sha256]
        document = document_of(file, content) if rows else None
        if document is None:
            continue
        leads = {p.start: embedded_text(p).removesuffix(p.text) for p in chunk(document, ChunkingConfig())}
        for row in rows:
            is_answered = row.quote[0] < row.quote[1]
            shift = _shift(document.text, row.quote if is_answered else row.passage, row.check)
            if shift is not None:
                passage, quote = (document.text[start + shift : end + shift] for start, end in (row.passage, row.quote))
                if (quote or not is_answered) and quote in passage:
                    path = f"{file.package}/{file.path}"
                    lead = leads.get(row.passage[0] + shift, "")
                    yield TextRow(
                        row.question, lead, passage, quote if is_answered else "", row.kind, path, file.licence
                    )


def _check(text: str, span: Span) -> str:
    return hashlib.sha256(text[slice(*span)].encode("utf-8", "surrogatepass")).hexdigest()[:_CHECK_CHARS]


def _shift(text: str, span: Span, check: str) -> int | None:
    """By how many characters the span has moved; None if its text is not nearby."""
    for shift in (0, *(sign * far for far in range(1, _MAX_SHIFT_CHARS) for sign in (1, -1))):
        if span[0] + shift >= 0 and _check(text, (span[0] + shift, span[1] + shift)) == check:
            return shift
    return None


def tool_of(package: str) -> str:
    """The program that a documentation package is about, by its name."""
    return re.sub(r"[\d.]*-(?:docs?|handbook|manual)(?:-\w+)?$", "", package).removeprefix("python-")


_LEAST_PARTS, _LEAST_PROSE, _LEAST_CHARS = 3, 25, 350
"""Of a passage that is read: its parts, the words of its sentences, and its characters."""
_READINGS_A_FILE = 3


class Reading(NamedTuple):
    """A passage with the parts that may answer."""

    file: PackageFile
    document: Document
    passage: Passage
    parts: Sequence[Part]

    def text_of(self, part: Part) -> str:
        return self.document.text[part.start : part.end]

    def row(self, question: str, numbers: Sequence[int]) -> Row | None:
        """The row of a question that the parts of these numbers, from 1 on, answer together, or no part if there are none.

        None if there are no such parts, or an answer may not quote them as one, without text between them.
        """
        if not set(numbers) <= set(range(1, len(self.parts) + 1)):
            return None
        passage, found = (self.passage.start, self.passage.end), [self.parts[number - 1] for number in numbers]
        quote = (min(part.start for part in found), max(part.end for part in found)) if found else (0, 0)
        letters = (at for at in range(*quote) if self.document.text[at].isalnum())
        is_whole = all(any(part.start <= at < part.end for part in found) for at in letters)
        if found and not (is_whole and is_quotable(self.passage, *quote)):
            return None
        return row_of(self.file, self.document, question, WRITTEN, passage, quote)


def readings(debs: Sequence[Path]) -> Iterator[Reading]:
    """Passages that have enough to ask about, of all packages in turn, a few of each file, in an order that repeats.

    Raises: InputError for a package that is refused or damaged.
    """
    left, seen = [_readings_in(deb) for deb in debs], set[str]()
    while left:
        for package in list(left):
            if (reading := next(package, None)) is None:
                left.remove(package)
            elif reading.passage.text not in seen:
                seen.add(reading.passage.text)
                yield reading


def _readings_in(deb: Path) -> Iterator[Reading]:
    for file, content in package_files(deb):
        if document := document_of(file, content):
            mixed = sorted(
                readings_of(file, document), key=lambda each: hashlib.sha256(each.passage.text.encode()).digest()
            )
            yield from mixed[:_READINGS_A_FILE]


def readings_of(file: PackageFile, document: Document) -> Iterator[Reading]:
    """The passages, as the product cuts them, that have enough to ask about."""
    for passage in chunk(document, ChunkingConfig()):
        parts = list(quotable_parts(passage))
        prose = [part for part in parts if part.kind is not BlockKind.TABLE]
        num_words = sum(part.num_words(document.text) for part in prose)
        if len(parts) >= _LEAST_PARTS and num_words >= _LEAST_PROSE and len(passage.text) >= _LEAST_CHARS:
            yield Reading(file, document, passage, parts)
