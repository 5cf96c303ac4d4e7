"""SHA-256 of a target's files, which names what the cache keeps of them, and how long unused files stay there.

Imports nothing heavy: batch jobs use it without torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

MAX_UNUSED_DAYS = 30

STATE_FILES = ("config.json", "*.safetensors", "*.bin", "tokenizer*", "vocab*", "merges*", "special_tokens*")
"""Files that decide a target's hidden states and tokens."""
TEXT_FILES = ("chat_template*", "generation_config.json")
"""Files that also decide prompts and where texts end."""


def files_digest(folder: Path, dtype: str, *, of_texts: bool = False) -> str:
    """SHA-256, hexadecimal, of the files and the dtype. Equal digests give equal hidden states; with `of_texts` equal texts.

    Raises: OSError.
    """
    patterns = STATE_FILES + TEXT_FILES if of_texts else STATE_FILES
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)}, key=lambda path: path.name)
    digest = hashlib.sha256(json.dumps([dtype, [path.name for path in paths]]).encode())
    for path in paths:
        digest.update(bytes.fromhex(file_digest(path)))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal. Raises: OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_unused(path: Path) -> bool:
    """Whether nobody used a cached file or folder for `MAX_UNUSED_DAYS`. Raises: OSError."""
    return time.time() - path.stat().st_mtime > MAX_UNUSED_DAYS * 86_400
