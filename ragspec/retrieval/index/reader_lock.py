"""Reader locks: a locked file in the index's folder keeps a generation from being removed.

For jobs that answer from one generation for hours while others write. The lock ends with the process of its holder.

    >>> with reader_lock(index_dir) as pointer:
    ...     Store.open(index_dir, pointer=pointer)
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Iterator
from pathlib import Path

from ragspec.disk import TEMPORARY
from ragspec.retrieval.index.manifest import read_generation
from ragspec.retrieval.index.pointer import read_pointer

_PREFIX = ".lease-"


@contextlib.contextmanager
def reader_lock(index_dir: Path, pointer: str = "") -> Iterator[str]:
    """Yields the pointer of the current generation, or `pointer`; no writer removes the generation's files inside the block.

    A folder that is not writable gets no lock.

    Raises: StoreMissing, StoreCorrupt.
    """
    while True:
        locked = pointer or read_pointer(index_dir)
        with _held(index_dir, locked):
            if not pointer and read_pointer(index_dir) != locked:
                continue  # a writer may have removed it before the lock was there
            read_generation(index_dir, locked)
            yield locked
            return


@contextlib.contextmanager
def _held(index_dir: Path, pointer: str) -> Iterator[None]:
    name = secrets.token_hex(8)
    building, path = index_dir / f"{TEMPORARY}{name}", index_dir / f"{_PREFIX}{name}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            while not path.exists():
                file = stack.enter_context(open(building, "x", encoding="ascii"))
                fcntl.flock(file, fcntl.LOCK_SH)
                file.write(pointer)
                file.flush()
                with contextlib.suppress(FileNotFoundError):  # a writer's clean-up took it for an unfinished file
                    building.rename(path)  # Why last: a clean-up removes lock files that are not locked
            stack.callback(path.unlink, missing_ok=True)
        yield


def locked_generations(index_dir: Path) -> Iterator[str]:
    """Pointers of the locked generations; lock files of dead holders are removed."""
    for path in index_dir.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield file.read()
            else:
                path.unlink()
