"""Documents become passages: whole sentences of one section, cut so that every passage is a slice of its document.

Owns sentence boundaries, sections and passage spans, and what of a passage is embedded. Never changes, strips or normalises a
character: for every passage `document.text[p.start:p.end] == p.text`, which is what makes a citation checkable. Never lets an
encoder cut anything silently: `embedded_text` of every passage has at most the limit's tokens.

    >>> chunk(Document("a", "One sentence. Another one."), ChunkingConfig(max_chars=40))
"""

from ragspec.retrieval.chunking.chunker import chunk
from ragspec.retrieval.chunking.passage_text import TokenLimit, embedded_text
from ragspec.retrieval.chunking.sentence_boundaries import Span, sentences

__all__ = ["Span", "TokenLimit", "chunk", "embedded_text", "sentences"]
