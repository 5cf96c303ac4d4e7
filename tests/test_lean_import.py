"""The engine is a library of its own: it imports without Ray, FAISS, web servers and search.

`test_layers.py` has the quick form of this test, which reads the imports of these packages' own files.
"""

import subprocess
import sys

import pytest

ABSENT = "ray faiss fastapi starlette uvicorn tantivy sentence_transformers"
PACKAGES = "engine drafting verification numerics training"
SCRIPT = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"no module named {name}")

sys.meta_path.insert(0, Absent())
for package in sys.argv[2].split():
    parent = importlib.import_module(f"ragspec.{package}")
    for info in pkgutil.walk_packages(parent.__path__, f"ragspec.{package}."):
        if not info.name.startswith("ragspec.numerics.cuda."):  # needs Triton
            importlib.import_module(info.name)
"""


def imported(packages: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, ABSENT, packages], capture_output=True, text=True)


@pytest.mark.slow
def test_the_engine_imports_without_services() -> None:
    """Whoever carries the engine to a machine with a GPU had to install Ray, FAISS and a web server for it."""
    found = imported(PACKAGES)
    assert found.returncode == 0, found.stderr[-2000:]
