"""An EAGLE head's network as the engine runs it: products and attention of the target's backend, ragged batches.

One decoder layer, or a few, over pairs (state, next token). The state of a draft's first row is the target's, the states of
later rows are the head's own outputs. Owns no sequence and no tree: `ragspec.drafting.eagle.drafter` does.

    >>> network = EagleNetwork(read_head(path), target)
    >>> hidden = network.first(token_ids, features, cache, metadata)         # [N, H]
    >>> logits = network.logits(hidden)                                  # [N, Vd]

Sources: EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ragspec.drafting.eagle.checkpoint import EagleFamily, HeadCheckpoint, HeadConfig, check_fits, default_aux_layers
from ragspec.drafting.eagle.layout import layer_prefix
from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.heads.layer import make_cache, make_layer, make_norm
from ragspec.drafting.heads.target import FINAL, HeadTarget, float_dtype
from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Ints
from ragspec.numerics.backend import ForwardContext, LayerModule, LogitRows
from ragspec.numerics.kv_cache import KvPool


class EagleNetwork:
    """A head's weights, products in `dtype` (None: the target's), everything between them in float32.

    Raises: ModelError if the head was made for another target.
    """

    def __init__(
        self, checkpoint: HeadCheckpoint, target: HeadTarget, max_positions: int, dtype: torch.dtype | None = None
    ) -> None:
        config, tensors = checkpoint
        check_fits(config, target.vocab_size, target.hidden_size, target.num_layers)
        self.config, self.vocab_size = config, config.vocab_size
        self.taps = taps_of(config, target.num_layers)
        self.draft_ids = _draft_ids(tensors, config.draft_vocab_size)
        dtype = dtype or target.embedding.dtype
        self._target, self.backend, self._product_dtype = target, target.backend.for_head(dtype), dtype
        dtype = float_dtype(dtype)
        self._ids_on_device = self.backend.tokens(self.draft_ids)
        self._dtype, self._rotations = dtype, _rotations(config, max_positions)
        weights = self._weights_of(tensors)
        self.embedding = weights.get("embed_tokens.weight", target.embedding)
        self._build(weights)
        is_eagle3 = config.family is EagleFamily.EAGLE3
        self._lm_head = self.backend.make_linear(weights["lm_head.weight"]) if is_eagle3 else None

    def relearned(self, tensors: Mapping[str, Tensor]) -> EagleNetwork:
        """The same head with other weights of its layers. Embedding, output layer and rotations are shared."""
        other = copy.copy(self)
        other.backend = self._target.backend.for_head(self._product_dtype)
        other._build(self._weights_of(tensors))
        return other

    def make_cache(self, pool: KvPool, num_own_slots: int = 0) -> KvPool:
        return make_cache(self._layers, self.backend, pool, num_own_slots)

    def first(self, token_ids: Ints, features: Tensor, cache: KvPool, metadata: AttentionMetadata) -> Tensor:
        """Pairs with states of the target. Shapes: int32 [N], float32 [N, F] -> [N, H].

        A single row is computed twice where a backend's product takes another path for it.
        """
        with torch.inference_mode():
            return self._outputs(token_ids, features, cache, metadata, depth=0)

    def further(
        self, token_ids: Ints | Tensor, states: Tensor, cache: KvPool, metadata: AttentionMetadata, depth: int = 1
    ) -> Tensor:
        """Pairs with states that the head itself computed, `depth` levels below the root. Shapes: int32 [N], [N, H] -> [N, H]."""
        with torch.inference_mode():
            return self._outputs(token_ids, states, cache, metadata, depth)

    def logits(self, hidden: Tensor) -> LogitRows:
        """Logits of the token after each pair, over the draft vocabulary. Shapes: [N, H] -> float32 [N, Vd]."""
        with torch.inference_mode():
            if self._lm_head is None:
                values = self._target.logits_of(hidden.to(self._target.embedding.dtype))
            else:
                values = self._product(self._lm_head, hidden if self.config.norm_output else self._norm(hidden))
            return self.backend.logits(values, self._ids_on_device, self.config.vocab_size)

    def _weights_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        return {name: tensor.to(self.backend.device, self._dtype) for name, tensor in floats.items()}

    def _build(self, weights: dict[str, Tensor]) -> None:
        """Everything but embedding and output layer."""
        self._fc = self.backend.make_linear(weights["fc.weight"], weights.get("fc.bias"))
        self._build_layers(weights)
        if self.config.family is EagleFamily.EAGLE3:
            self._build_norms(weights)

    def _build_layers(self, weights: dict[str, Tensor]) -> None:
        config = self.config
        shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5, config.window
        )
        self._layers, self._input_norms = list[LayerModule](), {}
        for i in range(config.num_layers):
            prefix = layer_prefix(config.family, i)
            layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
            self._layers.append(make_layer(layer, shape, config.rms_norm_eps, self._rotations, self.backend, i))
            if i and not config.positions_per_layer:
                self._input_norms[i] = make_norm(self.backend, layer["input_layernorm.weight"], config.rms_norm_eps)

    def _through_layers(self, residual: Tensor, x: Tensor, context: ForwardContext, depth: int) -> Tensor:
        """A stack's layers all run. Of specialists that of the position runs; later specialists only keep the rows' keys."""
        positions = self.config.positions_per_layer
        if not positions:
            hidden = self._layers[0](residual, x, context)
            for i, norm in self._input_norms.items():
                hidden = self._layers[i](hidden, norm(hidden), context)
            return hidden
        specialist, *later = self._layers[min(depth // positions, self.config.num_layers - 1) :]
        for layer in later:
            layer.write(x, context)
        return specialist(residual, x, context)

    def _build_norms(self, weights: dict[str, Tensor]) -> None:
        """EAGLE-3 norms the embedding, the state and the output, and perhaps the features."""
        eps, prefix = self.config.rms_norm_eps, layer_prefix(self.config.family)
        self._token_norm = make_norm(self.backend, weights[f"{prefix}input_layernorm.weight"], eps)
        self._state_norm = make_norm(self.backend, weights[f"{prefix}hidden_norm.weight"], eps)
        self._norm = make_norm(self.backend, weights["norm.weight"], eps)
        fc_norm = weights.get("fc_norm.weight")
        self._fc_norm = None if fc_norm is None else fc_norm.float()

    def _product(self, layer: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, layer(x.to(self._dtype)).float())

    def _outputs(
        self, token_ids: Ints | Tensor, states: Tensor, cache: KvPool, metadata: AttentionMetadata, depth: int
    ) -> Tensor:
        num_rows, tokens = len(token_ids), self.backend.tokens(token_ids)
        if num_rows < self.backend.least_rows:
            tokens, states = tokens.repeat(2), states.repeat(2, 1)
        embedded = F.embedding(tokens, self.embedding).float()
        build = self._input_3 if self.config.family is EagleFamily.EAGLE3 else self._input_1
        residual, x = build(embedded, states, depth == 0)
        hidden = self._through_layers(residual, x, self.backend.context(cache, metadata), depth)
        if self.config.norm_output:
            hidden = self._norm(hidden)
        return hidden[:num_rows]

    def _input_1(self, embedded: Tensor, states: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
        """EAGLE-1 and 2: one projection of both, without a norm. Shapes: [N, H] twice -> (residual, x) [N, H] each."""
        x = self._product(self._fc, torch.cat([embedded, states], 1))
        return x, x

    def _input_3(self, embedded: Tensor, states: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
        """EAGLE-3: several layers of the target are projected to one state; both halves normed, side by side."""
        if is_first:
            states = self._product(self._fc, self._normed_features(states))
        normalised = self._state_norm(states)
        residual = normalised if self.config.norm_before_residual else states
        return residual, torch.cat([self._token_norm(embedded), normalised], 1)

    def _normed_features(self, features: Tensor) -> Tensor:
        if self._fc_norm is None:
            return features
        parts = features.view(len(features), *self._fc_norm.shape)
        normed = F.rms_norm(parts, parts.shape[-1:], None, self.config.rms_norm_eps) * self._fc_norm
        return normed.view_as(features)


def taps_of(config: HeadConfig, num_layers: int) -> tuple[int, ...]:
    """The taps of the target that a head reads, low to high."""
    if config.family is EagleFamily.EAGLE:
        return (FINAL,)
    return config.aux_layers or default_aux_layers(num_layers)


def _draft_ids(tensors: dict[str, Tensor], draft_vocab_size: int) -> NDArray[np.int64]:
    """The target's id of each draft token. Shape: int64 [Vd]."""
    ids = torch.arange(draft_vocab_size)
    return cast(NDArray[np.int64], (ids + tensors["d2t"] if "d2t" in tensors else ids).numpy())


def _rotations(config: HeadConfig, max_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions of the target, not only the head's. Shapes: float32 [positions, head_dim]."""
    frequencies, factor = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).double() / config.head_dim), 1.0
    if config.rope:
        from transformers import LlamaConfig  # Why here: the classes of configurations take a second
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters={"rope_theta": config.rope_theta, **config.rope},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](llama, torch.device("cpu"))
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies.double()
    both = torch.cat([angles, angles], 1)
    return (both.cos() * factor).float(), (both.sin() * factor).float()


class HeadTimer:
    """Times a head's forwards over a context of zeros. Keys that it writes are never read."""

    def __init__(self, network: EagleNetwork, pool: KvPool) -> None:
        self.network, self._num_slots = network, pool.num_slots
        self._cache = network.make_cache(pool)

    def seconds(self, num_rows: int, context: int) -> float:
        """Seconds of one forward of so many rows, logits included."""
        network, slots = self.network, np.arange(context + num_rows, dtype=np.int32)
        assert len(slots) <= self._num_slots, "the kernel would write beside the cache"
        rows = DraftBatch([ScheduledDraft(slots, num_rows, len(slots), slots[:0])]).chains()
        features = torch.zeros(num_rows, network.config.num_features, device=network.backend.device)
        begin = time.perf_counter()
        network.logits(network.first(np.zeros(num_rows, np.int32), features, self._cache, rows))
        network.backend.wait()
        return time.perf_counter() - begin
