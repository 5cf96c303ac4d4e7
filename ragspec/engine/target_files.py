"""A target's files as one hash. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_STATES = ("config.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges*", "special_tokens*")
"""The files that decide what a target's states are, and which tokens they belong to."""
_TEXTS = ("chat_template*", "generation_config.json")
"""Those that, beside them, decide what it is asked and where its texts end."""


def files_digest(folder: Path, dtype: str, *, of_texts: bool = False) -> str:
    """SHA-256, hexadecimal, of the files and of the precision they are used in: where it is equal, states are, or also texts.

    Raises: OSError.
    """
    patterns = _STATES + _TEXTS if of_texts else _STATES
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)}, key=lambda path: path.name)
    digest = hashlib.sha256(json.dumps([dtype, [path.name for path in paths]]).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
