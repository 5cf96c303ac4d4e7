"""What tests of the infrastructure share: a wheel of this checkout, and a virtual environment that has it and no checkout."""

import shutil
import site
import sys
import venv
from pathlib import Path

import pytest
from infra_parts import ROOT, ran
from letter_encoder import LetterEncoder
from service_parts import CONTEXT, DOCUMENTS, save_parts
from tiny_target import save_model

from ragspec.retrieval.retriever import build_index

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ragspec", "services", "pipelines", "infra")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for a folder `build` of before would put deleted modules into it."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
    (source := folder / "source").mkdir()
    for path in map(ROOT.joinpath, SOURCES):
        if path.is_dir():
            shutil.copytree(path, source / path.name, ignore=ignored)
        else:
            shutil.copy(path, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    ran(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, source)
    (built,) = folder.glob("ragspec-*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. A path file lends it the dependencies installed here, so that no network is needed.

    Python does not read the path files of a folder that a path file names, so an editable installation there is not seen.
    """
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python")
    ran(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", "--quiet", wheel)
    return folder


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and index of a small service."""
    model = save_model("llama", tmp_path_factory.mktemp("target"), max_position_embeddings=CONTEXT)
    return save_parts(tmp_path_factory.mktemp("parts"), model)


@pytest.fixture
def letter_index(tmp_path: Path) -> Path:
    """An index of `DOCUMENTS`."""
    build_index(DOCUMENTS, tmp_path / "letters", LetterEncoder())
    return tmp_path / "letters"
