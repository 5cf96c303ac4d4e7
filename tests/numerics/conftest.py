"""The tiny targets of this folder's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny_target import tiny_target

from ragspec.engine.target import Target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Target]:
    """`tiny(kind, dtype)`: a target with a fresh pool."""
    folder = tmp_path_factory.mktemp("targets")
    return lambda kind="llama", dtype="float32": tiny_target(kind, dtype, folder)
