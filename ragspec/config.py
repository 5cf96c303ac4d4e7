"""Settings, one frozen pydantic model per part, units in names.

Unknown keys are errors. Files and the environment are read only at the edge (`load_config`, called by the command line and
the jobs); the library takes ready objects.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ragspec.errors import ConfigError, did_you_mean
from ragspec.old_keys import with_new_keys

ASSETS = Path(__file__).parent / "assets"
MIN_STEP_TOKENS = 16
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_ADAPTER = ASSETS / "adapter"
DEFAULT_CACHE = "~/.cache/ragspec"


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
    "auto",
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

NO_STOP_WORDS = {"none", "arabic", "greek", "romanian", "tamil", "turkish"}


class AnalyzerConfig(ConfigSection):
    """`language`: of stemming and accent folding; "none": neither; "auto": of English, and of each text's own language beside it
    where its commonest words or its script tell another. `stop_words`: leave out the language's commonest words."""

    language: Language = "auto"
    stop_words: bool = False

    @model_validator(mode="after")
    def _check_stop_words(self) -> AnalyzerConfig:
        if self.stop_words and self.language in NO_STOP_WORDS:
            raise ValueError(f"there are no stop words for language {self.language!r}")
        return self


class IndexConfig(ConfigSection):
    """How documents become an index; an index keeps the settings it was built with. `words`: the analyzer of word search."""

    chunking: ChunkingConfig = ChunkingConfig()
    dense: DenseConfig = DenseConfig()
    words: AnalyzerConfig = AnalyzerConfig()


class RetrieverConfig(ConfigSection):
    """`mode`: nearest in meaning, best by words (BM25), or both fused; `reranker`: a cross-encoder's name or path.

    `fusion`: "rank" orders by the reciprocal ranks in both lists; "learned" then orders the first 32 by learned weights of these
    ranks and of the places of the question's words (title, heading, beginning of a sentence), and moves passages that repeat
    a better one behind them. Fusion takes the `fusion_depth` best of each list, a reranker the `rerank_depth` best, or as many
    as are requested if that is more. `device`: where vectors are searched; auto: on a GPU if FAISS finds one.
    `gpu_memory_bytes`: the most that the index takes of a GPU, null without limit; segments beyond that are searched on the CPU.
    `pointer`: content of the index's file CURRENT for a generation to stay with; empty: always the current generation.
    `fail_closed`: if a shard of a distributed index cannot be searched, raise an error; otherwise answer from the other shards
    and name the missing ones.

    `abstain_below`: a question whose best passage has a smaller calibrated score than this is not given to the target; the answer
    says that nothing is close, and names the nearest titles. 0: off; 0.12 loses 3 in 100 answerable questions about SQuAD's
    articles and catches 60 of 100 whose article was deleted. Needs mode hybrid and is calibrated for the default encoder.

    `expand_passages`: how many passages before and after each found passage the prompt shows joined to it, if all found passages
    and earlier turns still fit. The default target's adapter was trained with 0.
    """

    index_dir: str = ""
    pointer: str = ""
    num_passages: int = Field(3, ge=1, le=64)
    mode: Literal["dense", "sparse", "hybrid"] = "hybrid"
    fusion: Literal["learned", "rank"] = "learned"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    gpu_memory_bytes: int | None = Field(None, ge=0)
    reranker: str = ""
    fusion_depth: int = Field(100, ge=1, le=10_000)
    rerank_depth: int = Field(32, ge=1, le=1_000)
    fail_closed: bool = True
    abstain_below: float = Field(0.0, ge=0.0, lt=1.0)
    expand_passages: int = Field(0, ge=0, le=8)

    @model_validator(mode="after")
    def _check_abstention(self) -> Self:
        if self.abstain_below and self.mode != "hybrid":
            raise ValueError("abstain_below needs mode hybrid, which compares both meaning and words")
        return self


class TargetConfig(ConfigSection):
    """The model that generates: "SmolLM2-135M-Instruct" is the package's file, accepted only with its published hash; anything
    else is a Hugging Face directory or name, or a GGUF file.

    `adapter`: the directory of a PEFT LoRA adapter, merged at load; "auto": the shipped adapter for the default model, none for
    others. `quantization`: "int8" holds the weights in 8 bits with a scale for each output; "auto": int8 on backend cpu, except
    for models that the release lists as float by the hash of their file; none on other backends. `cache_dir`: where dequantised,
    merged and quantised weights are kept. `max_weight_bytes`: of int8 weights in memory on backend cpu; layers beyond it are
    read from `cache_dir` in every step. The first start, which quantises, has all of them in memory.

    `device`: "cpu", "cuda" or "cuda:1". `backend`: "cpu" runs compiled kernels, "torch" plain torch operators on any device,
    "cuda" Triton kernels on a GPU; "auto": cpu on the device cpu, torch elsewhere. `dtype`: of the weights, and of keys and
    values on backends torch and cuda. `kv_cache_dtype`: of keys and values on backend cpu; "auto": bfloat16 beside int8 or
    bfloat16 weights, else float32. `kv_dir`: a folder on a disk; then keys and values on backend cpu lie in a file there, so that
    `engine.max_kv_tokens` may exceed memory: the system keeps in memory what is used, and reads the rest back.

    `exactness`: "fast" serves also where the self-test of "bitwise" fails; several ranks on backends torch
    and cuda then add up parts of products.
    """

    model: str = DEFAULT_TARGET
    adapter: str = "auto"
    cache_dir: str = f"{DEFAULT_CACHE}/targets"
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    backend: Literal["auto", "cpu", "torch", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: Literal["auto", "none", "int8"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dir: str = ""
    max_weight_bytes: int | None = Field(None, ge=1)
    max_context_tokens: int | None = Field(None, ge=16)
    exactness: Literal["bitwise", "fast"] = "bitwise"

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if (self.backend, self.device == "cpu") in (("cpu", False), ("cuda", True)):
            raise ValueError(f"the backend {self.backend} does not run on the device {self.device!r}")
        if self.backend_name != "cpu" and self.kv_cache_dtype not in ("auto", self.dtype):
            raise ValueError(f"the backend {self.backend_name} keeps keys and values in the dtype of the weights")
        if self.backend_name != "cpu" and self.kv_dir:
            raise ValueError(f"the backend {self.backend_name} keeps keys and values on its device, not in kv_dir")
        if self.max_weight_bytes and not (self.is_int8 and self.backend_name == "cpu"):
            raise ValueError("max_weight_bytes needs int8 weights on the backend cpu")
        return self

    @property
    def backend_name(self) -> str:
        """The backend that "auto" stands for."""
        if self.backend == "auto":
            return "cpu" if self.device == "cpu" else "torch"
        return self.backend

    @property
    def is_int8(self) -> bool:
        """ "auto" counts as int8 on backend cpu; `with_known_weights` replaces it for models that are listed as float."""
        return self.quantization == "int8" or (self.quantization == "auto" and self.backend_name == "cpu")

    @property
    def collectives(self) -> Literal["gloo", "nccl"]:
        """What the ranks of a group talk through: `nccl` needs a GPU for each."""
        return "gloo" if self.device == "cpu" else "nccl"

    @property
    def adds_parts(self) -> bool:
        """Whether ranks add up parts of products, which is faster and not bitwise."""
        return self.exactness == "fast" and self.backend_name != "cpu"

    @property
    def weight_dtype(self) -> str:
        """Of the weights that products read: "int8" or `dtype`."""
        return "int8" if self.is_int8 else self.dtype

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values that "auto" stands for."""
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "bfloat16" if self.is_int8 and self.backend_name == "cpu" else self.dtype

    @property
    def numerics_dtype(self) -> str:
        """Everything of the configuration that changes hidden states: dtypes, int8 weights, backend and device."""
        parts: list[str] = [self.dtype]
        if self.is_int8:  # v2: most activations of the CPU's kernels fit 8 bits
            parts += ["int8-v2" if self.backend_name == "cpu" else "int8"]
        parts += [f"kv-{self.kv_dtype}"] if self.backend_name == "cpu" and self.kv_dtype != "float32" else []
        parts += [self.backend_name, self.device.partition(":")[0]] if self.backend_name != "cpu" else []
        return "-".join(parts)


class TreeHeadConfig(ConfigSection):
    """Heads that read the target's hidden states and draft trees. `path`: their directory.

    `tree`: "dynamic" extends the `width` most probable paths of each level by `num_children` children, down to `max_depth`
    tokens; "static" is the family's published tree (EAGLE-1's of 25 nodes; Medusa's and Hydra's of 63), "chain" has no branches.
    `coupled`: drafts use the noise that the target samples with. `dtype`: of the products; auto: the fastest here, int8 beside
    a target in int8 only. `score` of a dynamic tree: "learned" ranks paths by the acceptance of such nodes so far, ours;
    "confidence" by the head's own probabilities, uncoupled, and keeps the `num_nodes` best. The EAGLE-2 paper's tree is
    `num_children: 10`, `width: 10`, `max_depth: 8`, `num_nodes: 59`, with `drafting.max_tree_nodes: 59`.
    """

    path: str = ""
    tree: Literal["dynamic", "static", "chain"] = "dynamic"
    num_children: int = Field(4, ge=1, le=64)
    width: int = Field(4, ge=1, le=64)
    max_depth: int = Field(6, ge=1, le=32)
    coupled: bool = True
    score: Literal["learned", "confidence"] = "learned"
    num_nodes: int = Field(59, ge=1, le=512)
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"


class OnlineConfig(ConfigSection):
    """Online distillation: an EAGLE-3 head learns from the tokens of finished requests, and outputs stay the same. Training takes
    one thread while no request is open, and at most `busy_share` of the time while some are. Learned weights draft only where
    they did better on texts that they had not learned yet. Each tenant's head learns from its own requests alone; `shared`
    declares that the deployment has one tenant, and one head learns from all. All learned heads with their texts take at most
    `max_bytes`; a restart forgets them."""

    enabled: bool = False
    learning_rate: float = Field(1e-4, gt=0.0)
    busy_share: float = Field(0.0, ge=0.0, le=1.0)
    max_bytes: int = Field(2**29, ge=0)
    shared: bool = False


class EagleConfig(TreeHeadConfig):
    """An EAGLE head, with the keys of `drafting.medusa`. The head attends to the last `window` positions. One draft reads at
    most `max_read_tokens` tokens of the text, the last first, and later drafts read those before, until the window is read.
    `positions_per_layer`: of PosS, the positions that each specialist drafts; null: as `position_per_layer` of its
    config.json says. `online`: whether and how the head learns while it serves."""

    window: int = Field(256, ge=16)
    max_read_tokens: int = Field(48, ge=1)
    positions_per_layer: int | None = Field(None, ge=1)
    online: OnlineConfig = OnlineConfig()


class HydraConfig(TreeHeadConfig):
    """Hydra heads, with the keys of `drafting.medusa`. Hydra++ has `window` and `max_read_tokens`, as in `drafting.eagle`."""

    window: int = Field(256, ge=16)
    max_read_tokens: int = Field(48, ge=1)


class DraftModelConfig(ConfigSection):
    """A small language model with the target's vocabulary that drafts. `path`: as `target.model`.

    `tree`, `num_children`, `width`, `max_depth` and `coupled`: as in `eagle`; every level takes a forward of the model. Device,
    backend and dtype are the target's; `quantization`: "auto" as the target's. Keys and values of at most `max_kv_tokens` tokens
    or `max_kv_bytes` are kept, and never of more tokens than the target's.
    """

    path: str = ""
    tree: Literal["dynamic", "static", "chain"] = "dynamic"
    num_children: int = Field(3, ge=1, le=64)
    width: int = Field(1, ge=1, le=64)
    max_depth: int = Field(6, ge=1, le=32)
    coupled: bool = True
    quantization: Literal["auto", "none", "int8"] = "auto"
    max_kv_tokens: int = Field(32_768, ge=64)
    max_kv_bytes: int | None = Field(None, ge=1)


class SelfDraftConfig(ConfigSection):
    """The target drafts with some of its layers, without a second model. `keep`: their numbers, from 0, rising; the first ones
    alone are early exit. Other keys as in `eagle`."""

    keep: tuple[int, ...] = Field((), strict=False)
    tree: Literal["dynamic", "static", "chain"] = "dynamic"
    num_children: int = Field(3, ge=1, le=64)
    width: int = Field(1, ge=1, le=64)
    max_depth: int = Field(4, ge=1, le=32)
    coupled: bool = True


class DatastoreConfig(ConfigSection):
    """The index whose documents the drafter datastore reads: as `retriever.index_dir`, and usually the same folder."""

    index_dir: str = ""


class DraftingConfig(ConfigSection):
    """`drafters`: names of the drafters; null: copy, and each whose `path` is given. `max_tree_nodes`: the most nodes of
    a tree beside its likeliest path, which may be as long as it pays. `reuse_earlier_answers`: draft also what followed most
    often in a tenant's earlier answers, at most `max_earlier_tokens` tokens of them.

    `eagle_heads` and `draft_models`: further EAGLE heads and draft models, each a drafter of its own name, with the keys of
    `eagle` and `draft_model`. Of several heads a request is drafted for by the head whose drafts save most time there; the trees
    of several draft models are merged.
    """

    speculation: bool = True
    drafters: tuple[str, ...] | None = Field(None, strict=False)
    eagle: EagleConfig = EagleConfig()
    eagle_heads: dict[str, EagleConfig] = Field(default_factory=dict)
    medusa: TreeHeadConfig = TreeHeadConfig()
    hydra: HydraConfig = HydraConfig()
    draft_model: DraftModelConfig = DraftModelConfig()
    draft_models: dict[str, DraftModelConfig] = Field(default_factory=dict)
    self_draft: SelfDraftConfig = SelfDraftConfig()
    datastore: DatastoreConfig = DatastoreConfig()
    max_tree_nodes: int = Field(48, ge=1, le=512)
    reuse_earlier_answers: bool = False
    max_earlier_tokens: int = Field(50_000, ge=0)

    @property
    def networks(self) -> dict[str, TreeHeadConfig | DraftModelConfig]:
        """The sections of drafters with a network of their own, by drafter."""
        own = {name: section for name, section in self if isinstance(section, TreeHeadConfig | DraftModelConfig)}
        return {**own, **self.eagle_heads, **self.draft_models}

    def with_paths(self, full_path: Callable[[str], str]) -> DraftingConfig:
        """With other paths of networks and of the datastore's index."""
        moved = {name: s.model_copy(update={"path": full_path(s.path)}) for name, s in self.networks.items()}
        heads = {name: moved.pop(name) for name in self.eagle_heads}
        models = {name: moved.pop(name) for name in self.draft_models}
        datastore = DatastoreConfig(index_dir=full_path(self.datastore.index_dir))
        return self.model_copy(update={**moved, "eagle_heads": heads, "draft_models": models, "datastore": datastore})


class EngineConfig(ConfigSection):
    """`max_kv_tokens`: size of the KV pool, or as many tokens as `max_kv_bytes` of a rank hold if those are fewer.
    `max_step_tokens`: the most rows of one forward. `num_threads`: the most threads;
    with `adaptive_threads` all of them or one, whichever is faster at the moment.

    `kv_offload_bytes`: on each rank, for KV offloading: cached keys and values that leave the pool are kept outside it, least
    recently used first out, and read back instead of computed again; 0: off. They are kept in main memory, or in a file without a
    name in the folder `kv_offload_dir`, which a target on the device cpu needs."""

    max_kv_tokens: int = Field(32_768, ge=64)
    max_kv_bytes: int | None = Field(None, ge=1)
    max_step_tokens: int = Field(512, ge=MIN_STEP_TOKENS)
    max_running: int = Field(64, ge=1)
    prefix_cache: bool = True
    kv_offload_bytes: int = Field(0, ge=0)
    kv_offload_dir: str = ""
    num_threads: int | None = Field(None, ge=1)
    adaptive_threads: bool = True

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.kv_offload_bytes and not self.prefix_cache:
            raise ValueError("kv_offload_bytes keeps cached prefixes, so it needs prefix_cache")
        if self.kv_offload_dir and not self.kv_offload_bytes:
            raise ValueError("kv_offload_dir needs kv_offload_bytes, which is 0: nothing would be kept there")
        return self


class GenerationConfig(ConfigSection):
    """Defaults of a question; see `ragspec.core.SamplingParams`."""

    max_tokens: int = Field(96, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**64)
    verbatim_quotes: bool = True


class StrideConfig(ConfigSection):
    """`stride`: a fixed speculation stride; null: the best one. `window`: how many recent rounds and steps the estimates use.

    Speculation is off while its predicted gain is below `least_gain`. While a verification runs, decoding continues as long as
    its text stands with at least probability `least_survival`. `gamma_max`: the greatest hit rate that is assumed.
    """

    stride: int | None = Field(None, ge=1, le=64)
    max_stride: int = Field(32, ge=1, le=64)
    window: int = Field(64, ge=1, le=4096)
    gamma_max: float = Field(0.97, gt=0.0, lt=1.0)
    least_gain: float = Field(0.03, ge=0.0)
    least_survival: float = Field(0.25, gt=0.0, le=1.0)


class SpeculationConfig(ConfigSection):
    """Speculative retrieval: answers with many retrievals guess their passages from a cache and verify the guesses in batches.

    `asynchronous`: decoding continues during verification if the index is in another process. Each verification also adds the
    `prefetch_k` best passages to the request's cache. `max_batch_queries`: the most queries of one lookup, over all requests.
    `timeout_s`: the time limit of a lookup.
    """

    enabled: bool = True
    asynchronous: bool = True
    prefetch_k: int = Field(8, ge=1, le=256)
    stride: StrideConfig = StrideConfig()
    max_batch_queries: int = Field(16, ge=1, le=1024)
    timeout_s: float = Field(60.0, gt=0.0)


class ChatConfig(ConfigSection):
    """`rewriter` rewrites a follow-up question before retrieval. `rules`: with rules; `model`: with the target, in at most
    `rewriter_tokens` tokens, or with rules if its output is unusable; `auto`: `model` if the target has at least
    `least_rewriter_parameters`, else `rules`; `off`: not at all.

    `history`: whether the prompt shows earlier turns; `auto` shows them. `max_carried`: passages of the latest
    `carried_turns` answers that are added to those of a follow-up question. `answer_without_index`: answer without passages, and
    say so, if the index does not answer; otherwise that is an error.
    """

    rewriter: Literal["auto", "rules", "model", "off"] = "auto"
    least_rewriter_parameters: int = Field(1_000_000_000, ge=0)
    rewriter_tokens: int = Field(64, ge=1, le=1024)
    history: Literal["auto", "shown", "hidden"] = "auto"
    max_carried: int = Field(1, ge=0, le=16)
    carried_turns: int = Field(2, ge=0, le=16)
    answer_without_index: bool = False


class PromptConfig(ConfigSection):
    """The words of prompts, for other targets than the default; empty: the words that the default's adapter was trained on.

    `instruction`: how to answer from passages; `question`: stands before the question; `grammar`: before a sentence to correct.

    `layout`: "quote" asks for a verbatim quote and a short answer behind it; "short" asks for one sentence, and each sentence
    is shown with the passage's exact words it rests on; "auto": quote for the default target and for a target with an adapter,
    short for others. `require_support`: an answer from passages of which no sentence is quoted, supported or related is replaced
    by a sentence that says so; its text is then streamed whole, at its end.
    """

    layout: Literal["auto", "quote", "short"] = "auto"
    require_support: bool = False
    instruction: str = ""
    question: str = ""
    grammar: str = ""


class PipelineConfig(ConfigSection):
    """All settings of a pipeline."""

    encoder: EncoderConfig = EncoderConfig()
    index: IndexConfig = IndexConfig()
    retriever: RetrieverConfig = RetrieverConfig()
    target: TargetConfig = TargetConfig()
    drafting: DraftingConfig = DraftingConfig()
    engine: EngineConfig = EngineConfig()
    generation: GenerationConfig = GenerationConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    prompts: PromptConfig = PromptConfig()

    @property
    def wording(self) -> PromptConfig:
        """`prompts` with the layout that "auto" stands for."""
        if self.prompts.layout != "auto":
            return self.prompts
        target = self.target
        is_plain = target.adapter == "none" or (target.adapter == "auto" and target.model != DEFAULT_TARGET)
        return self.prompts.model_copy(update={"layout": "short" if is_plain else "quote"})


Settings = TypeVar("Settings", bound=PipelineConfig)


def load_config(path: str | Path | None = None, **overrides: Any) -> PipelineConfig:
    """Read a YAML file, if given, and apply dotted overrides such as `{"target.model": "..."}` ; None changes nothing.

    Raises: ConfigError with the file, the key and the reason.
    """
    return load_settings(PipelineConfig, path, **overrides)


def load_settings(kind: type[Settings], path: str | Path | None = None, **overrides: Any) -> Settings:
    """As `load_config`, for settings with more sections."""
    tree = _read_mapping(path) if path is not None else {}
    for dotted, value in overrides.items():
        if value is not None:
            _put(tree, dotted.split("."), value)
    try:
        return kind.model_validate(with_new_keys(tree))
    except ValidationError as cause:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}{_near_key(kind, e)}" for e in cause.errors())
        raise ConfigError(f"configuration {path or 'overrides'}: {reasons}") from cause


def settings_of(config: PipelineConfig | str | Path | None) -> PipelineConfig:
    """Settings as they are, or those of a YAML file; None: the defaults. Raises: ConfigError."""
    if config is None or isinstance(config, str | Path):
        return load_config(config)
    return config


def _near_key(kind: type[BaseModel], error: ErrorDetails) -> str:
    """The setting that a misspelt key was meant to be, if there is one."""
    if error["type"] != "extra_forbidden":
        return ""
    *sections, key = error["loc"]
    for name in sections:
        section = kind.model_fields[str(name)].annotation
        assert isinstance(section, type) and issubclass(section, BaseModel), "an unknown key stands in a section"
        kind = section
    return did_you_mean(key, kind.model_fields)


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
