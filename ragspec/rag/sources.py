"""What an answer is likely to repeat."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.core import CopySource, Passage, SourceKind


def copy_sources(question: str, passages: Sequence[Passage]) -> tuple[CopySource, ...]:
    """The passages in the prompt's order, then the question's own words."""
    return (*(CopySource(SourceKind.PASSAGE, p.text, p.id) for p in passages), CopySource(SourceKind.HISTORY, question))
