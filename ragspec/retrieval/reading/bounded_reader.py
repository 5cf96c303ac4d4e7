"""Reads files in a process with limits of memory and time, so that a damaged or hostile file cannot take its caller down.

The process reads one file after another and writes the documents as JSON lines. A file that breaks a limit ends the process;
the next file gets a new one. The process reads expected files while its caller works on those before.

    >>> with BoundedReader() as reader:
    ...     list(reader.documents(Path("manual.pdf"), "manual.pdf", unread=[]))
"""

import contextlib
import itertools
import json
import resource
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from ragspec.core import Document, Heading, blocks_of
from ragspec.errors import ConfigError, InputError
from ragspec.retrieval.reading.file_reader import read_file
from ragspec.retrieval.reading.formats import format_of, has_rows
from ragspec.retrieval.reading.parsed_file import Unread
from ragspec.retrieval.reading.pdf_page import DrawnPage, draw_page

_FIELDS = ("id", "text", "title", "source", "owner", "metadata", "headings", "blocks")
_FILES_AHEAD, _BYTES_AHEAD = 8, 2**20
"""So many files are read ahead, none of more bytes."""
_OCR = "ocrmypdf"


class ReadLimits(NamedTuple):
    """Of one file. `max_documents`: rows. `timeout_s`: wall-clock time; processor time is limited to half of it."""

    max_text_bytes: int = 64 * 2**20
    max_documents: int = 100_000
    timeout_s: float = 120.0
    memory_bytes: int = 2 * 2**30


class _Answer(NamedTuple):
    """`reason`: of a refusal, or empty. `page`: a drawn page."""

    reason: str
    unread: list[Unread]
    page: DrawnPage | None = None


class BoundedReader:
    """Owns the process, which starts with the first file. Call from one thread.

    With `ocr`, the program ocrmypdf reads the pages of a PDF that hold no text.
    """

    def __init__(self, limits: ReadLimits | None = None, ocr: bool = False) -> None:
        self._limits, self._ocr = limits or ReadLimits(), ocr
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, bytes] = {}  # requests without an answer, in order
        self._answers: dict[int, _Answer] = {}
        self._numbers = itertools.count()
        self._expected: Iterator[tuple[Path, str]] = iter(())
        self._ahead: dict[tuple[Path, str], tuple[int, tuple[int, int]]] = {}  # number, and the file's state when sent

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="ragspec-read-")
        return self

    def __exit__(self, *_: object) -> None:
        self._end_child()
        self._folder.cleanup()

    def expect(self, files: Iterable[tuple[Path, str]]) -> None:
        """The files that `documents` is asked for from now on, in this order."""
        self._expected = (each for each in files if _is_parsed(each[0]))

    def documents(self, path: Path, name: str, unread: list[Unread]) -> Iterator[Document]:
        """As `read_file`, which reads plain text and rows in this process. Raises: InputError, also for a broken limit."""
        if not _is_parsed(path):
            yield from read_file(path, name, unread)
            return
        number, state = self._ahead.pop((path, name), (-1, None))
        if state is None or state != _state(path):
            number = self._send(path, name)
        self._send_ahead((path, name))
        output = self._output(number)
        try:
            unread += self._parts(path, name, number)
            with open(output, encoding="utf-8") as lines:
                yield from map(document_of, lines)
        finally:
            output.unlink(missing_ok=True)

    def write(self, path: Path, name: str, output: Path) -> list[Unread]:
        """Writes the file's documents to `output`, one JSON object a line. Returns the parts that were not read.

        Raises: InputError.
        """
        return _accepted(self._answer(self._send(path, name, output))).unread

    def draw_page(self, path: Path, number: int, quote: str, before: str) -> tuple[bytes, DrawnPage]:
        """A page of a PDF as PNG, and what `pdf_page.draw_page` found on it. Raises: InputError."""
        sent = self._send(path, path.name, None, number, quote, before)
        page = _accepted(self._answer(sent)).page
        assert page is not None
        return self._output(sent).read_bytes(), page

    def _parts(self, path: Path, name: str, number: int) -> list[Unread]:
        """What was not read of a file that was sent. Raises: InputError."""
        answer = self._answer(number)
        if self._ocr and (pages := [part.page for part in answer.unread if part.page]):
            with _recognised(path, pages, self._limits.timeout_s) as copy:
                answer = self._answer(self._send(copy, name, self._output(number)))
                answer = answer._replace(reason=answer.reason.replace(str(copy), str(path)))
        return _accepted(answer).unread

    def _output(self, number: int) -> Path:
        return Path(self._folder.name) / str(number)

    def _send_ahead(self, current: tuple[Path, str]) -> None:
        for file in itertools.islice(self._expected, _FILES_AHEAD - len(self._ahead)):
            state = _state(file[0])
            if file != current and state is not None and state[0] <= _BYTES_AHEAD:
                self._ahead[file] = self._send(*file), state

    def _send(self, path: Path, name: str, output: Path | None = None, *page: int | str) -> int:
        """Returns the number of the request."""
        number = next(self._numbers)
        request = [number, str(path.absolute()), name, str((output or self._output(number)).absolute()), page]
        self._waiting[number] = json.dumps([*request, self._limits]).encode() + b"\n"
        if self._child is not None:
            self._write(self._child, self._waiting[number])
        return number

    def _answer(self, number: int) -> _Answer:
        while number not in self._answers:
            child = self._child = self._child or self._started()
            assert child.stdout
            line, reason = b"", "reading it took too much memory or time, or crashed the parser"
            answered = select.poll()  # Why not `select`: it takes no file descriptor above 1,023
            answered.register(child.stdout, select.POLLIN)
            if answered.poll(1000 * self._limits.timeout_s):
                line = child.stdout.readline()
            else:
                reason = f"reading it took longer than {self._limits.timeout_s:g} s"
            first = next(iter(self._waiting))  # the process answers in order
            if line:
                _, refusal, parts, page = json.loads(line)
                unread = [Unread(*part) for part in parts]
                self._answers[first] = _Answer(refusal, unread, DrawnPage(*page) if page else None)
            else:
                self._end_child()
                path = json.loads(self._waiting[first])[1]
                self._answers[first] = _Answer(f"{path} cannot be read: {reason}", [])
            del self._waiting[first]
        return self._answers.pop(number)

    def _started(self) -> subprocess.Popen[bytes]:
        """Why no buffer: `poll` does not see lines in it."""
        command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
        folder = Path(__file__).parents[3]
        child = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=folder)
        self._write(child, b"".join(self._waiting.values()))
        return child

    def _write(self, child: subprocess.Popen[bytes], requests: bytes) -> None:
        assert child.stdin
        with contextlib.suppress(BrokenPipeError):  # `_answer` sees that the process has ended
            child.stdin.write(requests)

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def _is_parsed(path: Path) -> bool:
    return not (format_of(path).is_safe or has_rows(path))


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change; None if there is no file."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    return None


def _accepted(answer: _Answer) -> _Answer:
    """Raises: InputError for a refusal."""
    if answer.reason:
        raise InputError(answer.reason)
    return answer


def document_of(line: str) -> Document:
    """A document that `BoundedReader.write` wrote."""
    fields = json.loads(line)
    headings, blocks = tuple(Heading(*each) for each in fields["headings"]), blocks_of(fields["blocks"])
    return Document(**fields | {"headings": headings, "blocks": blocks})


def check_ocr() -> None:
    """Raises: ConfigError if the program is not installed."""
    if shutil.which(_OCR) is None:
        raise ConfigError(f"--ocr needs the program {_OCR}, which is not installed: `apt install {_OCR}`")


@contextlib.contextmanager
def _recognised(path: Path, pages: Sequence[int], timeout_s: float) -> Iterator[Path]:
    """A copy of a PDF, with text on these pages. Raises: InputError."""
    with tempfile.TemporaryDirectory(prefix="ragspec-ocr-") as folder:
        copy = Path(folder) / path.name
        options = ["--quiet", "--force-ocr", "--output-type", "pdf", "--optimize", "0", "--jobs", "1"]
        command = [_OCR, *options, "--pages", ",".join(map(str, pages)), str(path.absolute()), str(copy)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=timeout_s)
        except (OSError, subprocess.SubprocessError) as cause:
            raise InputError(f"{path} cannot be read: {_OCR} failed on its pages without text ({cause})") from cause
        yield copy


def write_documents(path: Path, name: str, output: Path, limits: ReadLimits, unread: list[Unread]) -> None:
    """As `BoundedReader.write`, in this process. Raises: InputError, also for more text or rows than allowed."""
    num_bytes = 0
    with open(output, "w", encoding="utf-8") as lines:
        for number, document in enumerate(read_file(path, name, unread), 1):
            num_bytes += len(document.text.encode())
            if num_bytes > limits.max_text_bytes:
                raise InputError(f"{path} holds more than {limits.max_text_bytes} bytes of text")
            if number > limits.max_documents:
                raise InputError(f"{path} holds more than {limits.max_documents} rows: split it")
            lines.write(json.dumps({field: getattr(document, field) for field in _FIELDS}) + "\n")


def main() -> None:
    """Answers each request, a JSON list in a line, by a line: number, reason of a refusal, unread parts, drawn page."""
    for line in sys.stdin:
        sent, path, name, output, page, numbers = json.loads(line)
        limits, unread, reason, drawn = ReadLimits(*numbers), list[Unread](), "", None
        used = resource.getrusage(resource.RUSAGE_SELF)
        end_s = int(used.ru_utime + used.ru_stime + limits.timeout_s / 2) + 1
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            if page:
                number, quote, before = page
                drawn = draw_page(Path(path), number, quote, before, Path(output))
            else:
                write_documents(Path(path), name, Path(output), limits, unread)
        except InputError as cause:
            reason = str(cause)
        sys.stdout.write(json.dumps([sent, reason, unread, drawn]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
