"""An EAGLE head's network: one decoder layer, or a few, over pairs (state, next token).

Pair t is (feature F_t, token x_{t+1}) at rotary position t. Its output h_t replaces F_{t+1} in the next draft step: the state
of a draft's first row is the target's, the states of later rows are the head's own outputs. `EagleHead` holds the weights by
their published names and the formulas, and trains. `EagleNetwork` runs a head in the engine, with products and attention of the
target's backend over ragged batches. Owns no sequence and no tree: `ragspec.drafting.eagle.drafter` does.

    >>> network = EagleNetwork(read_head(path), target, max_positions=2048)
    >>> hidden = network.first(token_ids, features, cache, metadata)         # [N, H]
    >>> logits = network.logits(hidden)                                      # [N, Vd]
    >>> states = EagleHead(config).unroll(embedded, features, rows, Objective(num_steps=4))       # [4, B, A, H]

Sources: EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840), HASS (arXiv
2408.15766), PosS (arXiv 2506.03566).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint, HeadConfig, check_fits, default_aux_layers
from ragspec.drafting.heads.layer import (
    FINAL,
    DecoderLayer,
    DraftTarget,
    HeadAttention,
    KeyValues,
    RmsNorm,
    Rotations,
    float_dtype,
    make_cache,
    make_layer,
    prepare,
    serve,
)
from ragspec.drafting.heads.learning import Head, Inputs, LossWeights, Objective, Projection, rows_of
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Ints
from ragspec.numerics.backend import ForwardContext, LogitRows
from ragspec.numerics.kv_cache import KvPool

HIDDEN_SCORE = -30_000.0


class FeatureNorm(RmsNorm):
    """One norm over the features of all taps, or a norm for each tap. Shapes: weight [groups, F / groups]."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, self.weight.shape)
        return (F.rms_norm(groups, groups.shape[-1:], None, self.eps) * self.weight).flatten(-2)


class EagleHead(Head):
    """Weights and formulas. `num_norms`: norms of the features, where the dialect has any."""

    def __init__(self, config: HeadConfig, num_norms: int = 1) -> None:
        super().__init__()
        self.config = self.shape = config
        self.is_eagle3 = config.family is EagleFamily.EAGLE3
        self.loss_weights = LossWeights(teacher=1.0) if self.is_eagle3 else LossWeights(state=1.0, teacher=0.1)
        width, eps, num_features = config.hidden_size, config.rms_norm_eps, config.num_features
        if not config.reads_final:
            self.fc = nn.Linear(num_features if self.is_eagle3 else 2 * width, width, bias=config.fc_bias)
        layers = {str(i): stack_layer(config, i) for i in range(config.num_layers)}
        if self.is_eagle3:
            self.midlayer = layers.pop("0")
            self.norm = RmsNorm(width, eps)
            if not config.shares_lm_head:
                self.lm_head: nn.Module = nn.Linear(width, config.draft_vocab_size, bias=False)
            if config.norm_before_fc:
                self.fc_norm = FeatureNorm([num_norms, num_features // num_norms], eps)
            if config.draft_vocab_size < config.vocab_size:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
                self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        if layers:
            self.layers = nn.ModuleDict(layers)

    def layer(self, index: int = 0) -> DecoderLayer:
        is_first_of_eagle3 = self.is_eagle3 and index == 0
        return self.midlayer if is_first_of_eagle3 else cast(DecoderLayer, self.layers[str(index)])

    def index_at(self, depth: int) -> int:
        """The specialist that drafts `depth` levels below the root."""
        return min(depth // max(1, self.shape.positions_per_layer), self.shape.num_layers - 1)

    def read(self, features: Tensor) -> Tensor:
        """The state of the first draft step. EAGLE-3 projects several layers of the target to one state."""
        if not self.is_eagle3 or self.shape.reads_final:
            return features
        normed = self.fc_norm(features) if self.shape.norm_before_fc else features
        return cast(Tensor, self.fc(normed)).float()

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and the rows that the first layer attends with. Shapes: [..., H] twice -> [..., H], [..., inputs].

        EAGLE-1 and 2: one projection of both, without a norm. EAGLE-3: both normed, side by side.
        """
        if not self.is_eagle3:
            joined = cast(Tensor, self.fc(torch.cat([embedded, state], -1))).float()
            return joined, joined
        normed = self.midlayer.hidden_norm(state)
        residual = normed if self.shape.norm_before_residual else state
        return residual, torch.cat([self.midlayer.input_layernorm(embedded), normed], -1)

    def output(self, hidden: Tensor) -> Tensor:
        """The state that is fed back."""
        return self.norm(hidden) if self.shape.norm_output else hidden

    def logits(self, state: Tensor, project: Projection, step: int = 0, previous: Tensor | None = None) -> Tensor:
        if not self.is_eagle3:
            return project(state)
        normed = state if self.shape.norm_output else self.norm(state)
        return project(normed) if self.shape.shares_lm_head else cast(Tensor, self.lm_head(normed))

    def fed_back(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and state of a later draft step's pair. Shapes: [B, A, H] each."""
        return embedded, state

    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        """The states of chosen rows after 1..num_steps draft steps over the given text.

        Every row drafts as it does when serving (EAGLE-3's training-time test, HASS's harmonised context): keys of the text come
        from true features; later steps of a row attend to the keys up to its pair, and to its own drafted states. A specialist of
        PosS computes all of these keys by its own layer. Behind the text's end, the last token is repeated; callers ignore those
        states.

        Shapes: embedded float32 [B, T, H] of tokens 0..T-1, features [B, T, F], rows int64 [B, A] -> [num_steps, B, A, H].
        """
        inputs, num_pairs = objective.inputs, embedded.shape[1] - 1
        shift = int(inputs is not Inputs.UNSHIFTED)
        tables = rotations_of(self.shape, num_pairs + objective.num_steps)
        cos, sin = (table.to(embedded.device) for table in tables)
        residual, text_x = self.join(*inputs.kept(embedded[:, shift : shift + num_pairs], self.read(features[:, :-1])))
        text_rotations = cos[None, :num_pairs], sin[None, :num_pairs]
        attention = self.layer().self_attn
        text = attention.keys_values(text_x, text_rotations)
        positions = torch.arange(num_pairs, device=embedded.device)
        bias = torch.where(positions <= rows[..., None], 0.0, HIDDEN_SCORE)[:, None, None]  # [B, 1, 1, A, T - 1]
        x, residual = rows_of(text_x, rows), rows_of(residual, rows)
        drafted: list[Tensor] = []  # the rows of the draft steps so far
        own: list[KeyValues] = []
        states: list[Tensor] = []
        for step in range(objective.num_steps):
            layer = self.layer(self.index_at(step))
            if step:
                tokens = rows_of(embedded, (rows + shift + step).clamp(max=num_pairs))
                state = states[-1].detach() if objective.is_detached else states[-1]
                residual, x = self.join(*inputs.kept(*self.fed_back(tokens, state)))
                drafted.append(x)
                if layer.self_attn is not attention:  # a specialist takes over
                    attention, own = layer.self_attn, []
                    text = attention.keys_values(text_x, text_rotations)
                for i in range(len(own), len(drafted)):
                    own.append(attention.keys_values(drafted[i], (cos[rows + i + 1], sin[rows + i + 1])))
            attended = attention(x, (cos[rows + step], sin[rows + step]), text, own, bias)
            states.append(self.output(layer.finish(residual, attended)))
        return torch.stack(states)


def stack_layer(config: HeadConfig, index: int = 1) -> DecoderLayer:
    """A layer of a stack; the first of an EAGLE-3 head reads pairs."""
    is_first_of_eagle3 = config.family is EagleFamily.EAGLE3 and index == 0
    head_dim, width, eps = config.head_dim, config.hidden_size, config.rms_norm_eps
    shape = AttentionShape(config.num_heads, config.num_kv_heads, head_dim, head_dim**-0.5, config.window)
    inputs = 2 * width if is_first_of_eagle3 else width
    attention = HeadAttention(
        shape, inputs, width, eps, qkv_bias=config.qkv_bias, output_bias=config.output_bias, qk_norm=config.qk_norm
    )
    layer = DecoderLayer(attention, config.intermediate_size, eps)
    if is_first_of_eagle3:
        layer.hidden_norm = RmsNorm(width, eps)
    if is_first_of_eagle3 or (index and not config.positions_per_layer):
        layer.input_layernorm = RmsNorm(width, eps)
    return layer


def check_trainable(config: HeadConfig) -> None:
    """Raises: ModelError for a head that `EagleHead.unroll` would compute otherwise than it is served."""
    if config.window or (config.num_layers > 1 and not config.positions_per_layer):
        raise ModelError("heads with a sliding window or a stack of layers are served, not trained")
    if config.reads_final or config.shares_lm_head:
        raise ModelError("heads without fc or an output layer of their own are served, not trained")


class EagleNetwork:
    """A head with products in `dtype` (None: the target's), everything between them in float32.

    Raises: ModelError if the head was made for another target.
    """

    def __init__(
        self, checkpoint: HeadCheckpoint, target: DraftTarget, max_positions: int, dtype: torch.dtype | None = None
    ) -> None:
        config, tensors = checkpoint
        check_fits(config, target.vocab_size, target.hidden_size, target.num_layers)
        self.config, self.vocab_size, self.num_features = config, config.vocab_size, config.num_features
        self.taps = taps_of(config, target.num_layers)
        self.draft_ids = _draft_ids(tensors, config.draft_vocab_size)
        self._target, self._dtype = target, dtype or target.embedding.dtype
        self._rotations = rotations_of(config, max_positions)
        own = tensors.get("embed_tokens.weight")
        self.embedding = target.embedding if own is None else own.to(target.backend.device, float_dtype(self._dtype))
        self._build(tensors)
        self._ids_on_device = self.backend.tokens(self.draft_ids)

    def _build(self, tensors: Mapping[str, Tensor], lm_head: nn.Module | None = None) -> None:
        """Everything but the embedding. `lm_head`: an output layer that serves already."""
        self.backend = self._target.backend.for_head(self._dtype)
        with torch.device("meta"):
            self.head = self._make_head(tensors)
        prepare(self.head, tensors, self.backend.device, float_dtype(self._dtype))
        if lm_head is not None:
            self.head.lm_head = lm_head
        layers = [self.head.layer(i) for i in range(self.config.num_layers)]
        self._layers = [make_layer(layer, self._rotations, self.backend, i) for i, layer in enumerate(layers)]
        serve(self.head, self.backend)

    def _make_head(self, tensors: Mapping[str, Tensor]) -> Any:
        return EagleHead(self.config, len(tensors.get("fc_norm.weight", [0])))

    def relearned(self, tensors: Mapping[str, Tensor]) -> EagleNetwork:
        """The same head with other weights of its layers. Embedding, output layer and rotations are shared."""
        other = copy.copy(self)
        other._build(tensors, self.head.lm_head)
        return other

    def make_cache(self, pool: KvPool, num_own_slots: int = 0) -> KvPool:
        return make_cache(self._layers, self.backend, pool, num_own_slots)

    def first(self, token_ids: Ints, features: Tensor, cache: KvPool, metadata: AttentionMetadata) -> Tensor:
        """Pairs with states of the target. Shapes: int32 [N], float32 [N, F] -> [N, H].

        A single row is computed twice where a backend's product takes another path for it.
        """
        return self.outputs(token_ids, features, cache, metadata, depth=0)

    def logits(self, hidden: Tensor) -> LogitRows:
        """Logits of the token after each pair, over the draft vocabulary. Shapes: [N, H] -> float32 [N, Vd]."""
        with torch.inference_mode():
            values = self.head.logits(hidden, self._project)
            return self.backend.logits(values, self._ids_on_device, self.config.vocab_size)

    def first_logits(self, states: Tensor, next_tokens: Ints) -> LogitRows:
        return self.logits(states)

    def _project(self, states: Tensor) -> Tensor:
        return self._target.logits_of(states.to(self._target.embedding.dtype))

    @torch.inference_mode()
    def outputs(
        self, token_ids: Ints | Tensor, states: Tensor, cache: KvPool, metadata: AttentionMetadata, depth: int
    ) -> Tensor:
        """Pairs `depth` levels below the root, with states that the head itself computed; at the root, with the target's.

        Shapes: int32 [N], [N, H] or at the root [N, F] -> [N, H].
        """
        num_rows, tokens = len(token_ids), self.backend.tokens(token_ids)
        if num_rows < self.backend.least_rows:
            tokens, states = tokens.repeat(2), states.repeat(2, 1)
        embedded = F.embedding(tokens, self.embedding).float()
        residual, x = self.head.join(embedded, states if depth else self.head.read(states))
        hidden = self._through_layers(residual, x, self.backend.context(cache, metadata), depth)
        return cast(Tensor, self.head.output(hidden))[:num_rows]

    def _through_layers(self, residual: Tensor, x: Tensor, context: ForwardContext, depth: int) -> Tensor:
        """A stack's layers all run. Of specialists that of the position runs; later specialists only keep the rows' keys."""
        if not self.config.positions_per_layer:
            hidden = self._layers[0](residual, x, context)
            for i in range(1, len(self._layers)):
                hidden = self._layers[i](hidden, self.head.layer(i).input_layernorm(hidden), context)
            return hidden
        specialist, *later = self._layers[self.head.index_at(depth) :]
        for layer in later:
            layer.write(x, context)
        return specialist(residual, x, context)


def taps_of(config: HeadConfig, num_layers: int) -> tuple[int, ...]:
    """The taps of the target that a head reads, low to high."""
    if config.family is EagleFamily.EAGLE:
        return (FINAL,)
    return config.aux_layers or default_aux_layers(num_layers)


def _draft_ids(tensors: Mapping[str, Tensor], draft_vocab_size: int) -> NDArray[np.int64]:
    """The target's id of each draft token. Shape: int64 [Vd]."""
    ids = torch.arange(draft_vocab_size)
    return cast(NDArray[np.int64], (ids + tensors["d2t"] if "d2t" in tensors else ids).numpy())


def rotations_of(config: HeadConfig, num_positions: int) -> Rotations:
    """Of the positions from 0 on. Shapes: float32 [positions, head_dim] each."""
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
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies.double()
    both = torch.cat([angles, angles], 1)
    return (both.cos() * factor).float(), (both.sin() * factor).float()
