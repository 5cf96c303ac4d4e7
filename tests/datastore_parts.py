"""Indexes for the datastore drafter, and a tokenizer of texts that are lists of token ids."""

from collections.abc import Sequence
from pathlib import Path

from letter_encoder import LetterEncoder

from ragspec.core import Document
from ragspec.retrieval.index.writer import IndexWriter


class Numbers:
    """A tokenizer of texts that are lists of token ids, as the tokens of tiny targets are no text."""

    def __call__(self, texts: Sequence[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(each) for each in text.split()] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {}


def write(folder: Path, *documents: Document, delete: Sequence[str] = ()) -> Path:
    """One commit."""
    with IndexWriter(folder, LetterEncoder()) as writer:
        for document in documents:
            writer.upsert(document)
        for name in delete:
            writer.delete(name)
        writer.commit()
    return folder
