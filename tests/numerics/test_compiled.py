"""Machine code kept between processes: found again, never stale, never in the way."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from numba.core.caching import FunctionCache

from ragspec.numerics import compiled
from ragspec.numerics.noise import output_key
from ragspec.numerics.threads import num_processors

PROGRAM = """
from ragspec.numerics import noise
key = noise.output_key(7, 0, 3)
print(sum(noise._key.stats.cache_hits.values()), key)
"""

BESIDE = """
import runpy
from numba.core import event
from ragspec.engine.loading import compile_beside
compile_beside().join()
with event.install_listener("numba:compile", event.RecordingListener()) as found:
    runpy.run_module("ragspec.evaluation.stub_device", run_name="__main__")
print(len(found.buffer))
"""


def run(cache: Path, code: str = PROGRAM, root: Path | None = None) -> tuple[int, list[str]]:
    """(functions read from disk, the numbers) of a fresh process."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)} | ({"PYTHONPATH": str(root)} if root else {})
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, cwd=root
    )
    num_read, *numbers = done.stdout.split()
    return int(num_read), numbers


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one process has left its machine code."""
    cache = tmp_path_factory.mktemp("code") / "cache"
    assert run(cache) == (0, expected())
    return cache


def expected() -> list[str]:
    return [str(output_key(7, 0, 3))]


@pytest.mark.slow
def test_a_second_process_reads_what_the_first_compiled(kept: Path) -> None:
    assert run(kept) == (1, expected())


@pytest.mark.slow
@pytest.mark.skipif(num_processors() == 1, reason="needs a second processor")
def test_what_the_process_beside_a_start_compiles_is_not_compiled_again(tmp_path: Path) -> None:
    assert run(tmp_path, BESIDE) == (0, [])


@pytest.mark.slow
def test_damaged_files_are_compiled_over(kept: Path, tmp_path: Path) -> None:
    """A process that died while writing, or a full disk, broke every later start."""
    cache = tmp_path / "cache"
    shutil.copytree(kept, cache)
    files = [path for path in cache.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run(cache) == (0, expected())


@pytest.mark.slow
def test_code_of_other_arguments_is_never_read(kept: Path, tmp_path: Path) -> None:
    """Two processes that compiled one function at once could each read the other's code: Numba numbers files by an index."""
    cache = tmp_path / "cache"
    shutil.copytree(kept, cache)
    (path,) = cache.rglob("*_key*.nbc")
    _, code = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(("another key", code)))
    assert run(cache) == (0, expected())
    assert run(cache) == (1, expected())


def twice(x: int) -> int:
    return 2 * x


def test_nowhere_to_write_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that may not be written to, and no home."""
    monkeypatch.setattr(compiled, "_Cache", Mock(side_effect=RuntimeError("no locator available")))
    assert compiled.compiled()(twice)(21) == 42


def test_a_full_disk_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    full = OSError(errno.ENOSPC, "no space left on device")
    monkeypatch.setattr(FunctionCache, "save_overload", Mock(side_effect=full))
    assert compiled.compiled()(twice)(21) == 42
    assert "no space left" in caplog.text


@pytest.mark.slow
def test_code_of_another_version_is_not_used(tmp_path: Path) -> None:
    """The noise changed in a file that the kept function calls, and old noise was drawn for the same seed."""
    root = tmp_path / "install"
    shutil.copytree(
        Path(compiled.__file__).parents[1], root / "ragspec", ignore=shutil.ignore_patterns("__pycache__", "assets")
    )
    cache = tmp_path / "cache"
    assert run(cache, root=root)[0] == 0
    assert run(cache, root=root)[0] == 1
    other = root / "ragspec/numerics/cpu/phases.py"
    other.write_text(other.read_text() + "\n# another version\n")
    assert run(cache, root=root)[0] == 0


def test_every_compiled_file_is_part_of_the_key() -> None:
    """A file with compiled code that the hash leaves out."""
    package = Path(compiled.__file__).parents[1]
    hashed = {path for pattern in compiled._FILES for path in package.glob(pattern)}
    with_code = {
        path for path in package.rglob("*.py") if "njit" in path.read_text() or "@compiled" in path.read_text()
    }
    assert with_code
    assert with_code <= hashed
