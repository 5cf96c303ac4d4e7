"""The recipe of `infra/gpu/check.sh train` on a machine that has a pack, Python and the packages of a lean import alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_data import DATA, needs_data
from test_lean_import import ABSENT
from tiny_target import chat_tokenizer, save_model

ROOT = Path(__file__).resolve().parents[2]
ABSENT_MODULES = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "{absent}".split():
            raise ModuleNotFoundError(f"no module named {{name}}")

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
@needs_data
def test_both_commands_train_from_a_pack_with_lean_packages(tmp_path: Path) -> None:
    """A data file that the pack lacks, or an import that a bare machine cannot make: the first run on a GPU ended there."""
    target = save_model("llama", tmp_path / "target", vocab_size=330, max_position_embeddings=2048)
    chat_tokenizer().save_pretrained(target)
    row = {
        "question": "Who?",
        "passage": "It was Ann.",
        "quote": "It was Ann.",
        "kind": "written",
        "path": "a",
        "licence": "MIT",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    packed = [sys.executable, "infra/gpu/pack.py", "training", tmp_path / "pack", "--data", DATA, "--books-mib", "1"]
    subprocess.run(
        [*packed, "--documentation", tmp_path / "rows.jsonl", "--model", target], cwd=ROOT, check=True, timeout=900
    )
    (tmp_path / "lean").mkdir()
    (tmp_path / "lean/sitecustomize.py").write_text(ABSENT_MODULES.format(absent=ABSENT))
    work = tmp_path / "work"
    for name in ("ragspec", "pipelines", "infra"):
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    given = {"PACK": tmp_path / "pack", "CHATS": 20, "MINUTES": "0.05", "ROWS": 1, "PYTHON": sys.executable}
    environment = (
        os.environ | {name: str(value) for name, value in given.items()} | {"PYTHONPATH": str(tmp_path / "lean")}
    )
    subprocess.run(["bash", "infra/gpu/check.sh", "train"], cwd=work, check=True, timeout=1800, env=environment)
    assert (work / "build/gpu/adapter/adapter/adapter_model.safetensors").exists()
    assert list((work / "build/gpu/eagle3/head").iterdir()) and list((work / "build/gpu/parts").iterdir())
