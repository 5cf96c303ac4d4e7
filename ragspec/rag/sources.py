"""What an answer is likely to repeat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ragspec.core import CopySource, Passage, SourceKind


def copy_sources(
    question: str, passages: Sequence[Passage], history: Iterable[str] = (), prediction: str = ""
) -> tuple[CopySource, ...]:
    """The passages in the prompt's order, the question's own words, texts of earlier turns, and what the asker predicts."""
    texts = dict.fromkeys(text for text in (question, *history) if text.strip())
    predicted = (CopySource(SourceKind.PREDICTION, prediction),) if prediction.strip() else ()
    return (
        *(CopySource(SourceKind.PASSAGE, p.text, p.id) for p in passages),
        *(CopySource(SourceKind.HISTORY, text) for text in texts),
        *predicted,
    )
