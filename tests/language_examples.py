"""Texts with what is to become of each, by the test that reads them."""

import json
from pathlib import Path

EXAMPLES = json.loads((Path(__file__).parent / "rag/examples.json").read_text(encoding="utf-8"))
