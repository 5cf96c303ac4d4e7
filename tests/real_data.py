"""Where the training data lies, the mark of tests that read it, and the beginnings of its files."""

import shutil
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the training data is not beside the checkout")
WHOLE = ("squad", "squad_open", "canard", "pie_errorify", "gpteacher")
IN_ROWS = ("qa_more", "gec_more", "openstax", "books", "sgd")
MAX_BYTES, NUM_PAGES = 1_500_000, 60


def beginnings(data: Path, out: Path) -> Path:
    """Writes the first rows and pages of the data that training reads: reading all of it takes each process half a minute."""
    for folder in WHOLE:
        shutil.copytree(data / folder, out / folder, copy_function=shutil.copyfile)
    for folder in IN_ROWS:
        (out / folder).mkdir()
        for path in (data / folder).glob("*.jsonl"):
            with path.open("rb") as rows:
                (out / folder / path.name).write_bytes(rows.read(MAX_BYTES).rpartition(b"\n")[0] + b"\n")
    for path in sorted((data / "docs").rglob("*.rst"))[:NUM_PAGES]:
        page = out / path.relative_to(data)
        page.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, page)
    return out
