"""The text encoder: texts become unit vectors, bit for bit the same in any batch.

`ragspec.retrieval.row_invariant` makes the batches. Never uses the network if the model is the packaged model or a folder.

    >>> Encoder.load(EncoderConfig()).encode(["When did it rain?"]).shape
    (1, 384)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict
from torch import Tensor

from ragspec.config import EncoderConfig
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.retrieval.packaged_encoder import PACKAGED_MODEL, SentenceModel, load_packaged, packaged_folder
from ragspec.retrieval.row_invariant import TOKENISED_AT_ONCE, RowInvariantModel, TokenIds, model_loading

FloatArray = NDArray[np.float32]
TextKind = Literal["query", "document"]


@dataclass(frozen=True, slots=True)
class EncoderIdentity:
    """Names an encoder, also in the manifest of an index. Equal identities give equal vectors."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    fingerprint: str
    dimension: int


class TextEncoder(Protocol):
    """The encoder that retrieval uses."""

    @property
    def identity(self) -> EncoderIdentity: ...

    @property
    def max_tokens(self) -> int:
        """The longest text the encoder reads, special tokens included."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a document, uncut; special tokens and the prefix of documents included."""
        ...

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        """One L2-normalised row per text, bitwise independent of the other texts. Shapes: returns [B, E] float32."""
        ...


class EncoderWrapper:
    """Passes every call on to another encoder. Subclasses override some of the methods."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self.identity, self.max_tokens = encoder.identity, encoder.max_tokens

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._encoder.count_tokens(texts)

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        return self._encoder.encode(texts, kind)


class Encoder(RowInvariantModel):
    """A sentence-transformers model behind `encode`. Safe to call from several threads."""

    def __init__(self, model: Any, config: EncoderConfig) -> None:
        """Take over `model` (a SentenceTransformer): its linear layers are packed in place."""
        max_tokens = min(config.max_tokens, model.max_seq_length or config.max_tokens)
        self.identity = EncoderIdentity(
            id=config.model, fingerprint=fingerprint(model, max_tokens), dimension=model.get_embedding_dimension()
        )
        self.is_ragged = isinstance(model, SentenceModel)
        super().__init__(model, model.tokenizer, max_tokens)

    @classmethod
    def load(cls, config: EncoderConfig) -> Encoder:
        """Raises: ModelError if the weights are missing, are not the published ones, or are no text encoder."""

        def load() -> Any:
            if config.model == PACKAGED_MODEL:
                return load_packaged(packaged_folder())
            return _published_model(config.model)

        with model_loading(f"{config.model} cannot be loaded as an encoder"):
            return cls(run_in_thread(load, num_processors()), config)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a document, uncut; special tokens and the prefix of documents included.

        A text of at most `max_tokens` tokens is read whole by `encode`.
        """
        if not texts:
            return []
        prefix = self._model.prompts.get("document") or ""
        counts: list[int] = []
        for first in range(0, len(texts), TOKENISED_AT_ONCE):
            whole = [prefix + text for text in texts[first : first + TOKENISED_AT_ONCE]]
            with self._tokenizing:  # Why so few: queries wait for it
                encoded = self._tokenizer(
                    whole, truncation=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
                )
            counts += [len(ids) for ids in encoded["input_ids"]]
        return counts

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        """One L2-normalised row per text, in order; longer texts are cut at `max_tokens`.

        `kind` picks the prefix that some models were trained with ("query: ").
        Shapes: returns [B, E] float32.
        """
        vectors = np.empty((len(texts), self.identity.dimension), np.float32)  # [B, E]
        if not texts:
            return vectors
        prefix = self._model.prompts.get(kind) or ""
        self._compute(vectors, self._tokenized([prefix + text for text in texts])["input_ids"])
        return vectors

    def _forward(self, token_ids: TokenIds, type_ids: TokenIds | None = None) -> FloatArray:
        """Shapes: two [B, T] without padding, T of each text its own if batches are ragged -> [B, E]."""
        with torch.inference_mode():
            given = token_ids if self.is_ragged else self._features(token_ids, type_ids)
            embedding: Tensor = self._model(given)["sentence_embedding"]  # [B, E]
            normalised: FloatArray = torch.nn.functional.normalize(embedding.float(), dim=-1).numpy()
        return normalised


def _published_model(path: str) -> Any:
    from sentence_transformers import SentenceTransformer  # Why: three seconds, only when an encoder is wanted

    return SentenceTransformer(path, device="cpu", local_files_only=Path(path).exists()).float()


def fingerprint(model: Any, max_tokens: int) -> str:
    """SHA-256 of a SentenceTransformer's weights, vocabulary and settings. Call before the layers are packed."""
    settings = {
        "max_tokens": max_tokens,
        "prompts": dict(model.prompts),
        "modules": [type(module).__name__ for module in model],
        "pooling": [str(getattr(module, "pooling_mode", "")) for module in model],
        "vocabulary": sorted(model.tokenizer.get_vocab().items()),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
