"""The pack that training on a machine without a network unpacks, its recipe, and the commands for the first hour with a GPU."""

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from infra_parts import ROOT, ran
from tiny_target import chat_tokenizer, save_model

sys.path.insert(0, str(ROOT / "infra" / "gpu"))

pack = importlib.import_module("pack")

Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, with another installed package for the weights' one, which takes a minute to pack."""
    monkeypatch.setattr(pack, "WEIGHTS_PACKAGE", "iniconfig")
    monkeypatch.setattr(pack, "MIB", 2**12)

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["pack.py", *map(str, arguments)])
        pack.main()

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file in each place that training reads, with its own path in it."""
    for name in pack.TRAINING_DATA:
        path = tmp_path / "data" / (name if "." in name else f"{name}/some.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path.relative_to(tmp_path)))
    books = tmp_path / "data" / pack.BOOKS
    books.parent.mkdir()
    rng = random.Random(0)
    books.write_text("".join(json.dumps({"text": rng.randbytes(16_000).hex(), "number": n}) + "\n" for n in range(4)))
    with zipfile.ZipFile(tmp_path / "one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one/__init__.py", "ONE = 1")
    return tmp_path / "data"


def test_what_is_unpacked_is_what_training_reads(run: Run, data: Path, tmp_path: Path) -> None:
    """A part lost or joined in another order; a book that is cut inside a line; weights that are not found again."""
    folder, out = tmp_path / "parts", tmp_path / "out"
    run("training", folder, "--data", data, "--books-mib", 10, "--part-mib", 2, "--wheels", tmp_path)
    sizes = [part.stat().st_size for part in sorted(folder.iterdir())]
    assert len(sizes) > 3 and {*sizes[:-1]} == {2**13} and sizes[-1] <= 2**13
    run("unpack", folder, out)
    for path in data.rglob("*"):
        if path.is_file() and path.name != "classic_books.jsonl":
            assert (out / path.relative_to(tmp_path)).read_text() == path.read_text()
    (book,) = map(json.loads, (out / "data/books/classic_books.jsonl").read_text().splitlines())
    assert book["number"] == 0
    script = "import importlib.metadata as m, one; print(m.distribution('iniconfig').locate_file('').name, one.ONE)"
    assert ran(sys.executable, "-S", "-c", script, env={"PYTHONPATH": str(out / "site")}).split() == ["site", "1"]


def test_the_check_names_its_parts_and_refuses_others() -> None:
    """A misspelt part that does nothing and ends with success; a help that lacks a part."""
    done = subprocess.run([ROOT / "infra" / "gpu" / "check.sh", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    parts = "tests kernels speed serve faiss bits tune train".split()
    assert all(f"check.sh {part} " in done.stderr for part in parts)


ABSENT_MODULES = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "{absent}".split():
            raise ModuleNotFoundError(f"no module named {{name}}")

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def lean(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python with the lean packages alone."""
    (tmp_path / "lean").mkdir()
    (tmp_path / "lean/sitecustomize.py").write_text(ABSENT_MODULES.format(absent=ABSENT))
    return os.environ | {"PYTHONPATH": str(tmp_path / "lean"), "PYTHON": sys.executable}


@pytest.fixture
def check(lean: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`check(part, NAME=value)` runs a part of the check in a copy of the tree, with the lean packages alone."""
    ignored = shutil.ignore_patterns("results", "__pycache__")
    for name in ("ragspec", "pipelines", "infra", "tests"):
        shutil.copytree(ROOT / name, tmp_path / "work" / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "work")

    def run(part: str, **given: object) -> subprocess.CompletedProcess[str]:
        command = ["bash", "infra/gpu/check.sh", part]
        environment = lean | {name: str(value) for name, value in given.items()}
        options = {"env": environment, "timeout": 1800, "capture_output": True, "text": True}
        return subprocess.run(command, cwd=tmp_path / "work", **options)

    return run


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", ["tests", "bits", "kernels", "serve", "tune"])
def test_a_part_gets_as_far_as_the_gpu_with_lean_packages(
    check: Callable[..., subprocess.CompletedProcess[str]], part: str
) -> None:
    """An import that a bare machine cannot make: the machine's minutes went by without a figure."""
    done = check(part)
    if part in ("tests", "bits"):
        assert done.returncode == 0 and " skipped" in done.stdout and "error" not in done.stdout, done.stdout[-3000:]
    else:
        assert done.returncode and "needs a CUDA device" in done.stdout + done.stderr, done.stderr[-3000:]


@pytest.mark.slow
def test_both_commands_train_from_a_pack_with_lean_packages(
    check: Callable[..., subprocess.CompletedProcess[str]], training_data: Path, tmp_path: Path
) -> None:
    """A data file that the pack lacks, or an import that a bare machine cannot make: the first run on a GPU ended there."""
    target = save_model("llama", tmp_path / "target", vocab_size=330, max_position_embeddings=2048)
    chat_tokenizer().save_pretrained(target)
    row = {"question": "Who?", "passage": "It was Ann.", "quote": "It was Ann."}
    row |= {"kind": "written", "path": "a", "licence": "MIT"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    options = ["--data", training_data, "--books-mib", "1", "--documentation", rows, "--model", target]
    ran(sys.executable, "infra/gpu/pack.py", "training", tmp_path / "pack", *options, cwd=ROOT, timeout=900)
    done, work = check("train", PACK=tmp_path / "pack", CHATS=20, MINUTES="0.05", ROWS=1, PROBES=0), tmp_path / "work"
    assert done.returncode == 0, done.stderr[-3000:]
    assert (work / "build/gpu/adapter/adapter/adapter_model.safetensors").exists()
    assert list((work / "build/gpu/eagle3/head").iterdir()) and list((work / "build/gpu/parts").iterdir())


ABSENT = "ray faiss fastapi starlette uvicorn tantivy sentence_transformers"
PACKAGES = "engine drafting verification numerics training"
SCRIPT = """
import importlib, pkgutil, sys
for package in sys.argv[1].split():
    parent = importlib.import_module(f"ragspec.{package}")
    for info in pkgutil.walk_packages(parent.__path__, f"ragspec.{package}."):
        if not info.name.startswith("ragspec.numerics.cuda."):  # needs Triton
            importlib.import_module(info.name)
"""


@pytest.mark.slow
def test_the_engine_imports_without_services(lean: dict[str, str]) -> None:
    """Whoever carries the engine to a machine with a GPU had to install Ray, FAISS and a web server for it."""
    ran(sys.executable, "-c", SCRIPT, PACKAGES, cwd=ROOT, env=lean)
