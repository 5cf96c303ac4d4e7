"""FAISS, which comes with one of two extras and is imported when an index needs it."""

from __future__ import annotations

from typing import Any

from ragspec.errors import ConfigError


def load_faiss() -> Any:
    """The module, imported when an index needs it. Raises: ConfigError if it is not installed."""
    try:
        import faiss
    except ImportError as cause:
        raise ConfigError("this index needs FAISS: install ragspec[cpu] or ragspec[gpu]") from cause
    return faiss
