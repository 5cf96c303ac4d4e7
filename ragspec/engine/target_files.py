"""A target's files as one hash: equal ones give equal texts on machines of equal numerics. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_HASHED = (
    "config.json",
    "*.safetensors",
    "*.bin",
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens*",
    "chat_template*",
)
"""The files that decide what a target computes, and which tokens that belongs to."""


def files_digest(folder: Path, dtype: str) -> str:
    """SHA-256, hexadecimal, of the files and of the precision they are used in. Raises: OSError."""
    paths = sorted({path for pattern in _HASHED for path in folder.glob(pattern)}, key=lambda path: path.name)
    digest = hashlib.sha256(json.dumps([dtype, [path.name for path in paths]]).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
