"""Conversations of two turns that do not fit into the KV pool together, so that each drives the others out of it."""

from collections.abc import Sequence
from typing import Any

from tiny_target import SENTENCES

from ragspec.core import Completion, CopySource, Request, SourceKind
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target

PLENTY = 2**24


NUM_KV_SLOTS = 224
"""Fewer than two conversations need."""


def turns(target: Target, params: Any, salts: Sequence[str] = ("", "", "")) -> list[list[Request]]:
    """Two turns of three conversations. The second turn begins with all of the first."""
    sources = tuple(CopySource(SourceKind.PASSAGE, text, str(i)) for i, text in enumerate(SENTENCES))
    texts = [" ".join(SENTENCES[(i + j) % 5] for j in range(3)) for i in range(3)]
    firsts = [tuple(target.tokenizer(text).input_ids)[:115] for text in texts]
    return [
        [
            Request(f"{turn}{i}", (*first, *range(40, 40 + turn * 21)), params, sources, salt=salt)
            for i, (first, salt) in enumerate(zip(firsts, salts, strict=True))
        ]
        for turn in range(2)
    ]


def answered(engine: Engine, requests: list[list[Request]]) -> list[list[Completion]]:
    """One request at a time, so that each drives the others out of the pool."""
    return [[engine.generate([request])[0] for request in turn] for turn in requests]
