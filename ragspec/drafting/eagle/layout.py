"""The configuration of an EAGLE head: its family, its shape and its dialect; and the config.json of published heads.

Every dialect of config.json becomes one flat mapping, and then a `HeadConfig`. Each key is read, is harmless, or is refused by
its name; null stands for an absent key.

>>> config = HeadConfig(EagleFamily.EAGLE3, hidden_size=320, intermediate_size=768, ...)
>>> config = config_of(EagleFamily.EAGLE3, flat_config(raw), tensors)
>>> check_fits(config, vocab_size=128256, hidden_size=4096, num_layers=32)
"""

import enum
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from ragspec.drafting.heads.files import Raw, integer, number, section_of, truth
from ragspec.drafting.heads.layer import FINAL
from ragspec.errors import ModelError

NUM_AUX_LAYERS = 3
MAX_LAYERS, MAX_SIZE = 64, 2**22
_SIZES = (
    "hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size draft_vocab_size target_hidden_size"
    " num_layers"
).split()
_FLAGS_OF_EAGLE3 = ("aux_layers", "norm_before_residual", "norm_before_fc", "norm_output")


class EagleFamily(enum.StrEnum):
    """A head reads the target's last hidden state (EAGLE-1, EAGLE-2, HASS) or several of its layers (EAGLE-3)."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of one head and its dialect; valid once built.

    `aux_layers` are taps, low to high: tap i is the residual stream entering layer i of the target. `()` is EAGLE-1/2,
    or for EAGLE-3 the default of the target's depth; `(FINAL,)` is the target's final state, without a projection.
    `norm_before_residual` adds the attention to the normed hidden state, `norm_before_fc` norms the features, `norm_output`
    feeds the normed output back. Layers behind the first are a Llama's, or with `positions_per_layer` (PosS) specialists: each
    drafts so many positions. `shares_lm_head`: an EAGLE-3 head without an output layer uses the target's. `window`: positions
    that a row attends to, 0: all. `rope`: of rotary positions that are not plain, transformers' `rope_parameters`.
    Raises: ModelError for a shape that no head can have.
    """

    family: EagleFamily
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    num_layers: int = 1
    positions_per_layer: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    shares_lm_head: bool = False
    window: int = 0
    rope: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if fault := _fault_of(self) or (_fault_of_eagle(self) if self.family is EagleFamily.EAGLE else ""):
            raise ModelError(f"no {self.family} head can have {fault}")

    @property
    def reads_final(self) -> bool:
        """Whether an EAGLE-3 head reads the target's final state, without a projection."""
        return self.aux_layers == (FINAL,)

    @property
    def num_features(self) -> int:
        """Width of the target's features of one token, F."""
        if self.family is EagleFamily.EAGLE:
            return self.target_hidden_size
        return (len(self.aux_layers) or NUM_AUX_LAYERS) * self.target_hidden_size


class HeadCheckpoint(NamedTuple):
    """A head's configuration, and its tensors by official name in the stored dtype."""

    config: HeadConfig
    tensors: dict[str, Tensor]


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The taps an EAGLE-3 head reads where its config names none.

    Source: the published EAGLE code. Of targets with fewer than seven layers these are not three different layers, which
    `check_fits` refuses.
    """
    return 2, num_layers // 2, num_layers - 3


def check_fits(config: HeadConfig, vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Raises: ModelError if the head was made for a target of another vocabulary, width or depth."""
    if config.vocab_size != vocab_size:
        raise ModelError(f"the head is for a vocabulary of {config.vocab_size} tokens, the target has {vocab_size}")
    if config.target_hidden_size != hidden_size:
        raise ModelError(
            f"the head reads hidden states of {config.target_hidden_size}, the target's have {hidden_size}"
        )
    if config.family is EagleFamily.EAGLE or config.reads_final:
        return
    taps = config.aux_layers or default_aux_layers(num_layers)
    if not _is_increasing(taps) or taps[-1] > num_layers:
        origin = "aux_layers" if config.aux_layers else "default aux_layers"
        raise ModelError(f"the head's {origin} {taps} are no layers of a target that has {num_layers}")


def reachable(config: HeadConfig, max_depth: int) -> HeadConfig:
    """The head without the specialists that draft beyond `max_depth` positions: keys for them would be computed for nothing."""
    if not config.positions_per_layer:
        return config
    return replace(config, num_layers=min(config.num_layers, -(-max_depth // config.positions_per_layer)))


def _fault_of(config: HeadConfig) -> str:
    for name in _SIZES:
        if not 1 <= getattr(config, name) <= MAX_SIZE:
            return f"{name} {getattr(config, name)}"
    if config.max_positions < 1:
        return f"max_positions {config.max_positions}"
    for name in ("rms_norm_eps", "rope_theta"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            return f"{name} {getattr(config, name)}"
    if config.num_heads % config.num_kv_heads or config.num_heads * config.head_dim > MAX_SIZE:
        return f"{config.num_heads} heads of {config.head_dim} over {config.num_kv_heads} KV heads"
    if config.head_dim % 2:
        return f"an odd head_dim, {config.head_dim}"
    if min(config.window, config.positions_per_layer) < 0 or config.num_layers > MAX_LAYERS:
        return f"{config.num_layers} layers, window {config.window}, positions_per_layer {config.positions_per_layer}"
    if config.draft_vocab_size > config.vocab_size:
        return f"a draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size} tokens"
    if config.hidden_size != config.target_hidden_size and (config.reads_final or config.shares_lm_head):
        return f"hidden_size {config.hidden_size} and target_hidden_size {config.target_hidden_size} without fc and lm_head"
    if config.reads_final:
        return next((name for name in ("fc_bias", "norm_before_fc") if getattr(config, name)), "")
    is_served = _is_increasing(config.aux_layers) and len(config.aux_layers) <= MAX_LAYERS
    return "" if is_served else f"aux_layers {config.aux_layers}"


def _fault_of_eagle(config: HeadConfig) -> str:
    if config.draft_vocab_size != config.vocab_size:
        return f"draft_vocab_size {config.draft_vocab_size} (or truncated_vocab_size) beside vocab_size {config.vocab_size}"
    if config.target_hidden_size != config.hidden_size:
        return f"hidden_size {config.hidden_size} and target_hidden_size {config.target_hidden_size}"
    return next((name for name in _FLAGS_OF_EAGLE3 if getattr(config, name)), "")


def _is_increasing(taps: tuple[int, ...]) -> bool:
    return all(low < high for low, high in zip((-1, *taps), taps, strict=False))


DEFAULT_ROPE_THETA = 10000.0  # Why: the published code falls back to it, even where the target's base is another.
AUX_KEY, POSITIONS_KEY = "eagle_aux_hidden_state_layer_ids", "position_per_layer"
FEEDBACK_KEY = "return_hidden_post_norm"
"""TensorRT-LLM's key: the normed state is fed back."""
FIELDS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "hidden_size": ("hidden_size", integer, None),
    "intermediate_size": ("intermediate_size", integer, None),
    "num_heads": ("num_attention_heads", integer, None),
    "num_kv_heads": ("num_key_value_heads", integer, "num_attention_heads"),
    "head_dim": ("head_dim", integer, None),
    "vocab_size": ("vocab_size", integer, None),
    "draft_vocab_size": ("draft_vocab_size", integer, "vocab_size"),
    "target_hidden_size": ("target_hidden_size", integer, "hidden_size"),
    "max_positions": ("max_position_embeddings", integer, 2048),
    "rms_norm_eps": ("rms_norm_eps", number, 1e-6),
    "rope_theta": ("rope_theta", number, DEFAULT_ROPE_THETA),
    "norm_before_residual": ("norm_before_residual", truth, False),
}
"""Fields of `HeadConfig`: the published key, the kind of its value, and the value that an absent key means, or the key that it is
read from. None: the key must be there."""
_OTHER_KEYS = {
    "aux_hidden_state_layer_ids": AUX_KEY,
    "draft_num_hidden_layers": "num_hidden_layers",
    "eagle_fc_bias": "bias",
    "hidden_activation": "hidden_act",
    "truncated_vocab_size": "draft_vocab_size",
}
"""Keys of single dialects, and the keys that they stand for."""
_READ_KEYS = frozenset((*(key for key, _, _ in FIELDS.values()), *_OTHER_KEYS, *_OTHER_KEYS.values())) | frozenset(
    """
    architectures eagle_config fc_norm layer_types model model_type norm_before_fc norm_output num_aux_hidden_states
    position_per_layer qkv_bias return_hidden_post_norm rope_parameters rope_scaling sliding_window speculators_config
    speculators_model_type target_layer_ids target_vocab_size transformer_layer_config use_aux_hidden_state use_sliding_window
    """.split()
)
_TRUE = "causal is_causal next_layer_regular use_input_layernorm_in_first_layer use_last_layernorm use_rotary_pos_emb"
_FALSE = "additional_fc eh_proj_before_attn mlp_bias parallel_drafting use_moe use_mtp_layernorm"
_ONLY: dict[str, Any] = {
    **dict.fromkeys(_TRUE.split(), True),
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(("parallel_draft_heads_num_layers", "parallel_draft_step", "partial_rotary_factor"), 1),
    "norm_type": "rms",
}
"""Keys that no code here reads, and the value that means the published EAGLE."""
_HARMLESS_KEYS = frozenset(
    """
    add_classification_head add_cross_attention attention_bias attention_head_dim attn_implementation auto_map aux_loss_alpha
    bad_words_ids base_model_name_or_path cache_implementation chunk_size_feed_forward cla_share_factor class_num
    cross_attention_hidden_size decoder_sparse_step dense_list diversity_penalty do_sample dtype early_stopping
    embed_requires_grad exponential_decay_length_penalty finetuning_task first_k_dense_replace has_no_defaults_at_init
    id2label ignore_index initial_context_length initializer_range is_decoder is_encoder_decoder label2id length_penalty
    max_length max_window_layers method min_length mlp_only_layers modal_type n_group num_beam_groups num_beams
    num_nextn_predict_layers num_return_sequences num_target_layers org_vocab_size output_attentions output_hidden_states
    output_scores pad_id pool_type prefix pretraining_tp problem_type pruned_heads quantization_config remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate reuse_target_lm_head routed_scaling_factor scoring_func seq_aux
    speculators_version step_loss_decay suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version ttt_length typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache use_cla use_mrope use_qk_norm
    """.split()
)
_HARMLESS = re.compile(
    r"_.*|(?!mask_|ptd_).*token_(id|index)|.*_(start|end|init|newline)_id|.*dropout.*|.*expert.*|.*router.*|.*topk.*|moe_.*"
    r"|.*begin_suppress_tokens|.*ngram_size|target_model_.*|train_.*"
)
"""Keys of tokenizers, training, generation and experts; a head with experts is refused by its tensors' names."""
_PLAIN_ROPE = ("default", "dynamic", "mrope")
"""Kinds of rotary positions whose frequencies are the plain ones. mrope: the three positions of a token of text are the same.
dynamic: up to `max_position_embeddings`, and heads are trained on no more."""
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_OTHER_ARCHITECTURES = re.compile(r"(?i).*(peagle|dflash|dflare|dspark|domino|mtp|hspec|dspine|dta|edsd)")
_BLOCK_HEADS = re.compile(r"(?i).*(peagle|dflash|dspark)")
_ROPE_READ = frozenset(
    """
    alpha attention_factor beta_fast beta_slow factor high_freq_factor low_freq_factor mrope_interleaved mrope_section mscale
    mscale_all_dim original_max_position_embeddings rope_theta rope_type truncate type
    """.split()
)
"""Keys of a rotary section. alpha: AngelSlim copies the key from the target's config and trains without it."""
_SPECFORGE = re.compile(r"\w+ForCausalLMEagle3")


def flat_config(raw: Raw, overrides: Raw) -> dict[str, Any]:
    """The config as one flat mapping; speculators, ModelOpt and vLLM's configs have sections. `overrides`: keys that the user
    gave beside the file.

    `AUX_KEY` then holds taps. Layer ids count inputs of layers, as taps do, except DeepSpec's `target_layer_ids`, and ids in
    `eagle_config` that begin with layer 1: these count outputs.

    Raises: ModelError for a key that no code reads and that is not harmless, or for a value of another kind.
    """
    _check_kind(raw)
    eagle = _read_section(section_of(raw, "eagle_config"))
    nested = section_of(raw, "model") if raw.get("model_type") == "eagle" else {}
    layer = _read_section(section_of(raw, "transformer_layer_config"))
    merged = {**layer, **_read_section(nested), **eagle, **_read_section(raw)}
    if eagle.get("norm_output") is not None:
        merged[FEEDBACK_KEY] = eagle["norm_output"]
    merged |= {key: value for key, value in overrides.items() if value is not None}
    if "target_vocab_size" in merged:
        merged = {"draft_vocab_size": merged.get("vocab_size")} | merged | {"vocab_size": merged["target_vocab_size"]}
    merged[AUX_KEY] = _taps(merged, eagle)
    for section in _rope_sections(merged).values():
        merged["rope_theta"] = merged.get("rope_theta") if section.get("rope_theta") is None else section["rope_theta"]
    if "head_dim" not in merged:
        width, num_heads = integer(merged, "hidden_size"), integer(merged, "num_attention_heads")
        if num_heads < 1 or width % num_heads:
            raise ModelError(f"config.json has no head_dim, and {num_heads} heads do not divide hidden_size {width}")
        merged["head_dim"] = width // num_heads
    return merged


def _check_kind(raw: Raw) -> None:
    """Raises: ModelError for a head of another kind than EAGLE."""
    kind = raw.get("speculators_model_type") or "eagle3"
    foreign = [name for name in _architectures(raw) if _OTHER_ARCHITECTURES.match(str(name))]
    for key, names in (("speculators_model_type", [kind] * (kind != "eagle3")), ("architectures", foreign)):
        if names:
            is_block = _BLOCK_HEADS.match(str(names[0]))
            why = "drafts blocks and is no EAGLE head" if is_block else "is not served as EAGLE"
            raise ModelError(f"config.json has {key} {names[0]!r}: such a head {why}")


def _read_section(section: Raw) -> dict[str, Any]:
    """A section without nulls, under the official keys. Raises: ModelError for an unknown key or two keys that disagree."""
    given = {key: value for key, value in section.items() if value is not None}
    check_keys(given, _READ_KEYS)
    for other, key in _OTHER_KEYS.items():
        if other in given and given.setdefault(key, given[other]) != given[other]:
            raise ModelError(f"config.json has {key} {given[key]!r} and {other} {given[other]!r}, which mean the same")
    return given


def check_keys(section: Raw, known: Collection[str], where: str = "") -> None:
    """Raises: ModelError naming the first key that is neither known nor harmless. `where`: of the section, for the message."""
    for key, value in section.items():
        is_harmless = key in _HARMLESS_KEYS or _HARMLESS.fullmatch(key) or value == _ONLY.get(key)
        if value is not None and key not in known and not is_harmless:
            raise ModelError(f"config.json has {key} {value!r}{where}, which is not served")


def _architectures(merged: Raw) -> list[object]:
    names = merged.get("architectures") or []
    return names if isinstance(names, list) else [names]


def _taps(merged: Raw, eagle: Raw) -> list[int]:
    """Taps, low to high; none: the default. Raises: ModelError."""
    if not truth(merged, "use_aux_hidden_state", True):
        return [FINAL]
    key = next((key for key in (AUX_KEY, "target_layer_ids") if merged.get(key)), AUX_KEY)
    ids: Any = merged.get(key) or []
    least = 0 if key == AUX_KEY else -1  # DeepSpec's -1: the embedding
    if not isinstance(ids, list) or not all(type(tap) is int and tap >= least for tap in ids):
        raise ModelError(f"config.json has {key} {ids!r}, not a list of whole numbers from {least}")
    from_eagle_config = ids is eagle.get(AUX_KEY)
    counts_outputs = key != AUX_KEY or (from_eagle_config and min(ids) == 1)
    taps = sorted(tap + counts_outputs for tap in ids)
    num_taps = len(taps) or NUM_AUX_LAYERS
    if (count := integer(merged, "num_aux_hidden_states", num_taps)) != num_taps:
        raise ModelError(f"config.json has num_aux_hidden_states {count} and {key} {ids}")
    return taps


def config_of(family: EagleFamily, merged: Raw, tensors: Mapping[str, Tensor]) -> HeadConfig:
    """The configuration of a head. `merged`: of `flat_config`; `tensors`: under the official names. Raises: ModelError."""
    if (activation := merged.get("hidden_act") or "silu") != "silu":
        raise ModelError(f"config.json has hidden_act {activation!r}; silu is served")
    if truth(merged, "norm_before_fc") and truth(merged, "fc_norm"):
        raise ModelError("config.json has both norm_before_fc and fc_norm")
    attention = ("midlayer." if family is EagleFamily.EAGLE3 else "layers.0.") + "self_attn."
    num_layers, positions_per_layer = _layers(merged, tensors)
    fields = {
        field: kind(merged, key, merged.get(absent) if isinstance(absent, str) else absent)
        for field, (key, kind, absent) in FIELDS.items()
    }
    has_bias = family is EagleFamily.EAGLE and "fc.bias" in tensors  # the published code reads an absent key as true
    drafts_all = fields["draft_vocab_size"] == fields["vocab_size"]
    return HeadConfig(
        family=family,
        **fields,
        aux_layers=tuple(merged[AUX_KEY]),
        fc_bias=truth(merged, "bias", has_bias),
        norm_before_fc=truth(merged, "norm_before_fc") or truth(merged, "fc_norm"),
        norm_output=_feeds_normed(merged),
        num_layers=num_layers,
        positions_per_layer=positions_per_layer,
        qkv_bias=truth(merged, "qkv_bias", f"{attention}q_proj.bias" in tensors),
        output_bias=f"{attention}o_proj.bias" in tensors,
        qk_norm=f"{attention}q_norm.weight" in tensors,
        shares_lm_head=family is EagleFamily.EAGLE3 and drafts_all and "lm_head.weight" not in tensors,
        window=_window(merged, num_layers),
        rope=_rope(merged),
    )


def _layers(merged: Raw, stored: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many layers the head has, and how many positions each drafts: 0 where they are one stack. Raises: ModelError."""
    count = integer(merged, "num_hidden_layers", 1)
    found = {int(match[1]) for name in stored if (match := re.match(r"layers\.(\d{1,9})\.", name))} | {0}
    if len(found) == 1 or any(re.match(r"layers\.[1-9]\d*\.input_layernorm\.weight", name) for name in stored):
        return count, 0
    positions = integer(merged, POSITIONS_KEY, 0)
    if positions < 1:
        raise ModelError(
            f"this is a PosS head of {len(found)} layers (layers.{max(found)}); its files do not say how many positions each "
            f"drafts: set drafting.eagle.positions_per_layer, or {POSITIONS_KEY} in its config.json"
        )
    return len(found), positions


def _feeds_normed(merged: Raw) -> bool:
    """Raises: ModelError where SpecForge's architectures have `norm_output`, unless a key says its meaning.

    `norm_output` of SpecForge before September 2026 is the norm in front of the output layer; since then, and for all others, the
    normed state is fed back. A head with norms of its taps is later than that.
    """
    is_specforge = any(_SPECFORGE.fullmatch(str(name)) for name in _architectures(merged))
    is_dated = truth(merged, "fc_norm") or "speculators_config" in merged or FEEDBACK_KEY in merged
    if "norm_output" in merged and is_specforge and not is_dated:
        normed = truth(merged, "norm_output")
        older = "feeds back the state before the norm" if normed else "has no norm before the output layer (not served)"
        later = "feeds back the normed state" if normed else "feeds back the state before the norm"
        raise ModelError(
            f"config.json has norm_output {str(normed).lower()}: SpecForge before September 2026 {older}; SGLang, TensorRT-LLM "
            f"and SpecForge since then {later}. Set drafting.eagle.norm_output: true feeds back the normed state, false the "
            "state before the norm"
        )
    return truth(merged, FEEDBACK_KEY, truth(merged, "norm_output"))


def _window(merged: Raw, num_layers: int) -> int:
    """Positions that each row attends to; 0: all. Raises: ModelError for layers that differ."""
    kinds = merged.get("layer_types") or []
    if not isinstance(kinds, list) or len(set(map(str, kinds))) > 1 or len(kinds) not in (0, num_layers):
        raise ModelError(
            f"config.json has layer_types {kinds} and num_hidden_layers {num_layers}: not one kind for each"
        )
    if kinds and kinds[0] not in ("full_attention", "sliding_attention"):
        raise ModelError(f"config.json has layer_types {kinds}; full_attention and sliding_attention are served")
    slides = kinds[0] == "sliding_attention" if kinds else truth(merged, "use_sliding_window", True)
    window = integer(merged, "sliding_window", 0) if slides else 0
    if window < 1 and slides and (kinds or merged.get("use_sliding_window") or "sliding_window" in merged):
        raise ModelError(f"config.json has sliding_window {merged.get('sliding_window')!r}, not the width of a window")
    return window


def _rope_sections(merged: Raw) -> dict[str, Raw]:
    """Sections of rotary positions. Of sections for each kind of attention, speculators reads the sliding one's."""
    sections = {}
    for key in _ROPE_KEYS:
        section = section_of(merged, key)
        sections[key] = section_of(section, "sliding_attention") or section_of(section, "full_attention") or section
        check_keys(sections[key], _ROPE_READ, f" in {key}")
    return sections


def _rope(merged: Raw) -> dict[str, Any]:
    """transformers' `rope_parameters` of rotary positions that are not plain. Raises: ModelError."""
    rope: dict[str, Any] = {}
    for key, section in _rope_sections(merged).items():
        kind = section.get("rope_type") or section.get("type") or "default"
        if not isinstance(kind, str) or not (kind in _PLAIN_ROPE or kind in _ROPE_NUMBERS):
            kinds = ", ".join((*_ROPE_NUMBERS, "dynamic", "mrope"))
            raise ModelError(f"config.json has {key} of type {kind!r}; default, {kinds} are served")
        for name in _ROPE_NUMBERS.get(kind, ()):
            if not number(section, name, 0.0) > 0.0:
                raise ModelError(f"config.json has {key} of type {kind!r} without a {name} above 0")
        if kind in _ROPE_NUMBERS:
            rope = {name: value for name, value in section.items() if name not in ("type", "rope_theta")}
            rope["rope_type"] = kind
    return rope
