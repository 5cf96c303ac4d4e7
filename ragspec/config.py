"""Settings, one frozen pydantic model per part, units in names.

Unknown keys are errors. Files and the environment are read only at the edge (`load_config`, called by the command line and
the jobs); the library takes ready objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ragspec.errors import ConfigError

ASSETS = Path(__file__).parent / "assets"
MIN_STEP_TOKENS = 16
REFERENCE_TARGET = str(ASSETS / "reference_target")
REFERENCE_HEAD = str(ASSETS / "reference_heads" / "eagle3")


class ConfigSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ChunkingConfig(ConfigSection):
    """Passages of whole sentences, overlapping by whole sentences.

    At most `max_chars` characters and, with title and heading, `max_tokens` tokens of the encoder; None: as many as it reads.
    """

    max_chars: int = Field(600, ge=40)
    overlap_chars: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=32)


class EncoderConfig(ConfigSection):
    """`model`: "all-MiniLM-L6-v2" is the hash-checked package; anything else is a sentence-transformers path or name."""

    model: str = "all-MiniLM-L6-v2"
    batch_size: int = Field(32, ge=1)
    max_tokens: int = Field(256, ge=8)


class DenseConfig(ConfigSection):
    """How a segment finds its nearest vectors.

    `exact` compares the query with every vector. `hnsw` and `ivf` are FAISS indexes for segments that are large enough
    (`ragspec.retrieval.search.approximate` has the rule). `factory` (a FAISS factory string) and `search_width` (efSearch or
    nprobe) replace the rule's values.
    """

    kind: Literal["exact", "hnsw", "ivf"] = "exact"
    factory: str = ""
    search_width: int = Field(0, ge=0, le=65_536)


Language = Literal[
    "none",
    "arabic",
    "danish",
    "dutch",
    "english",
    "finnish",
    "french",
    "german",
    "greek",
    "hungarian",
    "italian",
    "norwegian",
    "portuguese",
    "romanian",
    "russian",
    "spanish",
    "swedish",
    "tamil",
    "turkish",
]

_NO_STOP_WORDS = {"none", "arabic", "greek", "romanian", "tamil", "turkish"}


class AnalyzerConfig(ConfigSection):
    """`language`: whose stems are taken and accents folded; "none": neither. `stop_words`: leave out its commonest words."""

    language: Language = "english"
    stop_words: bool = False

    @model_validator(mode="after")
    def _check_stop_words(self) -> AnalyzerConfig:
        if self.stop_words and self.language in _NO_STOP_WORDS:
            raise ValueError(f"there are no stop words for language {self.language!r}")
        return self


class IndexConfig(ConfigSection):
    """How documents become an index; an index keeps what it was built with. `words` is what word search compares."""

    chunking: ChunkingConfig = ChunkingConfig()
    dense: DenseConfig = DenseConfig()
    words: AnalyzerConfig = AnalyzerConfig()


class RetrieverConfig(ConfigSection):
    """`mode`: nearest in meaning, best by words (BM25), or both fused by rank; `reranker`: a cross-encoder's name or path.

    Fusion looks at the `fusion_depth` best of each list, a reranker at the `rerank_depth` best, or at as many as are asked for if
    that is more. `device` is where vectors are searched; auto: on a GPU if FAISS finds one. `pointer`: what the index's file
    CURRENT said of the generation to stay with; empty: always the current one. `fail_closed`: an index on several machines of
    which a part cannot be searched gives an error; otherwise what the rest of it holds, marked with what is missing.
    """

    index_dir: str = ""
    pointer: str = ""
    num_passages: int = Field(3, ge=1, le=64)
    mode: Literal["dense", "sparse", "hybrid"] = "hybrid"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    reranker: str = ""
    fusion_depth: int = Field(100, ge=1, le=10_000)
    rerank_depth: int = Field(32, ge=1, le=1_000)
    fail_closed: bool = True


class TargetConfig(ConfigSection):
    """The model served. `dtype` of the weights; the KV cache is float32."""

    model: str = REFERENCE_TARGET
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_context_tokens: int | None = Field(None, ge=16)
    exactness: Literal["bitwise", "fast"] = "bitwise"


class EagleConfig(ConfigSection):
    """An EAGLE head. `path`: its directory; empty: the one shipped for the reference target.

    `tree`: "dynamic" drafts the `width` most probable paths of a level further, each with `num_children` children, down to
    `max_depth` tokens; "static" is EAGLE-1's fixed tree, "chain" has no branches. The head looks back `window` positions.
    `coupled`: sampled drafts know the noise that the target samples with. `dtype` of its products; auto: what is fastest here.
    """

    path: str = ""
    tree: Literal["dynamic", "static", "chain"] = "dynamic"
    num_children: int = Field(4, ge=1, le=64)
    width: int = Field(4, ge=1, le=64)
    max_depth: int = Field(6, ge=1, le=32)
    window: int = Field(256, ge=16)
    coupled: bool = True
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class DraftingConfig(ConfigSection):
    """`drafters`: which drafters propose; None: copying, and the head that `eagle.path` names. `max_tree_nodes`: the most
    nodes of a tree.
    """

    speculation: bool = True
    drafters: tuple[str, ...] | None = Field(None, strict=False)
    eagle: EagleConfig = EagleConfig()
    max_tree_nodes: int = Field(48, ge=1, le=512)
    reuse_earlier_answers: bool = False
    max_earlier_tokens: int = Field(50_000, ge=0)


class EngineConfig(ConfigSection):
    """`max_kv_tokens` bounds the slot pool; `max_step_tokens` the rows of one forward; `num_threads` are used at most: with
    `adaptive_threads`, all or one, whichever is faster at the moment."""

    max_kv_tokens: int = Field(32_768, ge=64)
    max_step_tokens: int = Field(512, ge=MIN_STEP_TOKENS)
    max_running: int = Field(64, ge=1)
    prefix_cache: bool = True
    num_threads: int | None = Field(None, ge=1)
    adaptive_threads: bool = True


class GenerationConfig(ConfigSection):
    """Defaults of a question; see `ragspec.core.SamplingParams`."""

    max_tokens: int = Field(96, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**64)


class StrideConfig(ConfigSection):
    """`stride`: a fixed one, wherever speculation pays; None: the best. `window`: how many of the latest rounds and steps count.

    Speculation is off where its predicted gain over none is under `least_gain`. After the first step beside a verification, more
    are taken while what they write stands with at least probability `least_survival`. A chance of a right guess above
    `gamma_max` is not believed.
    """

    stride: int | None = Field(None, ge=1, le=64)
    max_stride: int = Field(32, ge=1, le=64)
    window: int = Field(64, ge=1, le=4096)
    gamma_max: float = Field(0.97, gt=0.0, lt=1.0)
    least_gain: float = Field(0.03, ge=0.0)
    least_survival: float = Field(0.25, gt=0.0, le=1.0)


class SpeculationConfig(ConfigSection):
    """Guessing what an index would say from what it said before, where an answer is written with many retrievals.

    `asynchronous`: decoding may go on while guesses are verified, if the index is in another process. Each verification also
    brings the `prefetch_k` best passages into the request's cache. At most `max_batch_queries` of all requests are looked up at
    once. A lookup that takes longer than `timeout_s` is given up.
    """

    enabled: bool = True
    asynchronous: bool = True
    prefetch_k: int = Field(8, ge=1, le=256)
    stride: StrideConfig = StrideConfig()
    max_batch_queries: int = Field(16, ge=1, le=1024)
    timeout_s: float = Field(60.0, gt=0.0)


class PipelineConfig(ConfigSection):
    """Everything a pipeline is built from."""

    encoder: EncoderConfig = EncoderConfig()
    index: IndexConfig = IndexConfig()
    retriever: RetrieverConfig = RetrieverConfig()
    target: TargetConfig = TargetConfig()
    drafting: DraftingConfig = DraftingConfig()
    engine: EngineConfig = EngineConfig()
    generation: GenerationConfig = GenerationConfig()
    speculation: SpeculationConfig = SpeculationConfig()


Settings = TypeVar("Settings", bound=PipelineConfig)


def load_config(path: str | Path | None = None, **overrides: Any) -> PipelineConfig:
    """Read a YAML file (or nothing) and put dotted overrides such as `{"target.model": "..."}` on top; None changes nothing.

    Raises: ConfigError with the file, the key and the reason.
    """
    return load_settings(PipelineConfig, path, **overrides)


def load_settings(kind: type[Settings], path: str | Path | None = None, **overrides: Any) -> Settings:
    """As `load_config`, for settings that have more sections."""
    tree = _read_mapping(path) if path is not None else {}
    for dotted, value in overrides.items():
        if value is not None:
            _put(tree, dotted.split("."), value)
    try:
        return kind.model_validate(tree)
    except ValidationError as cause:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in cause.errors())
        raise ConfigError(f"configuration {path or 'overrides'}: {reasons}") from cause


def _read_mapping(path: str | Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as cause:
        raise ConfigError(f"cannot read the configuration {path}: {cause}") from cause
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"the configuration {path} is not a mapping")
    return tree or {}


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *parents, leaf = keys
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"cannot set {'.'.join(keys)}: {name} is not a mapping")
    tree[leaf] = value
