"""Settings, one frozen pydantic model per part, units in names.

Unknown keys are errors. Files and the environment are read only at the edge (`load_config`, called by the command line and
the jobs); the library takes ready objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails

from ragspec.errors import ConfigError, did_you_mean
from ragspec.old_keys import section_of, with_new_keys
from ragspec.retrieval_config import ChunkingConfig as ChunkingConfig
from ragspec.retrieval_config import ConfigSection as ConfigSection
from ragspec.retrieval_config import DenseConfig as DenseConfig
from ragspec.retrieval_config import EncoderConfig as EncoderConfig
from ragspec.retrieval_config import IndexConfig as IndexConfig
from ragspec.retrieval_config import RetrieverConfig as RetrieverConfig

ASSETS = Path(__file__).parent / "assets"
MIN_STEP_TOKENS = 16
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
DEFAULT_ADAPTER = ASSETS / "adapter"
DEFAULT_CACHE = "~/.cache/ragspec"


class TargetConfig(ConfigSection):
    """The model that generates."""

    model: str = DEFAULT_TARGET
    """A Hugging Face directory or name, or a GGUF file; "SmolLM2-135M-Instruct" is the packaged file, accepted only with its
    published hash."""
    adapter: str = "auto"
    """Directory of a PEFT LoRA adapter, merged at load; "none"; "auto": the shipped one for the default model, none for
    others."""
    cache_dir: str = f"{DEFAULT_CACHE}/targets"
    """Folder of dequantised, merged and quantised weights: disk space for faster starts."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """"cpu", "cuda" or "cuda:1"."""
    backend: Literal["auto", "cpu", "torch", "cuda"] = "auto"
    """"cpu": compiled kernels; "torch": plain torch operators on any device; "cuda": Triton kernels on a GPU; "auto": cpu on
    the device cpu, cuda on a GPU where Triton can be imported, else torch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Type of the weights, and of keys and values on backends torch and cuda. "auto": float32 on the device cpu, bfloat16 on a
    GPU. bfloat16: half the memory, other texts; a processor without it runs float32 and says so, replicas refuse to start."""
    quantization: Literal["auto", "none", "int8"] = "auto"
    """"int8": weights in 8 bits with a scale for each output: a quarter of the memory, other texts; "auto": int8 on backend
    cpu (except for models that the release lists as float), none elsewhere."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of keys and values on backend cpu; "auto": bfloat16 beside int8 or bfloat16 weights, else float32."""
    kv_dir: str = ""
    """Folder for keys and values on backend cpu in a file, so that `engine.max_kv_tokens` may exceed memory; parts that are
    not in memory are read back from disk."""
    max_weight_bytes: int | None = Field(None, ge=1)
    """int8 weights held in memory on backend cpu; layers beyond are read from `cache_dir` in every step. The first start,
    which quantises, holds all of them."""
    max_model_len: int | None = Field(None, ge=16)
    """Tokens of prompt and output together at most; null: as many as the model knows positions."""
    exactness: Literal["bitwise", "fast"] = "bitwise"
    """"fast" serves even where the self-test fails, and adds up parts of products between ranks on a GPU: faster, but a text
    may depend on its batch."""

    @property
    def adapter_dir(self) -> Path | None:
        """The adapter's folder; None: no adapter."""
        if self.adapter == "auto":
            return DEFAULT_ADAPTER if self.model == DEFAULT_TARGET else None
        return None if self.adapter == "none" else Path(self.adapter)

    @property
    def fit_file(self) -> Path:
        """The biases of answers, `ragspec.rag.wording.AnswerFit`: an adapter's, or a model's own; it need not exist."""
        own = ASSETS / "fits" / f"{Path(self.model).name}.json"
        return self.adapter_dir / "answer_fit.json" if self.adapter_dir else own

    @property
    def answers_by_quotes(self) -> bool:
        """What `prompts.layout: auto` decides: an adapter, or a bias on quotes that the release holds for the model."""
        return self.adapter_dir is not None or (
            self.fit_file.is_file() and bool(json.loads(self.fit_file.read_text()).get("quote_weight"))
        )

    @model_validator(mode="before")
    @classmethod
    def _settle_dtype(cls, given: Any) -> Any:
        """Why here: job.json and the numerics id name the type that "auto" stands for, which no processor changes."""
        if isinstance(given, dict) and given.get("dtype") == "auto":
            return given | {"dtype": "float32" if given.get("device", "cpu") == "cpu" else "bfloat16"}
        return given

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
        """The backend that "auto" stands for; of a GPU's two, `cuda`, beside which Triton may be missing."""
        if self.backend == "auto":
            return "cpu" if self.device == "cpu" else "cuda"
        return self.backend

    @property
    def is_int8(self) -> bool:
        """ "auto" means int8 on backend cpu."""
        return self.quantization == "int8" or (self.quantization == "auto" and self.backend_name == "cpu")

    @property
    def collectives(self) -> Literal["gloo", "nccl"]:
        """The backend of collective operations between ranks; `nccl` needs a GPU for each rank."""
        return "gloo" if self.device == "cpu" else "nccl"

    @property
    def adds_parts(self) -> bool:
        """Whether ranks add up parts of products, which is faster and not bitwise."""
        return self.exactness == "fast" and self.backend_name != "cpu"

    @property
    def weight_dtype(self) -> str:
        """The type of the weights in matrix products: "int8" or `dtype`."""
        return "int8" if self.is_int8 else self.dtype

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values that "auto" stands for."""
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "bfloat16" if self.is_int8 and self.backend_name == "cpu" else self.dtype

    @property
    def numerics_dtype(self) -> str:
        """Names every setting that changes hidden states: dtypes, int8 weights, backend and device."""
        parts: list[str] = [self.dtype]
        if self.is_int8:  # v2: most activations of the CPU's kernels fit 8 bits
            parts += ["int8-v2" if self.backend_name == "cpu" else "int8"]
        parts += [f"kv-{self.kv_dtype}"] if self.backend_name == "cpu" and self.kv_dtype != "float32" else []
        parts += [self.backend_name, self.device.partition(":")[0]] if self.backend_name != "cpu" else []
        return "-".join(parts)


class DraftTreeConfig(ConfigSection):
    """The tree that every drafter with a network grows. EAGLE-2's published tree is `kind: confidence`, `top_k: 10`,
    `max_depth: 8`, `max_nodes: 59`."""

    kind: Literal["dynamic", "confidence", "static", "chain"] = "dynamic"
    """"dynamic": paths ranked by the acceptance of such nodes so far; "confidence": by a head's own probabilities (EAGLE-2),
    without the target's noise; "static": the published tree of EAGLE-1 or Medusa; "chain": no branches."""
    top_k: int | None = Field(None, ge=1, le=64)
    """EAGLE-2's k: children of a node, and paths of a level that grow; null: 4 for heads, 3 children on one path for
    models."""
    max_depth: int | None = Field(None, ge=1, le=32)
    """Tokens of a drafted path at most; null: 6, and 4 for the drafter self. Deeper: longer drafts, more forwards of the
    drafter."""
    max_nodes: int = Field(48, ge=1, le=512)
    """Nodes of a tree beside as many as its longest path has. More: more tokens accepted, larger steps."""


class HeadConfig(ConfigSection):
    """Heads that read the target's hidden states."""

    path: str = ""
    """Directory of the heads; empty: none."""


class OnlineConfig(ConfigSection):
    """Online distillation: an EAGLE-3 head learns from finished requests. Learned weights draft only where they did better on
    texts that they had not learned yet; a restart forgets them."""

    enabled: bool = False
    """Learn while serving: one thread trains while no request is open."""
    busy_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the time for training while requests are open. More: the head learns sooner, requests wait longer."""
    shared: bool = False
    """The deployment has one tenant, and one head learns from all requests; else each tenant's head learns from its own
    alone."""


class EagleConfig(HeadConfig):
    """An EAGLE head, or a head that drafts a block in one forward: P-EAGLE, DFlash, DSpark or PaSS, as the directory says."""

    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    """Type of the head's products; "auto": the fastest here, int8 beside a target in int8 only."""
    window: int = Field(256, ge=16)
    """Positions that the head attends to. More: better drafts of long texts, slower drafts."""
    positions_per_layer: int | None = Field(None, ge=1)
    """Of PosS heads, positions that each specialist drafts; null: as `position_per_layer` of the head's config.json."""
    norm_output: bool | None = None
    """Whether the head's normed state is fed back, for heads whose `norm_output` has two meanings; null: as config.json says."""
    online: OnlineConfig = OnlineConfig()


class DraftModelConfig(ConfigSection):
    """A small language model with the target's tokens that drafts. Device, backend and types are the target's."""

    path: str = ""
    """The model, as `target.model`; empty: none."""
    max_kv_tokens: int = Field(32_768, ge=64)
    """Tokens whose keys and values are kept, never more than the target's. Fewer: less memory, texts are read again."""


class SelfDraftConfig(ConfigSection):
    """The target drafts with some of its own layers."""

    keep: tuple[int, ...] = Field((), strict=False)
    """Numbers of the layers, from 0, rising; the first layers alone are early exit. Fewer: faster and worse drafts."""


class DatastoreConfig(ConfigSection):
    """The drafter datastore (REST), which copies what followed in an index's documents."""

    index_dir: str = ""
    """Folder of the index, usually `retriever.index_dir`; its tokens are sorted once, beside it."""


class DraftingConfig(ConfigSection):
    """Speculative decoding. No setting of it changes a text."""

    speculation: bool = True
    """Draft at all."""
    drafters: tuple[str, ...] | None = Field(None, strict=False)
    """Names: copy, eagle, medusa, hydra, draft_model, self, datastore, lookahead, and those of `eagle_heads`; null: copy, and
    each whose `path` is given."""
    tree: DraftTreeConfig = DraftTreeConfig()
    eagle: EagleConfig = EagleConfig()
    eagle_heads: dict[str, EagleConfig] = Field(default_factory=dict)
    """Further EAGLE heads by name, each with the keys of `drafting.eagle`. A request is drafted for by the head that saves
    most time there; each head takes memory."""
    medusa: HeadConfig = HeadConfig()
    hydra: HeadConfig = HeadConfig()
    draft_model: DraftModelConfig = DraftModelConfig()
    self_draft: SelfDraftConfig = SelfDraftConfig()
    datastore: DatastoreConfig = DatastoreConfig()
    reuse_earlier_answers: bool = False
    """Draft also what followed most often in the last 50,000 tokens of a tenant's answers. Answers stay in memory for it."""

    @property
    def networks(self) -> dict[str, HeadConfig | DraftModelConfig]:
        """The sections of drafters with a network of their own, by drafter."""
        own = {name: section for name, section in self if isinstance(section, HeadConfig | DraftModelConfig)}
        return {**own, **self.eagle_heads}

    def with_paths(self, full_path: Callable[[str], str]) -> DraftingConfig:
        """With other paths of networks and of the datastore's index."""
        moved = {name: s.model_copy(update={"path": full_path(s.path)}) for name, s in self.networks.items()}
        heads = {name: moved.pop(name) for name in self.eagle_heads}
        datastore = DatastoreConfig(index_dir=full_path(self.datastore.index_dir))
        return self.model_copy(update={**moved, "eagle_heads": heads, "datastore": datastore})


class EngineConfig(ConfigSection):
    """The engine that runs requests side by side."""

    max_kv_tokens: int = Field(32_768, ge=64)
    """Tokens whose keys and values the pool holds. More: more requests at once and more cached prefixes, more memory."""
    max_kv_bytes: int | None = Field(None, ge=1)
    """Memory of a rank's pool, where `max_kv_tokens` would take more; null: no limit."""
    max_num_batched_tokens: int = Field(512, ge=MIN_STEP_TOKENS)
    """Rows of one forward at most. More: prompts are read faster, running answers wait longer for them."""
    max_num_seqs: int = Field(64, ge=1)
    """Requests that run side by side; others wait. More: more tokens a second, each answer slower."""
    enable_prefix_caching: bool = True
    """Keep keys and values of finished texts in the pool for later prompts that begin alike."""
    kv_offload_bytes: int = Field(0, ge=0)
    """On each rank, memory or disk for keys and values that leave the pool, read back instead of computed again; 0: off."""
    kv_offload_dir: str = ""
    """Folder of these bytes; empty: main memory, of use beside a GPU. A target on the device cpu needs a folder."""
    num_threads: int | None = Field(None, ge=1)
    """Threads at most; null: one for each processor. All or one are used, whichever is faster at the moment."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            raise ValueError("kv_offload_bytes keeps cached prefixes, so it needs enable_prefix_caching")
        if self.kv_offload_dir and not self.kv_offload_bytes:
            raise ValueError("kv_offload_dir needs kv_offload_bytes, which is 0: nothing would be kept there")
        return self


PassageOrder = Literal["rank", "shared"]


class GenerationConfig(ConfigSection):
    """Defaults of a question; see `ragspec.core.SamplingParams`."""

    max_tokens: int = Field(192, ge=1)
    """Tokens of an answer at most."""
    temperature: float = Field(0.0, ge=0.0)
    """0: always the likeliest token; higher: more varied."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Sample from the likeliest tokens that have this probability together."""
    seed: int | None = Field(None, ge=0, lt=2**64)
    """The same seed gives the same text; null: a new seed for each question."""
    verbatim_quotes: bool = True
    """Quotes are held to their passages while they are written, letter for letter."""
    passage_order: PassageOrder = "rank"
    """Order of the passages in a prompt; "rank": best first; "shared": longest first, so that questions about the same
    passages share the reading of them. The best are kept either way, and the text may differ."""


class SpeculationConfig(ConfigSection):
    """Speculative retrieval: answers with many retrievals guess their passages from a cache, and verify guesses in
    batches."""

    enabled: bool = True
    """Guess at all. No text depends on it."""
    prefetch_k: int = Field(8, ge=1, le=256)
    """Best passages that a verification adds to the request's cache. More: more right guesses, slower lookups."""
    stride: int | None = Field(None, ge=1, le=64)
    """Guesses for each verification; null: the number that pays best by measured times, or none where none pays."""


class ChatConfig(ConfigSection):
    """Conversations."""

    rewriter: Literal["auto", "rules", "model", "off"] = "auto"
    """Who completes a follow-up question before retrieval: "rules"; "model": the target, slower, or rules if its question is
    unusable; "auto": rules, which find more for all targets that were measured."""
    history: Literal["auto", "shown", "hidden"] = "auto"
    """Whether prompts show earlier turns; "auto": shown. Hidden: shorter prompts, and answers know only the question."""
    max_carried: int = Field(1, ge=0, le=16)
    """Further passages of a follow-up question, from documents of the latest citations. More: less is lost, longer prompts."""
    answer_without_index: bool = False
    """If the index does not answer, answer without passages, or with what was found before, and say so; else that is an error."""


class PromptConfig(ConfigSection):
    """The words of prompts. Empty: the words that the default target's adapter was trained on."""

    layout: Literal["auto", "quote", "free", "short"] = "auto"
    """"quote" asks for a verbatim quote and a short answer; "free" for a sentence of the model's own, shown with the passage's
    exact words that it rests on; "short": free, in the words of earlier versions, which refuse more; "auto": quote for targets
    with an adapter, as the default has, or with a bias on quotes of their own, and free for others."""
    require_support: bool = False
    """An answer of which no sentence is quoted, supported or related is replaced by a sentence that says so; its text is then
    streamed whole, at its end."""
    instruction: str = ""
    """How to answer from passages."""
    question: str = ""
    """Stands before the question."""
    grammar: str = ""
    """Stands before a sentence to correct."""


FREE_PASSAGES, FREE_ABSTAIN_BELOW = 5, 0.12
"""Of targets that answer in their own words; the second of those without a fit. Of 50 questions about documentation 1.5 B
answered 28 with three passages, 33 with five. Of 459, 2 in 100 that are answerable score less than 0.12, and 43 of the others."""


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
    chat: ChatConfig = ChatConfig()

    def model_post_init(self, _: Any) -> None:
        self.suit_target()

    def suit_target(self) -> Self:
        """Settings of retrieval that nobody set follow from how the target answers. They still do not count as set: a job that
        was begun with others keeps those."""
        own, is_free = self.retriever.model_copy(), self.wording.layout == "free"
        is_scored = own.mode == "hybrid" and self.encoder.model == EncoderConfig().model
        abstain_below = FREE_ABSTAIN_BELOW if is_scored and not self.target.fit_file.is_file() else 0.0
        suited = RetrieverConfig().model_dump(include={"num_passages", "abstain_below"})
        if is_free:
            suited = {"num_passages": FREE_PASSAGES, "abstain_below": abstain_below}
        own.__dict__.update((name, value) for name, value in suited.items() if name not in own.model_fields_set)
        self.__dict__["retriever"] = own
        return self

    @property
    def wording(self) -> PromptConfig:
        """`prompts` with the layout that "auto" stands for."""
        if self.prompts.layout != "auto":
            return self.prompts
        return self.prompts.model_copy(update={"layout": "quote" if self.target.answers_by_quotes else "free"})


Settings = TypeVar("Settings", bound=PipelineConfig)
_OTHER_SECTIONS = {
    "service": "services.settings ServiceSettings",
    "topology": "ragspec.cluster.topology Topology",
}
"""Module and class of the sections that `PipelineConfig` lacks. A module is imported only for a file with its section."""


def load_config(path: str | Path | None = None, **overrides: Any) -> PipelineConfig:
    """Read a YAML file, if given, and apply dotted overrides such as `{"target.model": "..."}` ; None changes nothing.

    Raises: ConfigError with the file, the key and the reason.
    """
    return load_settings(PipelineConfig, path, **overrides)


def load_settings(kind: type[Settings], path: str | Path | None = None, **overrides: Any) -> Settings:
    """As `load_config`, for settings with more sections. Sections that `kind` lacks are checked and left out."""
    tree = with_new_keys(_read_mapping(path)) if path is not None else {}
    given: dict[str, Any] = {}
    for dotted, value in overrides.items():
        if value is not None:
            keys = dotted.split(".")
            section_of(given, keys)[keys[-1]] = value
    _override(tree, with_new_keys(given))
    others = {name: tree.pop(name) for name in _OTHER_SECTIONS if name in tree and name not in kind.model_fields}
    whole = _with_sections(kind, others) if others else kind
    try:
        whole.model_validate(tree | others)
        return kind.model_validate(tree)
    except ValidationError as cause:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}{_near_key(whole, e)}" for e in cause.errors())
        raise ConfigError(f"configuration {path or 'overrides'}: {reasons}") from cause


def settings_of(config: PipelineConfig | str | Path | None) -> PipelineConfig:
    """Settings as they are, or those of a YAML file; None: the defaults. Raises: ConfigError."""
    if config is None or isinstance(config, str | Path):
        return load_config(config)
    return config


def _with_sections(kind: type[Settings], names: Iterable[str]) -> type[Settings]:
    """`kind` with further sections."""
    places = {name: _OTHER_SECTIONS[name].split() for name in names}
    sections: dict[str, Any] = {name: getattr(import_module(module), each) for name, (module, each) in places.items()}
    return create_model(kind.__name__, __base__=kind, **sections)


def _near_key(kind: type[BaseModel], error: ErrorDetails) -> str:
    """The setting that a misspelt key was meant to be, if there is one."""
    if error["type"] != "extra_forbidden":
        return ""
    *sections, key = error["loc"]
    for name in sections:
        section = kind.model_fields[str(name)].annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):  # an entry of `eagle_heads`
            return ""
        kind = section
    return did_you_mean(key, [*kind.model_fields, *(() if sections else _OTHER_SECTIONS)])


def _read_mapping(path: str | Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as cause:
        raise ConfigError(f"cannot read the configuration {path}: {cause}") from cause
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"the configuration {path} is not a mapping")
    return tree or {}


def _override(tree: dict[str, Any], given: dict[str, Any], above: str = "") -> None:
    """Sets in `tree` every key of `given`."""
    for name, value in given.items():
        if not isinstance(value, dict) or name not in tree:
            tree[name] = value
        elif isinstance(tree[name], dict):
            _override(tree[name], value, f"{above}{name}.")
        else:
            raise ConfigError(f"cannot set a key of {above}{name}: it is not a mapping")
