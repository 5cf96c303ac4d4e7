"""Documentation packages of Debian as documents to train on. Owns which packages may be read, and which of their files.

A package whose name's SHA-256 is 0 modulo 5, or of a source that an evaluation uses, is refused: `is_for_evaluation` and
`EVALUATED_SOURCES` are the rule. A package gives its English files in formats that the index reads. Needs dpkg-deb, and apt-get
for packages that are not at hand.

    >>> for deb in debian_packages(["apache2-doc"], Path("packages")):
    ...     files = list(package_files(deb))
"""

import gzip
import hashlib
import re
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Container, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.reading import SUFFIXES, read_file
from ragspec.training.documentation import is_for_evaluation

EVALUATED_SOURCES = ("git", "borgbackup", "debian-faq", "debian-policy")
_SUFFIXES = frozenset(SUFFIXES) & {".txt", ".md", ".rst", ".adoc", ".asciidoc", ".html", ".htm", ".xhtml"}
_LEFT_OUT = re.compile(
    r"\.(?!en)[a-z]{2}(?:[-_][a-zA-Z]+)?\.\w+(?:\.gz)?$|(?:^|/)(?:_sources|_modules|_static|po|locale|(?!en)[a-z]{2}(?:_[A-Z]{2})?)/|(?:^|/)[^/]*(?:change|news|copy|licen[cs]e|author|thank"
    r"|credit|todo|index|search|contents|toc|readme\.debian)[^/]*$",
    re.IGNORECASE,
)
_MAX_FILE_BYTES, _MIN_CHARS = 2_000_000, 1500
_ENGLISH = frozenset("the of to is and in for that this".split())
_LEAST_ENGLISH = 0.12
"""The share of the commonest words of English in its texts is a fifth."""
_FILES_ALL = re.compile(r"^Files:\s*\*\s*$.*?^License:\s*(\S[^\n]*)$", re.MULTILINE | re.DOTALL)
_LICENCE = re.compile(r"^License:\s*(\S[^\n]*)$", re.MULTILINE)
_NAMED = re.compile(
    r"common-licenses/(\S*[\w])|(Apache License|GNU Free Documentation License|MIT License|BSD|public domain)",
    re.IGNORECASE,
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
    """The files of one package that are documentation, in an order that mixes its folders, each with its content.

    `paths`: only these. Raises: InputError for a package that is refused or damaged.
    """
    name, version, source = _fields(deb)
    check_package(name, source)
    with tempfile.TemporaryFile() as whole:
        if subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=whole).returncode:
            raise InputError(f"{deb} is no Debian package")
        whole.seek(0)
        with tarfile.open(fileobj=whole) as tar:
            members = sorted((each for each in tar if each.isfile()), key=lambda each: _mixing(each.name))
            licence = next((_licence(_content(tar, each)) for each in members if each.name.endswith("/copyright")), "")
            for member in members:
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


def _mixing(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _licence(copyright_file: bytes) -> str:
    text = copyright_file.decode("utf-8", "replace")
    if found := _FILES_ALL.search(text) or _LICENCE.search(text):
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
