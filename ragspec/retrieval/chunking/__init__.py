"""Chunking: cuts documents into passages of whole sentences of one section. Every passage is a slice of its document.

Owns sentence boundaries, sections, passage spans and the text that is embedded. Never changes, strips or normalises a character:
for every passage `document.text[p.start:p.end] == p.text`, so citations can be checked. Never lets an encoder truncate a text
silently: `embedded_text` of every passage has at most the limit's tokens.

    >>> chunk(Document("a", "One sentence. Another one."), ChunkingConfig(max_chars=40))
"""

from ragspec.retrieval.chunking.chunker import TokenLimit, chunk, embedded_text
from ragspec.retrieval.chunking.sentence_boundaries import Span, sentences

__all__ = ["Span", "TokenLimit", "chunk", "embedded_text", "sentences"]
