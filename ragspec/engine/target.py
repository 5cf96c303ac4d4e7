"""The target: a transformers causal LM whose attention reads and writes the engine's slot pool.

The model's own forward runs; only its attention function and known layers are replaced (`ragspec.numerics.layers`). One
forward takes the flattened rows of any number of sequences, prompts and trees alike.

    >>> target = Target.load(TargetConfig(), num_kv_slots=4096)
    >>> logits = target.forward(token_ids, positions, rows, wanted)      # float32 [len(wanted), V]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ragspec.config import TargetConfig
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape, Rows, attend
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import Decoder, StepContext, make_row_invariant

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

_EXPECTED_ABSENT = {
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "cache_position",
}


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    step: StepContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function for models whose attention module is not replaced; keys arrive rotated.

    Shapes: query [1, heads, N, head_dim], key and value [1, KV heads, N, head_dim] -> [1, N, heads, head_dim].
    Raises: ModelError for a keyword that would change the result and is not understood.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _EXPECTED_ABSENT]
    if unknown or step is None:
        raise ModelError(
            f"{type(module).__name__} passes {unknown or 'no step'} to attention, which the engine does not know"
        )
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scaling is None else scaling
    shape = AttentionShape(query.shape[1], key.shape[1], head_dim, scale, sliding_window or 0, softcap or 0.0)
    qkv = (
        torch.cat([query, key, value], 1)[0].transpose(0, 1).float().contiguous().numpy()
    )  # [N, heads + 2 KV heads, D]
    layer = module.layer_idx
    if not step.pool.fits(layer, shape):
        raise ModelError(
            f"layer {layer} has {shape.num_kv_heads} heads of {head_dim}, which its cache was not made for"
        )
    out = attend(qkv, step.pool.keys[layer], step.pool.values[layer], step.rows, shape)
    return torch.from_numpy(out).to(query.dtype)[None], None


AttentionInterface.register("ragspec", paged_attention)


class Target:
    """A loaded model, its tokenizer and its slot pool. Owned by one engine; not thread-safe."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, config: TargetConfig, num_kv_slots: int) -> None:
        self.tokenizer = tokenizer
        self.config = config
        text_config = model.config.get_text_config()
        _check_servable(model, text_config)
        self.vocab_size: int = text_config.vocab_size
        self.hidden_size: int = text_config.hidden_size
        longest = int(text_config.max_position_embeddings)
        self._num_positions = longest
        self.max_context_tokens = min(config.max_context_tokens or longest, longest)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.shapes = _attention_shapes(text_config)
        self._change = _LogitChange.of(text_config)
        self.num_parameters = int(sum(p.numel() for p in model.parameters()))
        make_row_invariant(model, longest)
        self._model = model
        self.pool = KvPool(self.shapes, num_kv_slots)

    @classmethod
    def load(cls, config: TargetConfig, num_kv_slots: int) -> Target:
        """Read weights (safetensors, or .bin without pickled code) and tokenizer from a directory or the local hub cache.

        Raises: ModelError.
        """
        dtype = getattr(torch, config.dtype)
        path = config.model
        is_path = Path(path).exists() or path.startswith(("/", "./", "../"))
        if is_path and not (Path(path) / "config.json").is_file():
            raise ModelError(f"{path} is not a model directory: it has no config.json")
        try:
            AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="ragspec", output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as cause:
            raise ModelError(f"cannot load the target {path}: {_first_line(cause)}") from cause
        except Exception as cause:  # safetensors and pickle raise classes of their own
            raise ModelError(f"cannot load the target {path}: {type(cause).__name__}: {_first_line(cause)}") from cause
        model, report = loaded
        if absent := sorted(report["missing_keys"]):
            raise ModelError(f"{path} lacks {len(absent)} of the model's tensors, the first is {absent[0]}")
        return cls(model.eval(), tokenizer, config, num_kv_slots)

    def forward(self, token_ids: Ints, rows: Rows, wanted: Ints) -> Floats:
        """One pass over N rows; logits of the wanted ones.

        Shapes: token_ids int32 [N], rows of N, wanted int32 [W] row numbers -> float32 [W, V].
        """
        with torch.inference_mode():
            return self._logits(self._wanted_states(token_ids, rows, wanted))

    def forward_states(self, token_ids: Ints, rows: Rows, wanted: Ints) -> tuple[Floats, Floats]:
        """As `forward`, and the hidden states that the logits come from. Shapes: -> float32 [W, H], float32 [W, V]."""
        with torch.inference_mode():
            states = self._wanted_states(token_ids, rows, wanted)
            return states.float().numpy(), self._logits(states)

    def states(self, token_ids: Ints, rows: Rows) -> Floats:
        """Hidden states of all rows, as `forward_states` has them; no logits. Shapes: -> float32 [N, H]."""
        with torch.inference_mode():
            return cast(
                Floats, self._wanted_states(token_ids, rows, np.arange(len(token_ids), dtype=np.int32)).float().numpy()
            )

    def _wanted_states(self, token_ids: Ints, rows: Rows, wanted: Ints) -> torch.Tensor:
        assert rows.positions.max() < self._num_positions, "the kernel reads its table of rotations unchecked"
        hidden = self._hidden(torch.from_numpy(token_ids.astype(np.int64)), rows)  # [N, H]
        return hidden[torch.from_numpy(wanted.astype(np.int64))] if len(wanted) < len(token_ids) else hidden

    def _logits(self, states: torch.Tensor) -> Floats:
        return self._change(cast(Floats, self._model.lm_head(states).float().numpy()))  # [W, V]

    def _hidden(self, token_ids: torch.Tensor, rows: Rows) -> torch.Tensor:
        step = StepContext(self.pool, rows)
        if isinstance(self._model.model, Decoder):
            return cast(torch.Tensor, self._model.model(token_ids, step))
        positions = torch.from_numpy(rows.positions.astype(np.int64))
        output = self._model.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, step=step)
        return cast(torch.Tensor, output.last_hidden_state[0])


def _check_servable(model: Any, config: Any) -> None:
    """Raises: ModelError for what the engine would compute wrongly or not at all."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"{type(model).__name__} attends in a way the engine does not know: {', '.join(sorted(unknown))}"
        )
    missing = [name for name in ("model", "lm_head") if not hasattr(model, name)]
    if missing or not getattr(config, "max_position_embeddings", None):
        raise ModelError(f"{type(model).__name__} is not laid out as the engine expects; it serves Llama-like models")


class _LogitChange(NamedTuple):
    """What some models do to their logits, in float32: a factor (Cohere), a divisor (Granite), a soft cap (Gemma 2)."""

    factor: float
    divisor: float
    softcap: float

    @classmethod
    def of(cls, config: Any) -> _LogitChange:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return cls(*(float(getattr(config, name, None) or none) for name, none in zip(names, (1, 1, 0), strict=True)))

    def __call__(self, logits: Floats) -> Floats:
        if self.factor != 1.0:
            logits = logits * np.float32(self.factor)
        if self.divisor != 1.0:
            logits = logits / np.float32(self.divisor)
        if self.softcap:
            logits = np.tanh(logits / np.float32(self.softcap)) * np.float32(self.softcap)
        return logits


def _attention_shapes(config: Any) -> list[AttentionShape]:
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return [AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5) for _ in range(config.num_hidden_layers)]


def _eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    found: set[int] = set()
    for given in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        found.update(given if isinstance(given, list) else [] if given is None else [given])
    return tuple(sorted(found))


def _first_line(cause: BaseException) -> str:
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
