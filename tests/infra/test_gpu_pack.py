"""The pack that training on a machine without a network unpacks, and the commands for the first hour with a GPU."""

import importlib
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    ran = subprocess.run(
        [sys.executable, "-S", "-c", script], env={"PYTHONPATH": str(out / "site")}, capture_output=True
    )
    assert ran.stdout.split() == [b"site", b"1"]


def test_the_check_names_its_parts_and_refuses_others() -> None:
    """A misspelt part that does nothing and ends with success; a help that lacks a part."""
    done = subprocess.run([ROOT / "infra" / "gpu" / "check.sh", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert all(f"check.sh {part} " in done.stderr for part in ("tests", "kernels", "speed", "train"))
