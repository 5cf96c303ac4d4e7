"""The attention function and hidden-state taps for models whose own transformers forward runs.

`register_attention` registers the attention function with transformers as "ragspec".
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.backend import ForwardContext

_IGNORED = frozenset("is_causal position_ids use_cache output_attentions output_hidden_states cache_position".split())
"""Keywords of transformers that do not change the result."""


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    forward_context: ForwardContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Paged attention as transformers calls it; keys arrive rotated.

    Shapes: query [1, heads, N, head_dim], key and value [1, KV heads, N, head_dim] -> [1, N, heads, head_dim].
    Raises: ModelError for an unknown keyword that may change the result.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _IGNORED]
    if unknown or forward_context is None:
        raise ModelError(
            f"{type(module).__name__} passes {unknown or 'no forward_context'} to attention, which the engine does not know"
        )
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scaling is None else scaling
    shape = AttentionShape(query.shape[1], key.shape[1], head_dim, scale, sliding_window or 0, softcap or 0.0)
    # [N, heads + 2 KV heads, D]
    qkv = torch.cat([query, key, value], 1)[0].transpose(0, 1)
    layer = module.layer_idx
    if not forward_context.pool.fits(layer, shape):
        raise ModelError(
            f"layer {layer} has {shape.num_kv_heads} heads of {head_dim}, which its cache was not made for"
        )
    return forward_context.attend(layer, qkv, shape, None)[None], None


def register_attention() -> None:
    """Call before a model of transformers is built."""
    from transformers import AttentionInterface  # Why here: two seconds of imports

    AttentionInterface.register("ragspec", paged_attention)


@contextmanager
def tapped_layers(decoder: Any, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Records the stream entering some layers of a transformers decoder, by tap. Shape of each: [1, N, H]."""
    tapped: dict[int, torch.Tensor] = {}
    with ExitStack() as hooks:
        for tap in taps:
            module = decoder.layers[tap] if tap < len(decoder.layers) else decoder.norm
            record = functools.partial(_record_input, tapped, tap)
            hooks.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield tapped


def _record_input(tapped: dict[int, torch.Tensor], tap: int, module: Any, args: Any, kwargs: Any) -> None:
    tapped[tap] = args[0] if args else kwargs["hidden_states"]
