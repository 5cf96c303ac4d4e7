"""Queries to passages, and documents to an index.

Owns the order of the two steps (encode, search) and nothing else: the encoder, the store and the search each know their own part.

    >>> build_index(documents, Path("index"), encoder, ChunkingConfig())
    >>> Retriever.from_config(RetrieverConfig(index_dir="index"), EncoderConfig()).retrieve(["When did it rain?"], k=3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import batched
from pathlib import Path

from ragspec.config import ChunkingConfig, EncoderConfig, RetrieverConfig
from ragspec.core import Document, Passage, check_text
from ragspec.errors import ConfigError, InputError
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.content import checked
from ragspec.retrieval.dense import DenseIndex, ExactIndex
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.manifest import Manifest, read_current
from ragspec.retrieval.store import Store
from ragspec.retrieval.writer import SegmentWriter
