"""The frozen target that a head learns from: features, embeddings and the output layer.

Owns the taps. Tap i is the residual stream in front of layer i, before its norm; tap L (the number of layers) is the stream
behind the last layer, before the final norm. Without taps, the feature is the hidden state behind the final norm. Never trains.

    >>> target = FrozenTarget.load(TargetConfig(), device="cpu")
    >>> features, last = target.states(ids, taps=(2, 15, 27))
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ragspec.config import TargetConfig
from ragspec.engine.checkpoints.model_config import read_tokenizer
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.checkpoints.weights import model_errors
from ragspec.errors import ModelError
from ragspec.training.trainer import fast_dtype

_LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")


class TargetStates(NamedTuple):
    """Shapes: features [B, T, F] of the taps, low to high; last [B, T, H] behind the final norm."""

    features: Tensor
    last: Tensor


class FrozenTarget:
    """A target whose weights get no gradients."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast, device: str = "cpu") -> None:
        config = model.config.get_text_config()
        changed = [name for name in _LOGIT_CHANGES if getattr(config, name, None) not in (None, 1.0)]
        if changed or not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "layers"):
            raise ModelError(f"heads are trained for Llama-like targets, which {type(model).__name__} is not")
        self.model = model.to(device).eval().requires_grad_(False)
        self.tokenizer, self.device = tokenizer, device
        self.config, self.name = config, str(model.name_or_path)
        self.vocab_size, self.hidden_size = int(config.vocab_size), int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)

    @classmethod
    def load(cls, config: TargetConfig, device: str = "cpu", dtype: torch.dtype | None = None) -> Self:
        """Read model and tokenizer. `dtype` None: `fast_dtype`. Raises: ModelError, SaveError."""
        folder = target_folder(config)
        with model_errors(folder):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or fast_dtype(device))
        tokenizer: Any = read_tokenizer(folder)
        return cls(model, tokenizer, device)

    @torch.no_grad()
    def states(self, ids: Tensor, taps: tuple[int, ...] = ()) -> TargetStates:
        """One pass over right-padded texts. Shapes: ids int64 [B, T]."""
        seen: dict[int, Tensor] = {}
        hooks = [self._register_tap(tap, seen) for tap in taps]
        try:
            last = self.model.model(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return TargetStates(torch.cat([seen[tap] for tap in taps], -1) if taps else last, last)

    def _register_tap(self, tap: int, seen: dict[int, Tensor]) -> RemovableHandle:
        def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[tap] = args[0] if args else kwargs["hidden_states"]

        decoder = self.model.model
        module: torch.nn.Module = decoder.norm if tap == self.num_layers else decoder.layers[tap]
        return module.register_forward_pre_hook(record, with_kwargs=True)

    def read(self, inputs: Tensor, sees: Tensor, positions: Tensor) -> Tensor:
        """States behind the final norm of given input embeddings, which get gradients. `sees`: the rows that each row sees.

        Shapes: inputs [B, N, H], sees bool [B, N, N], positions int64 [B, N] -> [B, N, H].
        """
        dtype = self.model.dtype
        hidden = torch.where(sees, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]
        states: Tensor = self.model.model(
            inputs_embeds=inputs.to(dtype), attention_mask=hidden, position_ids=positions, use_cache=False
        ).last_hidden_state
        return states

    def embed(self, ids: Tensor) -> Tensor:
        """Shapes: [B, T] -> float32 [B, T, H]."""
        embedded: Tensor = self.model.model.embed_tokens(ids.to(self.device))
        return embedded.float()

    def logits(self, last: Tensor) -> Tensor:
        """The output layer, in the target's dtype; gradients reach `last`, never the weights. Shapes: [..., H] -> [..., V]."""
        out: Tensor = self.model.lm_head(last.to(self.model.dtype))
        return out
