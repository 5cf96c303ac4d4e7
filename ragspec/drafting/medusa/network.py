"""Medusa and Hydra: networks that each guess one position ahead from the target's last hidden state.

    x = target's last hidden state;  z = x + silu(W x + b), and so on for each block;  logits = U z + c

Grounded heads (Hydra) read more, x = [state, embedding of the next token, of each guessed token behind it], so their first block
is z = R x + r + silu(W x + b). Hydra++ heads read the states through one decoder layer, which attends to the states of the text:
s = norm(layer(states)) takes the place of the state. The layer's keys are kept as those of an EAGLE head.

`PositionHead` holds the weights by their published names and the formulas, and trains. `PositionNetwork` runs a head in the
engine, with products of the target's backend. Owns no sequence and no tree: `ragspec.drafting.medusa.drafter` does.

    >>> network = PositionNetwork(read_medusa(path, target), target)
    >>> inputs = network.inputs(states, next_tokens)
    >>> network.logits(inputs, 0)                  # [B, V], of the token after the next one

Sources: Medusa (Cai et al. 2024, arXiv 2401.10774: cross-entropy with the text's token, position k weighted 0.8^k), Hydra (Ankner
et al. 2024, arXiv 2402.05109: the target's distribution).
"""

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ragspec.drafting.heads.layer import (
    FINAL,
    DecoderLayer,
    DraftTarget,
    HeadAttention,
    RmsNorm,
    Rotations,
    float_dtype,
    make_cache,
    make_layer,
    prepare,
    serve,
)
from ragspec.drafting.heads.learning import Head, LossWeights, Objective, Projection, rows_of
from ragspec.errors import ConfigError
from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Ints
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import RotaryTable

MAX_HEADS = 64
"""More heads, or more blocks in a head, than any published head has."""
EMBEDDING = "input_embed_fn.weight"
"""Of a Hydra head's own embedding, which may be absent."""


class PositionFamily(enum.StrEnum):
    """Heads with a network for each position ahead."""

    MEDUSA = "medusa"
    HYDRA = "hydra"


@dataclass(frozen=True)
class PositionConfig:
    """`is_grounded`: heads also read the tokens in between (Hydra). `has_output`: heads have output layers of their own.
    `has_prefix`: states pass a decoder layer first (Hydra++). `has_dropout`: every module has a dropout layer before it, which
    shifts the published indices. `tap`: of the target's states.

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
    has_dropout: bool = False
    tap: int = FINAL

    def __post_init__(self) -> None:
        if max(self.num_heads, self.num_blocks) > MAX_HEADS:
            raise ConfigError(f"{self.family} heads have at most {MAX_HEADS} networks of at most {MAX_HEADS} blocks")

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Taps in front of the target's final norm."""
        return () if self.tap == FINAL else (self.tap,)


class PositionCheckpoint(NamedTuple):
    """Heads on disk: their shape, and their tensors by the names of `PositionHead`'s modules."""

    config: PositionConfig
    tensors: dict[str, Tensor]


class Block(nn.Module):
    """z = x + silu(W x + b), or z = R x + r + silu(W x + b) where x is wider than z."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, width)
        self.res_connection = nn.Identity() if num_inputs == width else nn.Linear(num_inputs, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.res_connection(inputs).float() + F.silu(self.linear(inputs).float()))


class PrefixLayer(nn.Module):
    """Hydra++'s decoder layer, with the sizes of the target, whose transformers configuration is `llama`."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        num_heads, width, eps = llama.num_attention_heads, llama.hidden_size, llama.rms_norm_eps
        head_dim = getattr(llama, "head_dim", None) or width // num_heads
        shape = AttentionShape(num_heads, getattr(llama, "num_key_value_heads", num_heads), head_dim, head_dim**-0.5)
        layer = DecoderLayer(HeadAttention(shape, width, width, eps), llama.intermediate_size, eps)
        layer.input_layernorm = RmsNorm(width, eps)
        self.layers, self.norm, self.llama = nn.ModuleList([layer]), RmsNorm(width, eps), llama

    def forward(self, states: Tensor) -> Tensor:
        """All states of some texts at once, for training. Shape: [B, T, H]."""
        layer, length = cast(DecoderLayer, self.layers[0]), states.shape[1]
        tables = self.rotations(length)
        cos, sin = (table.to(states.device)[None] for table in tables)
        x = layer.input_layernorm(states)
        keys = layer.self_attn.keys_values(x, (cos, sin))
        bias = torch.full((length, length), -torch.inf, device=states.device).triu(1)
        attended = layer.self_attn(x, (cos, sin), keys, [], bias)
        return cast(Tensor, self.norm(layer.finish(states, attended)))

    def rotations(self, num_positions: int) -> Rotations:
        """Raises: ModelError for rotary positions that depend on the length of the text."""
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # Why here: two seconds of imports

        return RotaryTable(LlamaRotaryEmbedding(self.llama), num_positions, torch.zeros(1)).rotations


class PositionHead(Head):
    """All networks of a family. Draft step i is the network of position i.

    `llama`: the target's configuration, for a prefix. `are_tied`: blocks behind the first are one module, as trainers publish
    them: a Medusa network repeats its first block, and a Hydra network its second.
    """

    config: PositionConfig

    def __init__(self, config: PositionConfig, llama: Any = None, *, are_tied: bool = True) -> None:
        super().__init__()
        self.config = config
        width, is_medusa = config.hidden_size, config.family is PositionFamily.MEDUSA
        self.loss_weights = LossWeights(token=1.0) if is_medusa else LossWeights(teacher=1.0)
        blocks = [self._new_blocks(position, are_tied) for position in range(config.num_heads)]
        outputs = [nn.Linear(width, config.vocab_size, bias=not is_medusa) for _ in blocks]
        if is_medusa:
            for position, (own, output) in enumerate(zip(blocks, outputs, strict=True)):
                self.add_module(str(position), nn.Sequential(*own, *([output] if config.has_output else [])))
            return
        self.hydra_mlp = nn.ModuleList(self._sequence(own) for own in blocks)
        self.hydra_lm_head = nn.ModuleList(self._sequence([o]) if config.has_dropout else o for o in outputs)
        self.prefix_embeding_layer = PrefixLayer(llama) if config.has_prefix else None  # spelt so

    def _new_blocks(self, position: int, are_tied: bool) -> list[Block]:
        width, count = self.config.hidden_size, self.config.num_blocks
        first = Block((position + 2) * width if self.config.is_grounded else width, width)
        if not are_tied or count == 1:
            return [first, *(Block(width, width) for _ in range(count - 1))]
        further = first if self.config.family is PositionFamily.MEDUSA else Block(width, width)
        return [first, *[further] * (count - 1)]

    def _sequence(self, modules: list[Any]) -> nn.Sequential:
        before = [nn.Identity()] if self.config.has_dropout else []
        return nn.Sequential(*(part for module in modules for part in (*before, module)))

    def _modules_of(self, position: int) -> list[nn.Module]:
        if self.config.family is PositionFamily.MEDUSA:
            return list(cast(nn.Sequential, self.get_submodule(str(position))))
        output = self.hydra_lm_head[position]
        blocks = cast(nn.Sequential, self.hydra_mlp[position])
        return [*blocks, output[-1] if isinstance(output, nn.Sequential) else output]

    def blocks(self, position: int) -> list[Block]:
        return [module for module in self._modules_of(position) if isinstance(module, Block)]

    def output(self, position: int) -> nn.Module | None:
        """None: the network reads the target's output layer."""
        return self._modules_of(position)[-1] if self.config.has_output else None

    def state(self, inputs: Tensor, position: int) -> Tensor:
        """Shapes: [..., F] -> [..., H]."""
        for block in self.blocks(position):
            inputs = block(inputs)
        return inputs

    def logits(self, state: Tensor, project: Projection, step: int = 0, previous: Tensor | None = None) -> Tensor:
        output = self.output(step)
        return project(state) if output is None else cast(Tensor, output(state))

    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        read = self.get_submodule("prefix_embeding_layer")(features) if self.config.has_prefix else features
        known, states = rows_of(read, rows), []
        for step in range(min(objective.num_steps, self.config.num_heads)):
            if self.config.is_grounded:
                tokens = rows_of(embedded, (rows + 1 + step).clamp(max=embedded.shape[1] - 1))
                known = torch.cat([known, tokens], -1)  # [B, A, (step + 2) H]
            states.append(self.state(known, step))
        return torch.stack(states)


class PositionNetwork:
    """The weights of all heads, products in `dtype` (None: the target's), everything between them in float32."""

    def __init__(self, checkpoint: PositionCheckpoint, target: DraftTarget, dtype: torch.dtype | None = None) -> None:
        config, tensors = checkpoint
        self.num_heads, self.vocab_size, self.width = config.num_heads, target.vocab_size, target.hidden_size
        self.is_grounded = config.is_grounded
        self.taps: tuple[int, ...] = (config.tap,)
        dtype = dtype or target.embedding.dtype
        self.backend, self._target = target.backend.for_head(dtype), target
        dtype = float_dtype(dtype)
        with torch.device("meta"):
            self.head = PositionHead(config, target.text_config if config.has_prefix else None, are_tied=False)
        prepare(self.head, tensors, self.backend.device, dtype)
        serve(self.head, self.backend)
        self._embedding = _embedding(tensors, target, dtype)

    def inputs(self, states: Tensor, next_tokens: Ints) -> Tensor:
        """The input of the first head. Shapes: float32 [B, H], int32 [B] -> float32 [B, F]."""
        return self.grounded(states, next_tokens) if self.is_grounded else states

    def grounded(self, inputs: Tensor, token_ids: Ints | Tensor) -> Tensor:
        """Each row with the embedding of one more token. Shapes: float32 [N, F], int32 [N] -> float32 [N, F + H]."""
        with torch.inference_mode():
            embedded = F.embedding(self.backend.tokens(token_ids), self._embedding)
            return torch.cat([inputs, embedded.float()], 1)

    def logits(self, inputs: Tensor, head: int) -> LogitRows:
        """The guesses of one head. Shapes: float32 [N, F] -> float32 [N, V]."""
        with torch.inference_mode():
            return self.backend.logits(self.head.logits(self.head.state(inputs, head), self._project, head))

    def first_logits(self, states: Tensor, next_tokens: Ints) -> LogitRows:
        return self.logits(self.inputs(states, next_tokens), 0)

    def _project(self, states: Tensor) -> Tensor:
        return self._target.logits_of(states.to(self._target.embedding.dtype))

    def seconds(self, num_rows: int, context: int) -> float:
        """Seconds of one level of so many rows; the context costs nothing."""
        states = torch.zeros(num_rows, self.width, device=self.backend.device)
        begin = time.perf_counter()
        self.first_logits(states, np.zeros(num_rows, np.int32))
        self.backend.wait()
        return time.perf_counter() - begin


def _embedding(tensors: Mapping[str, Tensor], target: DraftTarget, dtype: torch.dtype) -> Tensor:
    """The target's embedding, or a head's own that differs from it."""
    own = tensors.get(EMBEDDING)
    if own is None:
        return target.embedding
    own = own.to(target.embedding.device, dtype)
    return target.embedding if torch.equal(own, target.embedding.to(dtype)) else own


class PrefixNetwork(PositionNetwork):
    """Hydra++. Raises: ModelError for rotary positions that depend on the length of the text."""

    def __init__(
        self, checkpoint: PositionCheckpoint, target: DraftTarget, max_positions: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(checkpoint, target, dtype)
        self.draft_ids: NDArray[np.int64] = np.arange(target.vocab_size)
        self.num_features = self.width
        prefix = self.head.prefix_embeding_layer
        assert prefix is not None
        layer = cast(DecoderLayer, prefix.layers[0])
        self._layer = make_layer(layer, prefix.rotations(max_positions), self.backend)

    def make_cache(self, pool: KvPool, num_own_slots: int = 0) -> KvPool:
        return make_cache([self._layer], self.backend, pool, num_own_slots)

    @torch.inference_mode()
    def first(self, token_ids: Ints, features: Tensor, cache: KvPool, metadata: AttentionMetadata) -> Tensor:
        """The states that heads read; the tokens are not read. Shapes: float32 [N, H] -> [N, H]."""
        prefix, num_rows = self.head.prefix_embeding_layer, len(features)
        assert prefix is not None
        if num_rows < self.backend.least_rows:
            features = features.repeat(2, 1)
        x = cast(DecoderLayer, prefix.layers[0]).input_layernorm(features)
        hidden: Tensor = prefix.norm(self._layer(features, x, self.backend.context(cache, metadata)))
        return hidden[:num_rows]
