"""The shape of a head for a target, the head's initial weights, and its files.

An EAGLE head starts with copies of the target's final norm, of its output rows of the draft vocabulary and of its last layer's
feed-forward network (of a narrower one, the neurons with the largest weights), so its first predictions are near the target's.
Medusa's and Hydra's blocks begin near the identity and output layers as copies of the target's, so every network begins by
guessing the next token; the prefix layer of Hydra++ begins as the identity.

    >>> config = head_config(target, EagleFamily.EAGLE3, spread_aux_layers(target.num_layers))
    >>> head = fresh_head(config, target, vocabulary=None, seed=0)
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ragspec.drafting.block.checkpoint import BlockFamily, family_in, read_block, write_block, write_look_ahead
from ragspec.drafting.block.network import (
    BlockCheckpoint,
    BlockConfig,
    BlockHead,
    LookAheadConfig,
    LookAheadHead,
    ParallelHead,
)
from ragspec.drafting.eagle.checkpoint import read_head, write_head
from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint, HeadConfig, check_fits, default_aux_layers
from ragspec.drafting.eagle.network import EagleHead, check_trainable
from ragspec.drafting.heads.learning import Head
from ragspec.drafting.medusa.checkpoint import write_positions
from ragspec.drafting.medusa.network import PositionCheckpoint, PositionConfig, PositionHead
from ragspec.errors import ConfigError, ModelError
from ragspec.training.heads.frozen_target import FrozenTarget

ROPE_THETA, RMS_NORM_EPS = 10_000.0, 1e-5
HEAD_DIM = 64
INIT_STD = 0.02


def head_config(
    target: FrozenTarget,
    family: EagleFamily,
    aux_layers: tuple[int, ...] = (),
    draft_vocab: int | None = None,
    num_layers: int = 1,
    positions_per_layer: int = 0,
    intermediate_size: int | None = None,
) -> HeadConfig:
    """A head of the target's width, with about half as many attention heads. `num_layers`: of PosS. `intermediate_size` None:
    the target's.

    Raises: ConfigError, ModelError.
    """
    is_eagle3 = family is EagleFamily.EAGLE3
    draft_vocab_size = draft_vocab if is_eagle3 and draft_vocab else target.vocab_size
    if draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"a draft vocabulary of {draft_vocab_size} exceeds the target's of {target.vocab_size} tokens"
        )
    if is_eagle3 and len(aux_layers) != 3:
        raise ConfigError(f"an eagle3 head reads three aux layers, not {len(aux_layers)}")
    num_heads = max(1, target.hidden_size // HEAD_DIM // 2 * 2)
    config = HeadConfig(
        family=family,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or int(target.config.intermediate_size),
        num_heads=num_heads,
        num_kv_heads=max(1, num_heads // 2),
        head_dim=HEAD_DIM,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=RMS_NORM_EPS,
        rope_theta=ROPE_THETA,
        max_positions=int(target.config.max_position_embeddings),
        target_hidden_size=target.hidden_size,
        aux_layers=aux_layers if is_eagle3 else (),
        num_layers=num_layers,
        positions_per_layer=positions_per_layer,
    )
    check_fits(config, target.vocab_size, target.hidden_size, target.num_layers)
    return config


def block_config(shape: HeadConfig, family: BlockFamily, num_guesses: int, markov_rank: int) -> BlockConfig:
    """A head that drafts blocks. The mask token is the target's last one, which padded vocabularies do not use.

    Raises: ModelError for a block that no head can have.
    """
    mask_token_id = shape.vocab_size - 1
    if family is BlockFamily.PEAGLE:
        return BlockConfig(shape, mask_token_id)
    shape = replace(shape, qk_norm=True)
    if family is BlockFamily.DFLASH:
        return BlockConfig(shape, mask_token_id, num_guesses + 1)
    return BlockConfig(shape, mask_token_id, num_guesses, True, markov_rank)


def spread_aux_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's published taps; for a target of fewer than seven layers, three taps up to the last layer's output."""
    if num_layers >= 7:
        return default_aux_layers(num_layers)
    step = max(1, num_layers // 3)
    return num_layers - 2 * step, num_layers - step, num_layers


@torch.no_grad()
def fresh_head(
    config: HeadConfig | BlockConfig, target: FrozenTarget, vocabulary: Tensor | None, seed: int
) -> EagleHead | BlockHead:
    """A head ready for training. `vocabulary`: ascending target ids of a smaller draft vocabulary. Shape: int64 [Vd]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _new_head(config, target)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
    _copy_feed_forward(head, target)
    for i in range(1, head.shape.num_layers):
        head.layer(i).load_state_dict(head.layer().state_dict())
    width = head.shape.hidden_size
    head.fc.weight[:, -width:] += torch.eye(width)  # the last input: EAGLE's feature, EAGLE-3's highest layer
    if head.shape.family is EagleFamily.EAGLE3:
        rows = target.model.lm_head.weight if vocabulary is None else target.model.lm_head.weight[vocabulary]
        head.get_parameter("lm_head.weight").copy_(rows)
        head.norm.weight.copy_(target.model.model.norm.weight)
        if vocabulary is not None:
            head.get_buffer("d2t").copy_(vocabulary - torch.arange(len(vocabulary)))
            head.get_buffer("t2d").zero_()[vocabulary] = True
    return head.to(target.device)


def _new_head(config: HeadConfig | BlockConfig, target: FrozenTarget) -> EagleHead | BlockHead:
    if isinstance(config, HeadConfig):
        return EagleHead(config)
    head = ParallelHead(config) if config.is_causal else BlockHead(config)
    mask_embedding = target.embed(torch.tensor([config.mask_token_id]))[0].cpu()
    head.register_buffer("mask_embedding", mask_embedding, persistent=False)
    return head


def trained_head(directory: Path, target: FrozenTarget) -> EagleHead | BlockHead:
    """A head on disk, which learns no more. Raises: ModelError for a head of another target, or that is not trained here."""
    config = _read(directory).config
    check_fits(_shape_of(config), target.vocab_size, target.hidden_size, target.num_layers)
    if isinstance(config, HeadConfig):
        check_trainable(config)
    head = _new_head(config, target)
    start_from(head, directory)
    return head.to(target.device).requires_grad_(False)


def _read(directory: Path) -> BlockCheckpoint | HeadCheckpoint:
    return read_block(directory) if family_in(directory) else read_head(directory)


def _shape_of(config: HeadConfig | BlockConfig) -> HeadConfig:
    return config.shape if isinstance(config, BlockConfig) else config


def _copy_feed_forward(head: EagleHead | BlockHead, target: FrozenTarget) -> None:
    theirs, own = (dict(layer.named_parameters()) for layer in (target.model.model.layers[-1], head.layer()))
    names = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    if (norm := theirs.get("post_attention_layernorm.weight")) is not None:
        own["post_attention_layernorm.weight"].copy_(norm)
    if not theirs.keys() >= set(names):  # experts, or fused projections
        return
    gate, up, down = (theirs[name] for name in names)
    size = head.shape.intermediate_size
    if size <= len(gate):
        strength = gate.float().norm(dim=1) * up.float().norm(dim=1) * down.float().norm(dim=0)
        kept = strength.topk(size).indices.sort().values
        for name, weight in zip(names, (gate[kept], up[kept], down[:, kept]), strict=True):
            own[name].copy_(weight)


@torch.no_grad()
def fresh_look_ahead(num_embeddings: int, target: FrozenTarget, seed: int) -> LookAheadHead:
    """Look-ahead embeddings near the mean of the target's embedding."""
    head = LookAheadHead(LookAheadConfig(num_embeddings, target.hidden_size), lambda *rows: target.read(*rows))
    noise = torch.randn(head.embeddings.shape, generator=torch.Generator().manual_seed(seed))
    embedding = target.embed(torch.arange(target.vocab_size))
    head.embeddings.copy_(embedding.mean(0) + INIT_STD * noise.to(target.device))
    return head.to(target.device)


@torch.no_grad()
def fresh_position_head(config: PositionConfig, target: FrozenTarget, seed: int) -> PositionHead:
    """Medusa or Hydra heads ready for training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = PositionHead(config, target.config)
        for position in range(config.num_heads):
            for block in head.blocks(position):
                nn.init.zeros_(block.linear.weight)
                if isinstance(block.res_connection, nn.Linear):
                    nn.init.normal_(block.res_connection.weight, std=INIT_STD)
                    block.res_connection.weight[:, : config.hidden_size] += torch.eye(config.hidden_size)
            output = head.output(position)
            if isinstance(output, nn.Linear):
                output.weight.copy_(target.model.lm_head.weight)
                if output.bias is not None:
                    nn.init.zeros_(output.bias)
        if config.has_prefix:
            _begin_as_identity(head.get_submodule("prefix_embeding_layer"), target)
    return head.to(target.device)


def _begin_as_identity(prefix: nn.Module, target: FrozenTarget) -> None:
    for name, weight in prefix.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif weight.dim() > 1:
            nn.init.normal_(weight, std=INIT_STD)
    scale = float(target.model.model.norm.weight.float().square().mean().sqrt())
    nn.init.constant_(prefix.get_parameter("norm.weight"), scale)


@torch.no_grad()
def start_from(head: EagleHead | BlockHead, directory: Path) -> None:
    """Copy the weights of a head on disk; specialists that it lacks begin as its last layer. Raises: ModelError."""
    config, tensors = _read(directory)
    num_layers = _shape_of(config).num_layers
    if num_layers > head.shape.num_layers:
        raise ModelError(f"{directory}: a head of another shape: it has {num_layers} layers")
    last = f"layers.{num_layers - 1}."
    for i in range(num_layers, head.shape.num_layers):
        tensors |= {f"layers.{i}.{n.removeprefix(last)}": t for n, t in tensors.items() if n.startswith(last)}
    own = head.state_dict()
    for name, weight in own.items():
        if name not in tensors or tensors[name].shape != weight.shape:
            raise ModelError(f"{directory}: a head of another shape: {name} is not {list(weight.shape)}")
        weight.copy_(tensors[name])


def write_trained(directory: Path, head: Head, tensors: dict[str, Tensor], target: str) -> None:
    """Write tensors of a head's names in the published layout. `target`: its directory or name. Raises: ModelError, SaveError."""
    if isinstance(head, PositionHead):
        write_positions(directory, PositionCheckpoint(head.config, tensors), target)
    elif isinstance(head, LookAheadHead):
        write_look_ahead(directory, tensors["embeddings"])
    elif isinstance(head.config, BlockConfig):
        write_block(directory, BlockCheckpoint(head.config, tensors))
    else:
        write_head(directory, HeadCheckpoint(head.config, tensors))
