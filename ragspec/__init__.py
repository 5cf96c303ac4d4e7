"""ragspec: lossless speculative retrieval-augmented generation.

The public names. Modules with large dependencies load when one of their names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.config import PipelineConfig as PipelineConfig
    from ragspec.config import load_config as load_config
    from ragspec.core import Citation as Citation
    from ragspec.core import Document as Document
    from ragspec.core import Passage as Passage
    from ragspec.core import SamplingParams as SamplingParams
    from ragspec.errors import RagspecError as RagspecError
    from ragspec.evaluation.asking import evaluate as evaluate
    from ragspec.rag.answer import Answer as Answer
    from ragspec.rag.answer import AnswerStream as AnswerStream
    from ragspec.rag.chat.chat import ChatSession as ChatSession
    from ragspec.rag.chat.conversations import ConversationStore as ConversationStore
    from ragspec.rag.grammar.grammar import Grammar as Grammar
    from ragspec.rag.iterative.pipeline import IterativePipeline as IterativePipeline
    from ragspec.rag.pipeline import AsyncPipeline as AsyncPipeline
    from ragspec.rag.pipeline import Pipeline as Pipeline
    from ragspec.retrieval.index.writer import IndexWriter as IndexWriter
    from ragspec.retrieval.retriever import Retriever as Retriever
    from ragspec.retrieval.retriever import build_index as build_index

__version__ = "0.1.0"

_NAMES = {
    "ragspec.config": "PipelineConfig load_config",
    "ragspec.core": "Citation Document Passage SamplingParams",
    "ragspec.errors": "RagspecError",
    "ragspec.evaluation.asking": "evaluate",
    "ragspec.rag.answer": "Answer AnswerStream",
    "ragspec.rag.chat.conversations": "ConversationStore",
    "ragspec.rag.chat.chat": "ChatSession",
    "ragspec.rag.grammar.grammar": "Grammar",
    "ragspec.rag.iterative.pipeline": "IterativePipeline",
    "ragspec.rag.pipeline": "AsyncPipeline Pipeline",
    "ragspec.retrieval.index.writer": "IndexWriter",
    "ragspec.retrieval.retriever": "Retriever build_index",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ragspec' has no attribute {name!r}")
