"""ragspec: lossless speculative retrieval-augmented generation.

The public names; everything else is reached through its own module. Heavy parts load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.config import PipelineConfig, load_config
    from ragspec.core import Citation, Document, Passage, SamplingParams
    from ragspec.errors import RagspecError
    from ragspec.rag.answer import Answer
    from ragspec.rag.async_pipeline import Flow
    from ragspec.rag.grammar.grammar import Grammar
    from ragspec.rag.iterative.pipeline import IterativePipeline
    from ragspec.rag.pipeline import Pipeline
    from ragspec.retrieval.index.writer import IndexWriter
    from ragspec.retrieval.retriever import Retriever, build_index

__version__ = "0.1.0"

_HOMES = {
    "Answer": "ragspec.rag.answer",
    "Citation": "ragspec.core",
    "Document": "ragspec.core",
    "Flow": "ragspec.rag.async_pipeline",
    "Grammar": "ragspec.rag.grammar.grammar",
    "IndexWriter": "ragspec.retrieval.index.writer",
    "IterativePipeline": "ragspec.rag.iterative.pipeline",
    "Passage": "ragspec.core",
    "Pipeline": "ragspec.rag.pipeline",
    "PipelineConfig": "ragspec.config",
    "RagspecError": "ragspec.errors",
    "Retriever": "ragspec.retrieval.retriever",
    "SamplingParams": "ragspec.core",
    "build_index": "ragspec.retrieval.retriever",
    "load_config": "ragspec.config",
}

__all__ = [
    "Answer",
    "Citation",
    "Document",
    "Flow",
    "Grammar",
    "IndexWriter",
    "IterativePipeline",
    "Passage",
    "Pipeline",
    "PipelineConfig",
    "RagspecError",
    "Retriever",
    "SamplingParams",
    "build_index",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ragspec' has no attribute {name!r}")
