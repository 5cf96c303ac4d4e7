"""Where the training data lies, the mark of tests that read it, and the beginnings of its files."""

import json
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the training data is not beside the checkout")
MAX_BYTES, NUM_PAGES, NUM_PARAGRAPHS = 200_000, 60, 2


def beginnings(data: Path, out: Path) -> Path:
    """Writes the first rows and pages of the data that training reads: reading all of it takes each process half a minute."""
    pages = sorted((data / "docs").rglob("*.rst"))[:NUM_PAGES]
    for path in (*pages, *data.rglob("*.json"), *data.rglob("*.jsonl")):
        part, content = out / path.relative_to(data), path.read_bytes()
        if path.parent.name == "squad":
            squad = json.loads(content)
            for article in squad["data"]:
                del article["paragraphs"][NUM_PARAGRAPHS:]
            content = json.dumps(squad).encode()
        elif path.suffix == ".jsonl" and path.stem != "corpus":
            content = content[:MAX_BYTES].rpartition(b"\n")[0] + b"\n"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
    return out
