"""Questions about packages' documentation as rows: spans and hashes that are kept, and their texts, which the packages give back.

A row names its file by package, version, path and hash, and holds the spans of passage and quote in the text that the index's
reader makes of the file. No text of a document is in it but the question. `restored` finds the spans again: where a reader has
changed since, it looks for the quote nearby.

    >>> write_packed(rows, Path("rows.jsonl.gz"))
    >>> for text in restored(read_packed(Path("rows.jsonl.gz")), Path("packages")): ...
"""

import gzip
import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.disk import atomic_writer
from ragspec.retrieval.chunking import Span, chunk, embedded_text
from ragspec.training.documentation import UNANSWERABLE, Neighbours, may_answer, rule_questions
from ragspec.training.packages import PackageFile, debian_packages, document_of, package_files

WRITTEN = "written"
"""The kind of questions that a model wrote; the others are those of the rules."""
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
        for passage, found in rule_questions(document, tool, num_asked) if document else ():
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
        files[row.file].setdefault(
            (row.question, row.kind == UNANSWERABLE), [row.question, row.kind, *row.passage, *row.quote, row.check]
        )
    with atomic_writer(path) as out, gzip.GzipFile("", "wb", mtime=0, fileobj=out) as packed:
        for file, found in sorted(files.items()):
            line = json.dumps(
                {**file._asdict(), "rows": list(found.values())}, ensure_ascii=False, separators=(",", ":")
            )
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

    `lost`: gets, for each package, the number of rows whose file or spans differ. Raises: InputError.
    """
    lost = Counter() if lost is None else lost
    packages: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        packages[row.file.package, row.file.version][row.file.path].append(row)
    for (package, version), files in packages.items():
        (deb,) = debian_packages([f"{package}={version}"], folder)
        found = 0
        for text_row in _texts(deb, files):
            found += 1
            yield text_row
        if missing := sum(map(len, files.values())) - found:
            lost[package] = missing


def _texts(deb: Path, files: Mapping[str, Sequence[Row]]) -> Iterator[TextRow]:
    for file, content in package_files(deb, files):
        rows = [row for row in files[file.path] if row.file.sha256 == file.sha256]
        document = document_of(file, content) if rows else None
        leads = (
            {p.start: embedded_text(p).removesuffix(p.text) for p in chunk(document, ChunkingConfig())}
            if document
            else {}
        )
        for row in rows if document else ():
            assert document is not None
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
