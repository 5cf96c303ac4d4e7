"""The training data, read once."""

from __future__ import annotations

import pytest
from real_data import DATA

from ragspec.training.reference.sources import Sources, load_sources


@pytest.fixture(scope="session")
def sources() -> Sources:
    """The target's own, not to be changed."""
    return load_sources(DATA)
