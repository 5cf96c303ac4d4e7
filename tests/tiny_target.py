"""Targets made on the spot: random weights, a few layers, a byte-level tokenizer trained on a few sentences.

>>> target = tiny_target("llama", "float32", folder)
>>> with tiny_engine(target, [drafter], max_num_batched_tokens=24) as engine: ...
"""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ragspec.config import EngineConfig, TargetConfig
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.planner import FixedTreePlanner, Planner
from ragspec.engine.admission import Admission, SamplerFactory
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

CONTEXT = 256
Tiny = Callable[..., Target]
"""The fixture `tiny`: `tiny(kind, dtype)`."""
SENTENCES = (
    "The river rises in the northern hills and flows past the old mill.",
    "Every spring the water carries sand and small stones down to the sea.",
    "She said that the bridge was built by the people of the valley.",
    'The report says: "The bridge was built in 1874 and rebuilt in 1921."',
    "A mill needs water, and water needs rain.",
)
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 20, "head_dim": 16}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 20, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
}


CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template of today's kind, with a system message of its own where a conversation has none."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<s>", CHATML
    return tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes are tokens, so any text can be written and characters can be split; `</s>` ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def tiny_config(**overrides: Any) -> LlamaConfig:
    """A Llama of two layers."""
    shape = {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"vocab_size": 320, "num_key_value_heads": 2, "initializer_range": 0.12, "tie_word_embeddings": False}
    return LlamaConfig(**{**shape, **sizes, **overrides})


_SAVED: dict[str, Path] = {}


def save_model(kind: str, folder: Path, std: float = 0.12, **overrides: Any) -> Path:
    """A random model and its tokenizer in one directory; the same weights every time, made once a test run."""
    key = repr((kind, std, sorted(overrides.items())))
    if key not in _SAVED:
        made = Path(tempfile.mkdtemp(prefix="tiny-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        _SAVED[key] = _make_model(kind, made, std, **overrides)
    shutil.copytree(_SAVED[key], folder, dirs_exist_ok=True)
    torch.manual_seed(11)  # as if it had been made here
    return folder


def _make_model(kind: str, folder: Path, std: float, **overrides: Any) -> Path:
    config_class, model_class, extra = ARCHITECTURES[kind]
    tokenizer = tiny_tokenizer()
    config = config_class(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 88,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "initializer_range": std,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **extra,
            **overrides,
        }
    )
    torch.manual_seed(11)
    model = model_class(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, std)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def _loaded(kind: str, dtype: Any, folder: Path) -> Target:
    if not (folder / kind / "config.json").exists():
        save_model(kind, folder / kind)
    return Target.load(target_config(str(folder / kind), dtype), num_kv_slots=2048)


def target_config(model: str, dtype: Any) -> TargetConfig:
    """`dtype` int8: weights in int8, the rest in float32; `torch-float32`: the dtype on the torch backend."""
    cache = str(Path(model).parent / "cache")
    backend, _, dtype = str(dtype).rpartition("-")
    if dtype == "int8":
        return TargetConfig(model=model, quantization="int8", backend=backend or "auto", cache_dir=cache)
    return TargetConfig(model=model, dtype=dtype, quantization="none", backend=backend or "auto", cache_dir=cache)


_FOLDER: list[Path] = []


def tiny_target(kind: str, dtype: str, folder: Path) -> Target:
    """Loaded once a session, whatever folder is given later; every call gives it a fresh pool."""
    if not _FOLDER:
        _FOLDER.append(folder)
    target = _loaded(kind, dtype, _FOLDER[0])
    target.reset_pool(2048)
    return target


def written(pool: KvPool, num_tokens: int) -> SequenceSlots:
    """A sequence whose first positions are kept."""
    slots = SequenceSlots(pool)
    slots.keep(*slots.reserve(num_tokens), list(range(num_tokens)))
    return slots


class Free(CostTable):
    """Rows cost nothing, however long a step takes here: whatever is proposed is drafted. A forward costs `step_s`."""

    def __init__(self, step_s: float = 1.0) -> None:
        super().__init__({64: [step_s, step_s]}, rows=(1, 2))

    def refine(self, num_rows: int, context: int, seconds: float) -> None:
        """Test machines are busy; what they measure must not decide what is tested."""


def tiny_engine(
    target: Target,
    drafters: Sequence[Drafter] = (),
    num_kv_slots: int = 2048,
    max_nodes: int = 12,
    fixed_nodes: int | None = None,
    costs: CostTable | None = None,
    make_sampler: SamplerFactory | None = None,
    **config: Any,
) -> Engine:
    """An engine over a fresh pool, with free rows unless `costs` or the drafters say otherwise.

    `fixed_nodes`: every drafter is asked in every step, and so many nodes are kept, whether that pays or not.
    """
    target.reset_pool(num_kv_slots)
    settings = EngineConfig(**{"max_num_batched_tokens": 64, "max_kv_tokens": num_kv_slots, **config})
    planner_class = FixedTreePlanner if fixed_nodes else Planner
    sizes = fixed_nodes or max_nodes, target.vocab_size, target.num_embeddings
    planner = planner_class(drafters, costs or Free(), *sizes)
    return Engine(target, planner, Admission(target, "tiny", make_sampler), settings)
