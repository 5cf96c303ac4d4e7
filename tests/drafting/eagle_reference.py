"""EAGLE heads computed the slow way: the papers' equations on the raw tensors, in float64, nothing kept between calls.

A second implementation, so it shares no code with `ragspec`: attention is a dense matrix over all pairs, a draft node
runs its whole path again. Pair t is (what the target computed at token t, token t + 1) at rotary position t.

    >>> head = random_head(EagleFamily.EAGLE3, folder)
    >>> hidden = head_outputs(head, embed, tokens, features)             # [T-1, H], of the pairs
    >>> nodes = draft_outputs(head, embed, tokens, features, [5, 9, 3], parents=[-1, -1, 0])
    >>> logits = head_logits(head, nodes)                                # [3, Vd]

Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint


def head_outputs(checkpoint: HeadCheckpoint, embed: Tensor | None, tokens: Sequence[int], features: Tensor) -> Tensor:
    """What a head predicts from every pair; of an EAGLE-3 head before its norm.

    Shapes: embed [V, H] of the target (None: the head's own), T tokens, features [T or T-1, F] -> [T-1, H].
    """
    return _outputs(checkpoint, *_pairs(checkpoint, embed, tokens, features))


def draft_outputs(
    checkpoint: HeadCheckpoint,
    embed: Tensor | None,
    tokens: Sequence[int],
    features: Tensor,
    draft_tokens: Sequence[int],
    parents: Sequence[int] | None = None,
) -> Tensor:
    """Outputs at the nodes of a draft behind the pairs; each node is fed its parent's output in place of a feature.

    Parent -1 is the last pair, no `parents` is a chain. The node's token is what the parent's output predicted.
    Shapes: N nodes, parents first -> [N, H].
    """
    parents = list(range(-1, len(draft_tokens) - 1)) if parents is None else parents
    outputs = []
    for node in range(len(draft_tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        outputs.append(_chain_output(checkpoint, embed, tokens, features, [draft_tokens[n] for n in path]))
    return torch.stack(outputs) if outputs else torch.zeros(0, checkpoint.config.hidden_size, dtype=torch.float64)


def head_logits(checkpoint: HeadCheckpoint, hidden: Tensor, target_lm_head: Tensor | None = None) -> Tensor:
    """Logits over the draft vocabulary. Shapes: hidden [N, H], target_lm_head [V, H], where the head uses it -> [N, Vd]."""
    tensors = _wide(checkpoint)
    if checkpoint.config.family is EagleFamily.EAGLE3:
        hidden = rms_norm(hidden, tensors["norm.weight"], checkpoint.config.rms_norm_eps)
        if not checkpoint.config.shares_lm_head:
            return hidden @ tensors["lm_head.weight"].T
    weight = target_lm_head.double() if target_lm_head is not None else tensors["lm_head.weight"]
    return hidden @ weight.T


def _pairs(
    checkpoint: HeadCheckpoint, embed: Tensor | None, tokens: Sequence[int], features: Tensor
) -> tuple[Tensor, Tensor]:
    """Embeddings [T-1, H] of the tokens one ahead, and the states [T-1, H] beside them."""
    tensors, config = _wide(checkpoint), checkpoint.config
    table = tensors["embed_tokens.weight"] if "embed_tokens.weight" in tensors else embed.double()
    embeddings = table[torch.tensor(list(tokens[1:]), dtype=torch.int64)]
    states = features.double()[: len(tokens) - 1]
    if config.family is EagleFamily.EAGLE3:
        if config.norm_before_fc:
            states = _feature_norm(states, tensors["fc_norm.weight"], config.rms_norm_eps)
        if not config.reads_final:
            states = states @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
    return embeddings, states


def _feature_norm(features: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each of the G parts of the features is normed by itself. Shapes: [N, F], weight [G, F / G] -> [N, F]."""
    parts = features.split(weight.shape[1], dim=1)
    return torch.cat([rms_norm(part, row, eps) for part, row in zip(parts, weight, strict=True)], 1)


def _chain_output(
    checkpoint: HeadCheckpoint, embed: Tensor | None, tokens: Sequence[int], features: Tensor, path: Sequence[int]
) -> Tensor:
    config = checkpoint.config
    _, states = _pairs(checkpoint, embed, tokens, features)
    for depth in range(len(path) + 1):
        shown = [*tokens, *path[:depth]]
        embeddings, _ = _pairs(checkpoint, embed, shown, features.new_zeros(len(shown), config.num_features))
        output = _outputs(checkpoint, embeddings, states, depth)[-1]
        normed = (
            rms_norm(output, _wide(checkpoint)["norm.weight"], config.rms_norm_eps) if config.norm_output else output
        )
        states = torch.cat([states, normed[None]])
    return output


def _outputs(checkpoint: HeadCheckpoint, embeddings: Tensor, states: Tensor, depth: int = 0) -> Tensor:
    """The decoder layers over P pairs; of PosS that of draft position `depth` + 1. Shapes: [P, H] twice -> [P, H]."""
    config, tensors, eps = checkpoint.config, _wide(checkpoint), checkpoint.config.rms_norm_eps
    if config.family is EagleFamily.EAGLE:
        first = min(depth // config.positions_per_layer, config.num_layers - 1) if config.positions_per_layer else 0
        prefix = f"layers.{first}."
        inputs = torch.cat([embeddings, states], 1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
        residual = inputs
    else:
        prefix = "midlayer."
        normed = rms_norm(states, tensors["midlayer.hidden_norm.weight"], eps)
        inputs = torch.cat([rms_norm(embeddings, tensors["midlayer.input_layernorm.weight"], eps), normed], 1)
        residual = normed if config.norm_before_residual else states
    unseen = torch.ones(len(inputs), len(inputs), dtype=torch.bool).triu(1)
    if config.window:
        unseen |= unseen.new_ones(unseen.shape).tril(-config.window)
    hidden = layer_output(config, section(tensors, prefix), residual, inputs, unseen)
    for later in range(1, 1 if config.positions_per_layer else config.num_layers):
        layer = section(tensors, f"layers.{later}.")
        hidden = layer_output(config, layer, hidden, rms_norm(hidden, layer["input_layernorm.weight"], eps), unseen)
    return hidden


def section(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def layer_output(config: Any, layer: dict[str, Tensor], residual: Tensor, inputs: Tensor, unseen: Tensor) -> Tensor:
    """The last R rows. `unseen`: pairs that a row does not attend to. Shapes: [R, H], [P, H or 2H], bool [P, P] -> [R, H]."""
    attended = residual + _attention(config, layer, inputs, unseen)[-len(residual) :]
    inner = rms_norm(attended, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate, up = inner @ layer["mlp.gate_proj.weight"].T, inner @ layer["mlp.up_proj.weight"].T
    return attended + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T


def _attention(config: Any, layer: dict[str, Tensor], inputs: Tensor, unseen: Tensor) -> Tensor:
    """Shapes: [P, H or 2H], bool [P, P] -> [P, H]."""
    width, rope = config.head_dim, config.rope
    query, key, value = (
        inputs @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0.0)
        for name in "qkv"
    )
    turns = torch.tensor(rates(config.rope_theta, width, rope, config.max_positions), dtype=torch.float64)
    stretch = 0.1 * math.log(rope["factor"]) + 1.0 if rope.get("rope_type") == "yarn" else 1.0
    heads = []
    for head in range(config.num_heads):
        of_query = slice(head * width, (head + 1) * width)
        kv_head = head // (config.num_heads // config.num_kv_heads)
        of_key = slice(kv_head * width, (kv_head + 1) * width)
        q, k = query[:, of_query], key[:, of_key]
        if config.qk_norm:
            q, k = (
                rms_norm(rows, layer[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
                for name, rows in (("q", q), ("k", k))
            )
        scores = stretch**2 * _rotated(q, turns) @ _rotated(k, turns).T
        scores = (scores / width**0.5).masked_fill(unseen, -torch.inf)
        heads.append(torch.softmax(scores, 1) @ value[:, of_key])
    return torch.cat(heads, 1) @ layer["self_attn.o_proj.weight"].T + layer.get("self_attn.o_proj.bias", 0.0)


def rates(theta: float, head_dim: int, rope: Mapping[str, Any], max_positions: int) -> list[float]:
    """Turns a position of every plane, by the published formulas. `rope`: transformers' `rope_parameters`."""
    half, kind, factor = head_dim // 2, rope.get("rope_type", "default"), rope.get("factor", 1.0)
    plain = [theta ** (-i / half) for i in range(half)]
    length = rope.get("original_max_position_embeddings", max_positions)
    shares = [float(kind == "default")] * half  # of each plane, how much of its plain rate stays
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        shares = [min(1.0, max(0.0, (length * rate / (2 * math.pi) - low) / (high - low))) for rate in plain]
    if kind == "yarn":
        first, last = (half * math.log(length / (turns * 2 * math.pi)) / math.log(theta) for turns in (32, 1))
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        shares = [1.0 - min(1.0, max(0.0, (i - first) / (last - first or 0.001))) for i in range(half)]
    return [rate * (share + (1 - share) / factor) for rate, share in zip(plain, shares, strict=True)]


def _rotated(rows: Tensor, turns: Tensor) -> Tensor:
    """Row p turned by its position p: components i and i + half form a plane, as Llama has them."""
    half = rows.shape[1] // 2
    angles = torch.arange(len(rows), dtype=torch.float64)[:, None] * turns
    first, second = rows[:, :half], rows[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1
    )


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _wide(checkpoint: HeadCheckpoint) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in checkpoint.tensors.items()}
