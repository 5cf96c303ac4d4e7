"""Trainable EAGLE heads, whose weights have the published names, and their unrolling over draft steps.

Pair t is (feature F_t, token x_{t+1}) at rotary position t. Its output h_t replaces F_{t+1} in the next draft step, so every row
drafts as it does when serving (EAGLE-3's training-time test, HASS's harmonised context). A specialist of PosS computes the keys
of the text and of the drafted pairs before it by its own layer. Never reads data, never runs the target.

    >>> head = build_head(config)
    >>> states = head.unroll(embedded, features, rows, Objective(num_steps=4))       # [4, B, A, H]

Source: EAGLE 2401.15077, EAGLE-3 2503.01840, HASS 2408.15766, PosS 2506.03566.
"""

from abc import abstractmethod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ragspec.drafting.eagle.checkpoint import EagleFamily, HeadCheckpoint, HeadConfig, write_head
from ragspec.drafting.learning.head import Head, Inputs, LossWeights, Objective, Projection, rows_of

HIDDEN_SCORE = -30_000.0


class KeyValues(NamedTuple):
    """Rotated keys, and values. Shapes: [B, kv_heads, rows, D]."""

    keys: Tensor
    values: Tensor


class HeadAttention(nn.Module):
    """Grouped-query attention of rows over their text's pairs and over their own earlier draft steps."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.rope_theta = config.rope_theta
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> KeyValues:
        """Shapes: inputs [B, rows, input_size], positions [B or 1, rows]."""
        keys = self._rotated(self._split(self.k_proj(inputs), self.num_kv_heads), positions)
        return KeyValues(keys, self._split(self.v_proj(inputs), self.num_kv_heads))

    def forward(self, inputs: Tensor, positions: Tensor, text: KeyValues, own: list[KeyValues], bias: Tensor) -> Tensor:
        """Row a attends to the text's pairs that `bias` does not hide, and to row a of each earlier draft step.

        Shapes: inputs [B, A, input_size], bias [B, 1, 1, A, T] -> [B, A, H].
        """
        size, num_rows = inputs.shape[:2]
        groups = self.num_heads // self.num_kv_heads
        query = self._rotated(self._split(self.q_proj(inputs), self.num_heads), positions) * self.head_dim**-0.5
        query = query.view(size, self.num_kv_heads, groups, num_rows, self.head_dim)
        scores = query.flatten(2, 3) @ text.keys.transpose(2, 3)
        scores = scores.view(size, self.num_kv_heads, groups, num_rows, -1) + bias.to(scores.dtype)
        own_scores = [(query * step.keys[:, :, None]).sum(-1, keepdim=True) for step in own]
        with torch.autocast(inputs.device.type, enabled=False):
            weights = torch.softmax(torch.cat([scores, *own_scores], -1), -1)
        num_pairs = text.keys.shape[2]
        out = weights[..., :num_pairs].flatten(2, 3) @ text.values
        out = out.view(size, self.num_kv_heads, groups, num_rows, self.head_dim)
        for index, step in enumerate(own):
            out = out + weights[..., num_pairs + index, None] * step.values[:, :, None]
        out = out.flatten(1, 2).transpose(1, 2)  # [B, A, heads, D]
        merged: Tensor = self.o_proj(out.reshape(size, num_rows, -1))
        return merged

    def _split(self, projected: Tensor, num_heads: int) -> Tensor:
        return projected.view(*projected.shape[:-1], num_heads, self.head_dim).transpose(1, 2)

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        steps = torch.arange(half, device=heads.device, dtype=torch.float32)
        angles = positions[:, None, :, None] * self.rope_theta ** (-steps / half)  # [B, 1, rows, D / 2]
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class GatedFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(inputs)) * self.up_proj(inputs))
        return out


class HeadLayer(nn.Module):
    """The decoder layer of both families. EAGLE-1 has no norm in front of its attention."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, input_size)
        self.mlp = GatedFeedForward(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Adds attention and feed-forward network to the residual stream."""
        hidden = residual + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class NormedLayer(HeadLayer):
    """EAGLE-3's decoder layer: token and state have a norm each, and are concatenated."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class EagleHead(Head):
    """A head of one decoder layer, which reads pairs."""

    config: HeadConfig

    @abstractmethod
    def layer(self, step: int = 0) -> HeadLayer:
        """The layer of a draft step."""

    @abstractmethod
    def read(self, features: Tensor) -> Tensor:
        """The state of the first draft step."""

    @abstractmethod
    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the attention, and the residual stream."""

    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        """The states of chosen rows after 1..num_steps draft steps over the given text.

        Keys of the text come from true features; later steps of a row attend to the keys up to its pair, and to its own drafted
        states. Behind the text's end, the last token is repeated; callers ignore those states.

        Shapes: embedded float32 [B, T, H] of tokens 0..T-1, features [B, T, F], rows int64 [B, A] -> [num_steps, B, A, H].
        """
        inputs, num_pairs = objective.inputs, embedded.shape[1] - 1
        shift = int(inputs is not Inputs.UNSHIFTED)
        state, layer = self.read(features[:, :-1]), self.layer()
        joined_text, residual = self.join(*inputs.kept(embedded[:, shift : shift + num_pairs], state))
        positions = torch.arange(num_pairs, device=embedded.device)
        text = layer.self_attn.keys_values(joined_text, positions[None])
        bias = torch.where(positions <= rows[..., None], 0.0, HIDDEN_SCORE)[:, None, None]  # [B, 1, 1, A, T - 1]
        joined, residual = rows_of(joined_text, rows), rows_of(residual, rows)
        drafted: list[Tensor] = []  # the inputs of the draft steps so far
        own: list[KeyValues] = []
        states: list[Tensor] = []
        for step in range(objective.num_steps):
            if step:
                tokens = rows_of(embedded, (rows + shift + step).clamp(max=num_pairs))
                state = states[-1].detach() if objective.is_detached else states[-1]
                joined, residual = self.join(*inputs.kept(tokens, state))
                drafted.append(joined)
                if self.layer(step) is not layer:  # a specialist takes over
                    layer, own = self.layer(step), []
                    text = layer.self_attn.keys_values(joined_text, positions[None])
                own += [layer.self_attn.keys_values(drafted[i], rows + i + 1) for i in range(len(own), len(drafted))]
            attended = layer.self_attn(joined, rows + step, text, own, bias)
            states.append(layer.finish(residual, attended))
        return torch.stack(states)

    def write(self, directory: Path, tensors: dict[str, Tensor], target: str) -> None:
        write_head(directory, HeadCheckpoint(self.config, tensors))


class FeatureHead(EagleHead):
    """EAGLE-1, EAGLE-2, HASS and PosS: predicts the target's next final hidden state; the target's output layer reads it."""

    loss_weights = LossWeights(state=1.0, teacher=0.1)

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(HeadLayer(config, config.hidden_size) for _ in range(config.num_layers))

    def layer(self, step: int = 0) -> HeadLayer:
        layer = self.layers[min(step // max(1, self.config.positions_per_layer), len(self.layers) - 1)]
        assert isinstance(layer, HeadLayer)
        return layer

    def read(self, features: Tensor) -> Tensor:
        return features

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embedded, state], -1)).float()
        return joined, joined

    def logits(self, state: Tensor, project: Projection, step: int = 0) -> Tensor:
        return project(state)


class Eagle3Head(EagleHead):
    """EAGLE-3: reads three of the target's layers; its own output layer covers the draft vocabulary."""

    loss_weights = LossWeights(teacher=1.0)

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = NormedLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def layer(self, step: int = 0) -> HeadLayer:
        return self.midlayer

    def read(self, features: Tensor) -> Tensor:
        state: Tensor = self.fc(features)
        return state.float()

    def join(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(state)], -1), state

    def logits(self, state: Tensor, project: Projection, step: int = 0) -> Tensor:
        out: Tensor = self.lm_head(self.norm(state))
        return out

    def draft_token_ids(self) -> Tensor | None:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return None
        offsets = self.get_buffer("d2t")
        return offsets + torch.arange(len(offsets), device=offsets.device)


def build_head(config: HeadConfig) -> FeatureHead | Eagle3Head:
    """A head with torch's default initialisation, in float32."""
    return Eagle3Head(config) if config.family is EagleFamily.EAGLE3 else FeatureHead(config)
