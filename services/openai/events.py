"""Server-sent events: the chunks of a streamed answer, padded so that their sizes tell little of what is in them.

What a step added depends on what was drafted, and so on the documents: who only sees the sizes of encrypted packets could tell
which. Every chunk is therefore filled up to a multiple of some bytes with a field of random letters, as OpenAI does.

    >>> chunks = Chunks({"id": "chatcmpl-1", "object": "chat.completion.chunk"}, pad_bytes=128)
    >>> chunks.event([{"index": 0, "delta": {"content": "The"}, "finish_reason": None}])
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""A comment, which no client hands on: the connection is alive."""

PAD_BYTES = 128
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SUPPLY = "".join(random.Random(secrets.randbits(64)).choices(_LETTERS, k=8192))
_FIELD = b', "obfuscation": "'
_END = b"}\n\n"


class Chunks:
    """Events of one stream: what they have in common is written once."""

    def __init__(self, head: Mapping[str, Any], pad_bytes: int = PAD_BYTES, *, with_usage: bool = False) -> None:
        """`pad_bytes` 0: not padded. `with_usage`: the last chunk tells the usage, and every other has it null."""
        self._head = b"data: " + json.dumps(head)[:-1].encode() + b', "choices": '
        self._pad_bytes = pad_bytes
        self._usage = b', "usage": null' if with_usage else b""

    def event(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        """Pure ASCII on purpose: some clients end a line at any line break of Unicode."""
        parts = [self._head, json.dumps(choices).encode()]
        if "usage" not in more:
            parts.append(self._usage)
        parts += [f', "{name}": {json.dumps(value)}'.encode() for name, value in more.items()]
        frame = b"".join(parts)
        return frame + self._padding(len(frame)) + _END

    def _padding(self, num_bytes: int) -> bytes:
        if not self._pad_bytes:
            return b""
        length = -(num_bytes + len(_FIELD) + 1 + len(_END)) % self._pad_bytes
        start = random.randrange(len(_SUPPLY))
        text = (_SUPPLY[start:] + _SUPPLY * (length // len(_SUPPLY) + 1))[:length]
        return _FIELD + text.encode() + b'"'
