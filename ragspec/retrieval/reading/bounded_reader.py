"""Reads files in a process with limits of memory and time, so that a damaged or hostile file cannot take its caller down.

The process reads one file after another and writes the documents as JSON lines. A file that breaks a limit ends the process;
the next file gets a new one.

    >>> with BoundedReader() as reader:
    ...     list(reader.documents(Path("manual.pdf"), "manual.pdf", unread=[]))
"""

from __future__ import annotations

import json
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from ragspec.core import Document, Heading, blocks_of
from ragspec.errors import InputError
from ragspec.retrieval.reading.file_reader import read_file
from ragspec.retrieval.reading.formats import format_of, has_rows
from ragspec.retrieval.reading.parsed_file import Unread
from ragspec.retrieval.reading.pdf_page import DrawnPage, draw_page

_FIELDS = ("id", "text", "title", "source", "owner", "metadata", "headings", "blocks")


class ReadLimits(NamedTuple):
    """Of one file. `max_documents`: rows. `timeout_s`: wall-clock time; processor time is limited to half of it."""

    max_text_bytes: int = 64 * 2**20
    max_documents: int = 100_000
    timeout_s: float = 120.0
    memory_bytes: int = 2 * 2**30


class BoundedReader:
    """Owns the process, which starts with the first file. Call from one thread."""

    def __init__(self, limits: ReadLimits | None = None) -> None:
        self._limits = limits or ReadLimits()
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def documents(self, path: Path, name: str, unread: list[Unread]) -> Iterator[Document]:
        """As `read_file`, which reads plain text and rows in this process. Raises: InputError, also for a broken limit."""
        if format_of(path).is_safe or has_rows(path):
            yield from read_file(path, name, unread)
            return
        with tempfile.NamedTemporaryFile(prefix="ragspec-read-", suffix=".jsonl") as output:
            unread += self.write(path, name, Path(output.name))
            for line in output:
                fields = json.loads(line)
                headings, blocks = tuple(Heading(*each) for each in fields["headings"]), blocks_of(fields["blocks"])
                yield Document(**fields | {"headings": headings, "blocks": blocks})

    def write(self, path: Path, name: str, output: Path) -> list[Unread]:
        """Writes the file's documents to `output`, one JSON object a line. Returns the parts that were not read.

        Raises: InputError.
        """
        return [Unread(*each) for each in self._ask(path, name, output)]

    def draw_page(self, path: Path, number: int, quote: str, before: str) -> tuple[bytes, DrawnPage]:
        """A page of a PDF as PNG, and what `pdf_page.draw_page` found on it. Raises: InputError."""
        with tempfile.NamedTemporaryFile(prefix="ragspec-page-", suffix=".png") as output:
            found = DrawnPage(*self._ask(path, path.name, Path(output.name), number, quote, before))
            return output.read(), found

    def _ask(self, path: Path, name: str, output: Path, *page: int | str) -> Any:
        child = self._child = self._child or subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[3],
        )
        assert child.stdin and child.stdout
        request = [str(path.absolute()), name, str(output.absolute()), page, self._limits]
        answer = b""
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            if not select.select([child.stdout], [], [], self._limits.timeout_s)[0]:
                raise InputError(f"{path} cannot be read: reading it took longer than {self._limits.timeout_s:g} s")
            answer = child.stdout.readline()
        except BrokenPipeError:
            pass  # as an empty answer
        finally:
            if not answer:
                self.__exit__()
        if not answer:
            raise InputError(f"{path} cannot be read: reading it took too much memory or time, or crashed the parser")
        found = json.loads(answer)
        if isinstance(found, str):
            raise InputError(found)
        return found


def write_documents(path: Path, name: str, output: Path, limits: ReadLimits) -> list[Unread]:
    """As `BoundedReader.write`, in this process. Raises: InputError, also for more text or rows than allowed."""
    num_bytes, unread = 0, list[Unread]()
    with open(output, "w", encoding="utf-8") as lines:
        for number, document in enumerate(read_file(path, name, unread), 1):
            num_bytes += len(document.text.encode())
            if num_bytes > limits.max_text_bytes:
                raise InputError(f"{path} holds more than {limits.max_text_bytes} bytes of text")
            if number > limits.max_documents:
                raise InputError(f"{path} holds more than {limits.max_documents} rows: split it")
            lines.write(json.dumps({field: getattr(document, field) for field in _FIELDS}) + "\n")
    return unread


def main() -> None:
    """Answers each request, a JSON list in a line, by a line: the result, or the reason of a refusal."""
    for line in sys.stdin:
        path, name, output, page, numbers = json.loads(line)
        limits = ReadLimits(*numbers)
        used = resource.getrusage(resource.RUSAGE_SELF)
        end_s = int(used.ru_utime + used.ru_stime + limits.timeout_s / 2) + 1
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        answer: Any
        try:
            if page:
                number, quote, before = page
                answer = draw_page(Path(path), number, quote, before, Path(output))
            else:
                answer = write_documents(Path(path), name, Path(output), limits)
        except InputError as cause:
            answer = str(cause)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
