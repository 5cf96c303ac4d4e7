"""Memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def return_freed() -> None:
    """Return freed memory to the system, which the C library may keep for good after large temporary tensors."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
