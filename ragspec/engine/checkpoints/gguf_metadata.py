"""Holds a GGUF file to its metadata: every key and tensor that changes numbers is applied, or refused by its name.

transformers builds the configuration, the weights and the tokenizer, and leaves out what it does not know without a word. RoPE
scaling is applied here, with the meaning that llama.cpp gives it.

>>> metadata = GgufMetadata(gguf.GGUFReader("model.gguf"))
>>> metadata.scale_rotation(config)
>>> metadata.check_keys(config)
"""

import logging
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers
from transformers import modeling_gguf_pytorch_utils
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from ragspec.engine.checkpoints.model_config import head_dim
from ragspec.errors import ModelError

log = logging.getLogger(__name__)

_SCALING = frozenset({
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip
"""Keys of the architecture that `scale_rotation` reads."""

_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "pooling_type"})
"""Keys of the architecture that change no number of a text."""

_NEUTRAL: dict[str, object] = {
    "attention.causal": True, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.sliding_window": 0,
    "expert_count": 0, "expert_used_count": 0, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
"""Keys of the architecture that change no number with this value."""

_ATTRIBUTES = {
    "attention.key_length": "head_dim", "attention.value_length": "head_dim", "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
"""Keys of the architecture that transformers leaves to its class: the class must have the same value."""

_TOKENIZER = frozenset({
    "model", "pre", "tokens", "scores", "token_type", "merges", "precompiled_charsmap", "bos_token_id", "eos_token_id",
    "unknown_token_id", "padding_token_id", "add_space_prefix", "add_bos_token", "add_eos_token",
    "token_type_count", "add_sep_token", "seperator_token_id", "cls_token_id", "mask_token_id", "eot_token_id", "eom_token_id",
    "prefix_token_id", "suffix_token_id", "middle_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id",
    "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id",
})  # fmt: skip
"""Keys below `tokenizer.ggml.` that transformers reads, or that change no token of a text."""

_GPT2_SPLITS = frozenset({
    "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais",
    "trillion", "granite-docling", "smollm",
})  # fmt: skip
"""Values of `tokenizer.ggml.pre` for which llama.cpp splits texts as GPT-2 does. "smollm" splits off digits first; its vocabulary
joins none, so only several spaces before a digit become other tokens. The default target's texts were always made without."""

_DIGIT_SPLITS = frozenset({"starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of `tokenizer.ggml.pre` for which llama.cpp splits off each digit, then splits as GPT-2 does."""

_UNUSED_TENSORS = (".attn_rot_embd.weight", ".attn_rot_embd", ".rotary_emb.inv_freq")
_FREQUENCIES = "rope_freqs.weight"


class GgufMetadata:
    """The keys and tensor names of a GGUF file. `reader`: a `gguf.GGUFReader`."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._architecture = str(self._value("general.architecture"))

    def scale_rotation(self, config: Any) -> None:
        """Put the file's RoPE scaling into the configuration. Raises: ModelError for scaling of another kind."""
        factor = float(self._own("rope.scaling.factor") or self._own("rope.scale_linear") or 1.0)
        kind = self._own("rope.scaling.type") or "linear"
        attention = float(self._own("rope.scaling.attn_factor") or 1.0)
        frequencies = self._frequency_factors()
        if kind not in ("none", "linear", "yarn"):
            raise ModelError(f"RoPE scaling {kind!r} ({self._architecture}.rope.scaling.type) is not applied")
        if kind == "none":
            factor = 1.0
        if frequencies and kind == "yarn":
            raise ModelError(f"{_FREQUENCIES} together with RoPE scaling of the kind 'yarn' is not applied")
        if attention != 1.0 and kind != "yarn":
            raise ModelError(f"{self._architecture}.rope.scaling.attn_factor is applied with RoPE scaling 'yarn' only")
        if frequencies:
            scaled = [factor * each for each in frequencies]
            # Why longrope: of transformers' kinds it is the one that takes a factor for each frequency
            scaling = {"rope_type": "longrope", "short_factor": scaled, "long_factor": scaled, "factor": 1.0}
            scaling |= {"attention_factor": 1.0, "original_max_position_embeddings": config.max_position_embeddings}
        elif factor == attention == 1.0:
            return
        elif kind == "linear":
            scaling = {"rope_type": "linear", "factor": factor}
        else:
            original = self._own("rope.scaling.original_context_length") or config.max_position_embeddings
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
            scaling |= {"beta_fast": float(self._own("rope.scaling.yarn_beta_fast") or 32.0)}
            scaling |= {"beta_slow": float(self._own("rope.scaling.yarn_beta_slow") or 1.0)}
            scaling |= {"attention_factor": attention * (1.0 + 0.1 * math.log(factor))}
        self._set_rotation(config, scaling)

    def check_keys(self, config: Any) -> None:
        """Raises: ModelError naming every key that may change numbers or tokens and is not applied."""
        unknown = [key for key in self._fields if not self._is_applied(key, config)]
        if unknown:
            raise ModelError(f"{', '.join(f'{key} = {self._shown(key)}' for key in unknown)}: not known here")

    def check_tensors(self, model: Any) -> None:
        """Raises: ModelError naming the tensors that no parameter of the model takes."""
        library: Any = modeling_gguf_pytorch_utils
        processor = library.TENSOR_PROCESSORS.get(self._architecture, library.TensorProcessor)(config={})
        # Why first without children: their names are those of the model, and looking them up takes seconds
        whole = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
        for part in (whole, model):
            unknown = self._without_place(library.get_gguf_hf_weights_map(part, processor))
            if not unknown:
                return
        raise ModelError(f"{type(model).__name__} has no place for {len(unknown)} tensors, the first is {unknown[0]}")

    def set_split(self, tokenizer: Any) -> None:
        """Make the tokenizer split texts by `tokenizer.ggml.pre` where transformers does not know it.

        Raises: ModelError for a value that is unknown here, too.
        """
        if self._value("tokenizer.ggml.model") != "gpt2":
            return
        split = self._value("tokenizer.ggml.pre")
        if split is None:
            log.warning("the GGUF file has no tokenizer.ggml.pre: texts are split as GPT-2 splits them")
        elif split in _DIGIT_SPLITS:
            own = tokenizer.backend_tokenizer
            digits = pre_tokenizers.Digits(individual_digits=True)
            own.pre_tokenizer = pre_tokenizers.Sequence([digits, own.pre_tokenizer])
        elif split not in GGUF_PRE_TOKENIZER_SPLITS and split not in _GPT2_SPLITS:
            raise ModelError(f"the way of splitting texts {split!r} (tokenizer.ggml.pre) is not known here")

    def _without_place(self, places: Mapping[str, str]) -> list[str]:
        """Names of tensors that are not used."""
        used = [name for name in self._tensors if name != _FREQUENCIES and not name.endswith(_UNUSED_TENSORS)]
        return [name for name in used if not {name, name.removesuffix(".weight")} & places.keys()]

    def _value(self, key: str) -> Any:
        return self._fields[key].contents() if key in self._fields else None

    def _own(self, key: str) -> Any:
        return self._value(f"{self._architecture}.{key}")

    def _shown(self, key: str) -> str:
        return str(self._value(key))[:40]

    def _frequency_factors(self) -> list[float]:
        """The divisors of the frequencies; empty if all are 1."""
        tensor = self._tensors.get(_FREQUENCIES)
        factors = [] if tensor is None else np.asarray(tensor.data, np.float32).ravel().tolist()
        return [] if all(factor == 1.0 for factor in factors) else factors

    def _set_rotation(self, config: Any, scaling: dict[str, Any]) -> None:
        rotation = getattr(config, "rope_parameters", None)
        num_frequencies = round(_rotary_width(config) / 2)
        if not rotation or len(scaling.get("short_factor", ())) not in (0, num_frequencies):
            raise ModelError(f"RoPE scaling is not applied to {self._architecture} with {num_frequencies} frequencies")
        if "full_attention" not in rotation:
            config.rope_parameters = rotation | scaling
        elif scaling["rope_type"] == "linear":  # layers with a window keep their frequencies, as in llama.cpp
            config.rope_parameters = rotation | {"full_attention": rotation["full_attention"] | scaling}
        else:
            raise ModelError(f"RoPE scaling {scaling['rope_type']!r} is not applied to {self._architecture}")

    def _is_applied(self, key: str, config: Any) -> bool:
        group, _, name = key.partition(".")
        if group in ("GGUF", "general"):
            return True
        if group == "tokenizer":
            if name == "ggml.add_space_prefix":
                return self._has_usual_prefix(key)
            own = name.removeprefix("ggml.")
            return own in _TOKENIZER or name.startswith("chat_template") or name == "huggingface.json"
        if group != self._architecture:
            return False
        mapping: Any = modeling_gguf_pytorch_utils.GGUF_TO_TRANSFORMERS_MAPPING["config"]
        known = mapping.get(group) or mapping.get(config.model_type) or {}
        if known.get(name) is not None or name in _SCALING | _HARMLESS:
            return True
        value = self._value(key)
        is_unlimited = name == "attention.sliding_window" and value >= config.max_position_embeddings
        return is_unlimited or _equal(value, _NEUTRAL.get(name)) or _equal(value, _class_value(name, config))

    def _has_usual_prefix(self, key: str) -> bool:
        """Whether a space stands before a text exactly if transformers' tokenizer of the kind puts it there."""
        is_sentencepiece = self._value("tokenizer.ggml.model") == "llama"
        return bool(self._value(key)) == (is_sentencepiece and not self._architecture.startswith("gemma"))


def _class_value(name: str, config: Any) -> object:
    """The value in the configuration of a key that transformers leaves to its class; None if there is none."""
    if name == "rope.dimension_count":
        return _rotary_width(config)
    if name == "rope.freq_base_swa":
        rotation: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        return rotation.get("sliding_attention", {}).get("rope_theta")
    attribute = _ATTRIBUTES.get(name, "")
    return head_dim(config) if attribute == "head_dim" else getattr(config, attribute, None)


def _rotary_width(config: Any) -> float:
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    return head_dim(config) * float(share)


def _equal(value: object, expected: object) -> bool:
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-6)
    return value == expected
