"""Run as a process of its own: one file becomes documents, one JSON object a line, within limits of memory and time.

    python -m services.stores.parse_file FILE NAME OUTPUT MAX_BYTES MAX_S

Why a process: what a damaged or hostile file makes a library do can be ended, and takes nothing else with it.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from ragspec.errors import InputError
from ragspec.retrieval.reading import read_file

REFUSED = 3
"""Exit status: the reason stands on standard output."""

_MEMORY_BYTES = 2 * 2**30


def main(path: str, name: str, output: str, max_bytes: int, max_s: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (max_s, max_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        write_documents(Path(path), name, Path(output), max_bytes)
    except InputError as cause:
        sys.stdout.write(str(cause))
        return REFUSED
    return 0


def write_documents(path: Path, name: str, output: Path, max_bytes: int) -> None:
    """Raises: InputError, also for more than `max_bytes` of text."""
    num_bytes = 0
    with open(output, "w", encoding="utf-8") as lines:
        for document in read_file(path, name):
            num_bytes += len(document.text.encode())
            if num_bytes > max_bytes:
                raise InputError(f"it holds more than {max_bytes} bytes of text")
            fields: dict[str, Any] = {"text": document.text, "title": document.title, "source": document.source}
            fields |= {"metadata": dict(document.metadata), "headings": document.headings}
            lines.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
