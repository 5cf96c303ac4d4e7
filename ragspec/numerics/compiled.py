"""`numba.njit` with a disk cache that is never stale: kernels take ten seconds to compile, half a second to read.

Numba's own cache key covers the file of a function, not the files of the functions it calls. Here the key also covers every file
of the library with compiled code. Numba's files have numbers that an index gives out, so of two processes that write at once the
one could read the other's code; here a file is named by its key and holds it. If the cache cannot be written or read, functions
are compiled as if there were none.
"""

import glob
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.runtime import rtsys
from numba.extending import intrinsic

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_FILES = """
    numerics/**/*.py verification/sampling.py drafting/acceptance.py drafting/children.py drafting/copy.py
    drafting/step_trees.py drafting/suffix_index.py retrieval/search/bm25.py retrieval/search/dense.py
""".split()


def source_hash() -> str:
    """SHA-256 over all files with compiled code."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _FILES for path in _PACKAGE.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCE_HASH = source_hash()
_VERSION = _SOURCE_HASH[:12]


class _CodeFiles(IndexDataCacheFile):
    """A file for each key, without an index. Writing is atomic, and removes other versions' files of the function."""

    def save(self, key: Any, data: Any) -> None:
        for path in {*self.kept("*")} - {*self.kept(_VERSION)}:
            path.unlink(missing_ok=True)
        self._save_data(self._name(key), (key, data))

    def load(self, key: Any) -> Any:
        try:
            kept_key, data = self._load_data(self._name(key))
        except FileNotFoundError:
            return None
        return data if kept_key == key else None

    def kept(self, version: str) -> list[Path]:
        """The files of one version's code of the function."""
        base = glob.escape(self._index_name.removesuffix(".nbi"))
        return [*Path(self._cache_path).glob(f"{base}.{version}-*.nbc")]

    def _name(self, key: Any) -> str:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return f"{self._index_name.removesuffix('.nbi')}.{_VERSION}-{digest}.nbc"


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file: Any = _CodeFiles(self._cache_path, self._impl.filename_base, None)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _SOURCE_HASH)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """As numba's, without the imports that only compiling needs, and makes itself: most of the time of a read."""
        try:
            rtsys.initialize(target_context)  # memory and exceptions of compiled code
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        except Exception as cause:  # a damaged file may raise anything
            log.warning("compiled code on disk cannot be read and is made anew: %s", cause)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as cause:
            log.warning("compiled code cannot be kept on disk: %s", cause)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.njit(**options)`, for functions that Python calls; the functions they call are cached with them."""

    def compile_and_keep(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError as cause:  # no folder to write into
            log.info("compiled code is not kept on disk: %s", cause)
        return dispatcher

    return compile_and_keep


def is_kept(function: Any) -> bool:
    """Whether this version's code of a compiled function is on disk, for whatever arguments."""
    return not isinstance(function._cache, _Cache) or bool(function._cache._cache_file.kept(_VERSION))


inner = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""As `numba.njit`, for functions that only compiled functions call: they compile in half the time."""


@inner
def assign(target: Any, values: Any) -> None:
    """In compiled code: `target[:] = values`, which Numba compiles for a second, for one axis of equal lengths."""
    for i in range(min(len(target), len(values))):
        target[i] = values[i]


def address_of(array: Any) -> int:
    """Where a contiguous array begins in memory. It stays there while the array lives."""
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


@intrinsic
def _pointer(_: Any, address: Any) -> Any:
    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return numba.types.voidptr(address), convert


@inner
def array_at(address: int, shape: Any, dtype: Any) -> Any:
    """In compiled code: the array that `address_of` found, so that one call reads arrays of many owners."""
    return numba.carray(_pointer(address), shape, dtype)
