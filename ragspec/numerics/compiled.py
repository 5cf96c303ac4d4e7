"""`numba.njit` with a disk cache that is never stale: kernels take ten seconds to compile, half a second to read.

Numba's own cache key covers the file of a function, not the files of the functions it calls. Here the key also covers every file
of the library with compiled code. If the cache cannot be written or read, functions are compiled as if there were none.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys
from numba.extending import intrinsic

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
_FILES = (
    "numerics/**/*.py",
    "verification/sampling.py",
    "drafting/acceptance.py",
    "drafting/children.py",
    "drafting/copy.py",
    "drafting/step_trees.py",
    "drafting/suffix_index.py",
    "retrieval/search/bm25.py",
    "retrieval/search/dense.py",
)


def source_hash() -> str:
    """SHA-256 over all files with compiled code."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _FILES for path in _PACKAGE.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCE_HASH = source_hash()


class _Cache(FunctionCache):
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
            try:
                super().save_overload(sig, data)
            except (AttributeError, ImportError):  # the index on disk names classes that this version lacks
                self.flush()
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


def is_first_start(function: Any) -> bool:
    """True once: for the first process on this machine that asks with this version of the compiled code. `function`: a compiled
    function, which says where code is kept."""
    folder = function._cache.cache_path  # None: nothing can be kept
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"begun-{_SOURCE_HASH[:16]}").touch(exist_ok=False)
    except (OSError, TypeError):
        return False
    return True


inner = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""As `numba.njit`, for functions that only compiled functions call: they compile in half the time."""


@inner
def assign(target: Any, values: Any) -> None:
    """In compiled code: `target[:] = values` for one axis. Why: Numba compiles that for a second, since lengths may differ."""
    for i in range(len(values)):
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
