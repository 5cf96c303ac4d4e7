"""Trainable Medusa and Hydra heads: one network for each position ahead, under the published names.

Blocks begin near the identity and output layers as copies of the target's, so every network begins by guessing the next token.
As published, a Medusa network repeats one block, and a Hydra network repeats its second: the copies on disk are equal. Hydra++
networks read the states through a decoder layer, which begins as the identity.

    >>> config = PositionConfig(PositionFamily.HYDRA, hidden_size=576, vocab_size=49_152, num_heads=4, is_grounded=True)
    >>> head = fresh_position_head(config, target, seed=0)

Sources: Medusa 2401.10774 (cross-entropy with the text's token, position k weighted 0.8^k), Hydra 2402.05109 (teacher loss).
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from ragspec.drafting.learning.head import Head, LossWeights, Objective, Projection, rows_of
from ragspec.drafting.medusa.checkpoint import MOST, write_medusa
from ragspec.drafting.medusa.hydra import write_hydra
from ragspec.errors import ConfigError
from ragspec.training.heads.frozen_target import FrozenTarget

INIT_STD = 0.02


class PositionFamily(enum.StrEnum):
    """Heads with a network for each position ahead."""

    MEDUSA = "medusa"
    HYDRA = "hydra"


@dataclass(frozen=True)
class PositionConfig:
    """`is_grounded`: heads also read the tokens in between (Hydra). `has_output`: heads have output layers of their own.
    `has_prefix`: states pass a decoder layer first (Hydra++).

    Raises: ConfigError for more heads than can be served.
    """

    family: PositionFamily
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_blocks: int = 1
    is_grounded: bool = False
    has_output: bool = True
    has_prefix: bool = False
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if max(self.num_heads, self.num_blocks) > MOST:
            raise ConfigError(f"{self.family} heads have at most {MOST} networks of at most {MOST} blocks")


class Block(nn.Module):
    """z = x + silu(W x + b), or z = R x + r + silu(W x + b) where x is wider than z."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, width)
        nn.init.zeros_(self.linear.weight)
        self.res_connection = nn.Identity() if num_inputs == width else nn.Linear(num_inputs, width)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.res_connection(inputs).float() + nn.functional.silu(self.linear(inputs)).float()
        return out


class PositionHead(Head):
    """All networks of a family. Step i is the network of position i."""

    config: PositionConfig

    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        known, states = rows_of(self.read(features), rows), []
        for step in range(min(objective.num_steps, self.config.num_heads)):
            if self.config.is_grounded:
                tokens = rows_of(embedded, (rows + 1 + step).clamp(max=embedded.shape[1] - 1))
                known = torch.cat([known, tokens], -1)  # [B, A, (step + 2) H]
            states.append(nn.Sequential(*self.blocks(step))(known))
        return torch.stack(states)

    def logits(self, state: Tensor, project: Projection, step: int = 0) -> Tensor:
        output = self.output(step)
        return project(state) if output is None else cast(Tensor, output(state))

    def read(self, features: Tensor) -> Tensor:
        """The states that the networks read. Shape: [B, T, H]."""
        return features

    def blocks(self, position: int) -> Iterable[Block]:
        raise NotImplementedError

    def output(self, position: int) -> nn.Linear | None:
        raise NotImplementedError


class MedusaHead(PositionHead):
    """`0.0.linear.weight`, ... of the blocks, `0.1.weight` of the output layer."""

    loss_weights = LossWeights(token=1.0)

    def __init__(self, config: PositionConfig) -> None:
        super().__init__()
        self.config = config
        for position in range(config.num_heads):
            layers: list[nn.Module] = _blocks(config.hidden_size, config)
            if config.has_output:
                layers.append(nn.Linear(config.hidden_size, config.vocab_size, bias=False))
            self.add_module(str(position), nn.Sequential(*layers))

    def blocks(self, position: int) -> Iterable[Block]:
        return cast(Iterable[Block], self._layers(position)[: self.config.num_blocks])

    def output(self, position: int) -> nn.Linear | None:
        return cast(nn.Linear, self._layers(position)[-1]) if self.config.has_output else None

    def _layers(self, position: int) -> nn.Sequential:
        return cast(nn.Sequential, self.get_submodule(str(position)))

    def write(self, directory: Path, tensors: dict[str, Tensor], target: str) -> None:
        write_medusa(directory, tensors, self.config.num_heads, self.config.num_blocks, target)


class HydraHead(PositionHead):
    """`hydra_mlp.0.0.linear.weight`, ... of the blocks, `hydra_lm_head.0.weight` of the output layer. With a prefix, which
    is Hydra++, every module has a dropout layer before it, here the identity, so indices are 1, 3, ...
    """

    loss_weights = LossWeights(teacher=1.0)

    def __init__(self, config: PositionConfig, prefix: LlamaModel | None = None) -> None:
        super().__init__()
        self.config = config
        width, read = config.hidden_size, [i + 2 if config.is_grounded else 1 for i in range(config.num_heads)]
        self.hydra_mlp = nn.ModuleList(self._sequence(_blocks(parts * width, config)) for parts in read)
        outputs = [nn.Linear(width, config.vocab_size) for _ in read]
        self.hydra_lm_head = nn.ModuleList(self._sequence([o]) if config.has_prefix else o for o in outputs)
        self.prefix_embeding_layer = prefix  # spelt so

    def _sequence(self, modules: list[Any]) -> nn.Sequential:
        before = [nn.Identity()] if self.config.has_prefix else []
        return nn.Sequential(*(part for module in modules for part in (*before, module)))

    def read(self, features: Tensor) -> Tensor:
        if self.prefix_embeding_layer is None:
            return features
        states: Tensor = self.prefix_embeding_layer(inputs_embeds=features, use_cache=False).last_hidden_state
        return states

    def blocks(self, position: int) -> Iterable[Block]:
        modules = cast(nn.Sequential, self.hydra_mlp[position])
        return [module for module in modules if isinstance(module, Block)]

    def output(self, position: int) -> nn.Linear | None:
        output = self.hydra_lm_head[position]
        return cast(nn.Linear, output[-1] if isinstance(output, nn.Sequential) else output)

    def write(self, directory: Path, tensors: dict[str, Tensor], target: str) -> None:
        config = self.config
        write_hydra(directory, tensors, config.num_blocks, config.is_grounded, config.has_prefix, target)


def prefix_layer(target: FrozenTarget) -> LlamaModel:
    """Hydra++'s layer: a Llama of one layer with the target's sizes, without an embedding. At first its output is its input."""
    sizes = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps hidden_act"
    names = (*sizes.split(), "rope_parameters", "max_position_embeddings")
    given = {name: value for name in names if (value := getattr(target.config, name, None)) is not None}
    prefix: Any = LlamaModel(LlamaConfig(**given, num_hidden_layers=1, vocab_size=1, pad_token_id=None)).float()
    prefix.embed_tokens = None
    nn.init.zeros_(prefix.layers[0].self_attn.o_proj.weight)
    nn.init.zeros_(prefix.layers[0].mlp.down_proj.weight)
    nn.init.constant_(prefix.norm.weight, float(target.model.model.norm.weight.float().square().mean().sqrt()))
    return cast(LlamaModel, prefix)


def _blocks(num_inputs: int, config: PositionConfig) -> list[nn.Module]:
    """The blocks of one network; those behind the first are one module."""
    width = config.hidden_size
    first = Block(num_inputs, width)
    if config.num_blocks == 1:
        return [first]
    further = first if config.family is PositionFamily.MEDUSA else Block(width, width)
    return [first, *[further] * (config.num_blocks - 1)]


@torch.no_grad()
def fresh_position_head(config: PositionConfig, target: FrozenTarget, seed: int) -> PositionHead:
    """A head ready for training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        prefix = prefix_layer(target) if config.has_prefix else None
        head = MedusaHead(config) if config.family is PositionFamily.MEDUSA else HydraHead(config, prefix)
        for position in range(config.num_heads):
            for block in head.blocks(position):
                if isinstance(block.res_connection, nn.Linear):
                    nn.init.normal_(block.res_connection.weight, std=INIT_STD)
                    block.res_connection.weight[:, : config.hidden_size] += torch.eye(config.hidden_size)
            output = head.output(position)
            if output is not None:
                output.weight.copy_(target.model.lm_head.weight)
                if output.bias is not None:
                    nn.init.zeros_(output.bias)
    return head.to(target.device)
