"""The digest of a target's files. Imports nothing heavy: batch jobs use it without torch.

>>> files_digest(Path("SmolLM2-135M"), "float32")
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_STATES = ("config.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges*", "special_tokens*")
"""Files that decide a target's hidden states and tokens."""
_TEXTS = ("chat_template*", "generation_config.json")
"""Files that also decide prompts and where texts end."""


def files_digest(folder: Path, dtype: str, *, of_texts: bool = False) -> str:
    """SHA-256, hexadecimal, of the files and the dtype. Equal digests give equal hidden states; with `of_texts` equal texts.

    Raises: OSError.
    """
    patterns = _STATES + _TEXTS if of_texts else _STATES
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)}, key=lambda path: path.name)
    digest = hashlib.sha256(json.dumps([dtype, [path.name for path in paths]]).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
