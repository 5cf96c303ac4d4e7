"""The training data, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.training.target_sources import Sources, load_sources

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def sources() -> Sources:
    """The target's own, not to be changed."""
    return load_sources(DATA)
