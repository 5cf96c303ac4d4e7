"""Documentation packages of Debian to train on, and rows of questions about them.

Owns which packages may be read, and which of their files. A package whose name's SHA-256 is 0 modulo 5, or of a source that an
evaluation uses, is refused: `is_for_evaluation` and `EVALUATED_SOURCES` are the rule. A package gives its English files in
formats that the index reads. Needs dpkg-deb, and apt-get for packages that are not at hand.

A row names its file by package, version, path and hash, and holds the spans of passage and quote in the text that the index's
reader makes of the file. No text of a document is in it but the question. `restored` finds the spans again: where a reader has
changed since, it looks for the quote nearby.

A model may write questions too, each answered by one part of its passage. It reads a passage as numbered parts, and writes a
question for each of some parts. A question is kept if it names its subject, if a second sample of the model, which sees the
passage but not the number, gives the same number, and if the model then holds the part for a whole answer. So every answer is a
slice of its passage. All that is asked about a passage shares one reading.

    >>> writer = QuestionWriter(engine, PromptBuilder(engine.target.tokenizer, engine.max_context_tokens))
    >>> for reading, questions in writer.write(readings): ...
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
import tomllib
import zlib
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ragspec.config import ChunkingConfig
from ragspec.core import BlockKind, Document, Message, Passage, Request, SamplingParams
from ragspec.disk import atomic_writer
from ragspec.errors import InputError
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike
from ragspec.retrieval.chunking import Span, chunk, embedded_text
from ragspec.retrieval.reading import SUFFIXES, read_file
from ragspec.training.documentation import UNANSWERABLE, Neighbours, is_for_evaluation, may_answer, rule_questions
from ragspec.training.sentences import Part, normalise, quotable_parts

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
        key = (row.question, row.kind == UNANSWERABLE)
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


READINGS_AT_ONCE, QUESTIONS_A_READING = 8, 4
_LEAST_WORDS = 7
"""Of a part that is asked about."""
_LEAST_PARTS, _LEAST_PROSE = 3, 25
"""Parts of a passage that is read, and words of its sentences."""
_TOLD: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_QUESTION = re.compile(r"\W{0,3}(?P<question>[A-Z][^\n?]{10,160}\?)")
_VAGUE = re.compile(
    r"(?i)\b(?:this|these|those|that (?:command|option|file|value|section|method|case)|it|its|they|them|passage|text|part|above"
    r"|below|following|mentioned|described|given|example)\b"
)
_LEANS = re.compile(r"(?:He|She|It|They|This|These|That|Those|Such|Here|There|See|Note|However|Also|But|And|So|Then)\b")
"""The first word of a part that cannot stand alone."""
_LEAST_SHARED, _LEAST_NEW = 0.5, 4
"""Of a question's stems the share that its answer holds, and the stems that the answer adds."""
_COMMON = frozenset(
    "what when where which who why how does did can could shoul the for with and you your are was were has have from that this "
    "will would into not any all use used using one than then".split()
)
_SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40)
_NUMBER = SamplingParams(temperature=0.3, max_tokens=4)
_YES = SamplingParams(temperature=0.0, max_tokens=2)


class Reading(NamedTuple):
    """A passage with the parts that may answer."""

    file: PackageFile
    document: Document
    passage: Passage
    parts: Sequence[Part]

    def text_of(self, part: Part) -> str:
        return self.document.text[part.start : part.end]

    def number(self, part: Part) -> int:
        """From 1 on."""
        return self.parts.index(part) + 1

    def wish(self, part: Part) -> str:
        heading = self.passage.heading or self.passage.title
        return _TOLD["write"].format(heading=heading, number=self.number(part))

    @property
    def asked_parts(self) -> list[Part]:
        """The longest parts, in their order."""
        long = [part for part in self.parts if part.num_words(self.document.text) >= _LEAST_WORDS]
        long = [part for part in long if not _LEANS.match(self.document.text, part.start)]
        most = sorted(long, key=lambda part: part.start - part.end)[:QUESTIONS_A_READING]
        return sorted(most)


class WrittenQuestion(NamedTuple):
    question: str
    part: Part


def readings_of(file: PackageFile, document: Document) -> Iterator[Reading]:
    """The passages, as the product cuts them, that have enough to ask about."""
    for passage in chunk(document, ChunkingConfig()):
        parts = list(quotable_parts(passage))
        prose = [part for part in parts if part.kind is not BlockKind.TABLE]
        if len(parts) >= _LEAST_PARTS and sum(part.num_words(document.text) for part in prose) >= _LEAST_PROSE:
            yield Reading(file, document, passage, parts)


class QuestionWriter:
    """With equal readings and models, the questions are equal."""

    def __init__(self, engine: EngineLike, prompts: PromptBuilder) -> None:
        self._engine, self._prompts = engine, prompts

    def write(self, readings: Iterable[Reading]) -> Iterator[tuple[Reading, list[WrittenQuestion]]]:
        """Every reading with the questions that were kept. Raises: EngineError."""
        left = iter(readings)
        while some := list(islice(left, READINGS_AT_ONCE)):
            wanted = [(each, part) for each in some for part in each.asked_parts]
            texts = self._replies([(each, each.wish(part)) for each, part in wanted], _SAMPLED)
            replies = zip(wanted, texts, strict=True)
            written = [(each, WrittenQuestion(_question(text), part)) for (each, part), text in replies]
            asked = [(each, q) for each, q in written if tells_something(q.question, each.text_of(q.part))]
            found = self._replies([(each, _TOLD["find"].format(question=q.question)) for each, q in asked], _NUMBER)
            numbers = zip(asked, map(_number, found), strict=True)
            agreed = [(each, q) for (each, q), number in numbers if number == each.number(q.part)]
            wishes = [_TOLD["judge"].format(question=q.question, answer=each.text_of(q.part)) for each, q in agreed]
            judged = self._replies([(each, wish) for (each, _), wish in zip(agreed, wishes, strict=True)], _YES)
            kept = [pair for pair, text in zip(agreed, judged, strict=True) if text.strip().lower().startswith("yes")]
            for reading in some:
                yield reading, [question for each, question in kept if each is reading]

    def _replies(self, wishes: Sequence[tuple[Reading, str]], params: SamplingParams) -> list[str]:
        """Why the passage comes first: all that is asked about it shares one reading of it."""
        requests = []
        for reading, wish in wishes:
            numbered = "\n".join(f"[{n}] {reading.text_of(part)}" for n, part in enumerate(reading.parts, start=1))
            user = f"Passage:\n{numbered}\n\n{wish}"
            ids = self._prompts.tokens([Message("system", _TOLD["system"]), Message("user", user)])
            key = f"0 {reading.passage.id} {wish}"  # as the committed rows were written
            seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
            requests.append(Request(f"{seed:x}", ids, replace(params, seed=seed)))
        return [completion.text for completion in self._engine.generate(requests)] if requests else []


def _question(text: str) -> str:
    """The question of a reply; empty if it does not name its subject."""
    match = _QUESTION.match(text.strip())
    return normalise(match["question"]) if match and not _VAGUE.search(match["question"]) else ""


def tells_something(question: str, answer: str) -> bool:
    """Whether the answer speaks of the question's things, and says more of them than the question does."""
    found = (re.findall(r"[a-z\d]{3,}", text.lower()) for text in (question, answer))
    asked, told = ({word[:5] for word in words} - _COMMON for words in found)
    return bool(asked) and len(asked & told) >= _LEAST_SHARED * len(asked) and len(told - asked) >= _LEAST_NEW


def _number(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0
