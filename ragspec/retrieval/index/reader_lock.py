"""A reader's word that it still needs a generation: a locked file in the index's folder, which no clean-up overlooks.

For jobs that must answer from one generation for hours while others write. The lock dies with its holder.

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
from ragspec.retrieval.index.manifest import read_generation, read_pointer

_PREFIX = ".lease-"


@contextlib.contextmanager
def reader_lock(index_dir: Path, pointer: str = "") -> Iterator[str]:
    """The pointer of the current generation, or of the one that `pointer` names; inside, its files stay. In a folder that cannot
    be written to, it is only named.

    Raises: StoreMissing, StoreCorrupt.
    """
    while True:
        wanted = pointer or read_pointer(index_dir)
        with _held(index_dir, wanted):
            if not pointer and read_pointer(index_dir) != wanted:  # it may have been removed before the lock was there
                continue
            read_generation(index_dir, wanted)
            yield wanted
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
                with contextlib.suppress(FileNotFoundError):  # a writer's clean-up took it for something left behind
                    building.rename(path)  # Why last: a clean-up removes leases that are not locked
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
