"""One real encoder for all tests here, and one without weights for the tests of files."""

import shutil
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import EncoderConfig
from ragspec.core import Document
from ragspec.retrieval.encoder import Encoder


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder.load(EncoderConfig())


@pytest.fixture
def letters() -> LetterEncoder:
    return LetterEncoder()


@pytest.fixture
def index_dir(built: Path, tmp_path: Path) -> Path:
    """A copy of the index that the module's fixture `built` makes once."""
    return Path(shutil.copytree(built, tmp_path / "index"))


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return [
        Document(
            f"d{n}", f"Über fact number {n}. It is told in two sentences — 雨。", f"Title {n}", f"{n}.txt", {"n": n}
        )
        for n in range(20)
    ]
