"""Heads that draft a whole block in one forward: mask tokens stand for the tokens to guess.

DFlash, DSpark   c_t = norm(fc(F_t)) gives every layer's keys and values of position t; behind the text stand the last token and
                 mask tokens, which all see the text and each other. DSpark adds W2 W1[previous token] to the logits
P-EAGLE          an EAGLE-3 head whose further pairs are (mask token, `mask_hidden`); each sees the pairs before it
PaSS             the target itself, with learnt embeddings behind the last token

`BlockHead`, `ParallelHead` and `LookAheadHead` hold the weights by their published names and the formulas, and train.
`BlockNetwork` runs the first two in the engine. Owns no sequence and no tree: `ragspec.drafting.block.drafter` does.

    >>> network = BlockNetwork(read_block(path), target, max_positions=2048)
    >>> network.read(features, cache, metadata)                    # DFlash and DSpark: keys of the text
    >>> states = network.first(token_ids, features, cache, block_metadata)           # [N, H]
    >>> network.level_logits(network.base_logits(states), previous_tokens)           # [N, Vd]

Sources: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), P-EAGLE (arXiv 2602.01469), PaSS (arXiv 2311.13581).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.drafting.eagle.layout import HeadCheckpoint, HeadConfig
from ragspec.drafting.eagle.network import HIDDEN_SCORE, EagleHead, EagleNetwork, rotations_of, stack_layer
from ragspec.drafting.heads.layer import DecoderLayer, DraftTarget, RmsNorm
from ragspec.drafting.heads.learning import Head, LossWeights, Objective, Projection, rows_of
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionMetadata, Ints
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool

MASK_HIDDEN = "mask_hidden"
MAX_BLOCK = 32


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The shape of a head's layers, and its block.

    `block_size`: rows of a block, the last token's included; 0: P-EAGLE, whose blocks have any length. `samples_anchor`: the
    last token's row guesses the next token, row j the token at distance j + 1; otherwise row j stands for the token at distance
    j. `markov_rank`: width of the bias by the previous token, 0: none. Raises: ModelError for a block that no head can have.
    """

    shape: HeadConfig
    mask_token_id: int
    block_size: int = 0
    samples_anchor: bool = False
    markov_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.mask_token_id < self.shape.vocab_size:
            raise ModelError(f"the head's mask token {self.mask_token_id} is no token of {self.shape.vocab_size}")
        if self.block_size and not 2 <= self.block_size <= MAX_BLOCK:
            raise ModelError(f"the head's block has {self.block_size} rows; 2 to {MAX_BLOCK} are served")

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The taps."""
        return self.shape.aux_layers

    @property
    def is_causal(self) -> bool:
        return self.block_size == 0

    @property
    def num_guesses(self) -> int:
        """Tokens that one block guesses; 0: any number."""
        return max(0, self.block_size - 1) + self.samples_anchor


class BlockCheckpoint(NamedTuple):
    """A head's configuration, and its tensors by the names of `BlockHead`'s or `EagleHead`'s modules."""

    config: BlockConfig
    tensors: dict[str, Tensor]


class ParallelHead(EagleHead):
    """P-EAGLE. Training needs the buffer `mask_embedding`, the target's embedding of the mask token. Shape: [H]."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config.shape)
        self.config = config
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.shape.num_features))

    def fed_back(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.get_buffer("mask_embedding").expand_as(embedded), self.read(self.mask_hidden).expand_as(state)


class BlockHead(Head):
    """DFlash and DSpark. Training needs `mask_embedding`, as `ParallelHead`'s does."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.loss_weights = LossWeights(token=0.1, difference=0.9) if config.markov_rank else LossWeights(token=1.0)
        self.config, self.shape = config, config.shape
        shape = config.shape
        width, eps, rank = shape.hidden_size, shape.rms_norm_eps, config.markov_rank
        self.fc = nn.Linear(shape.num_features, width, bias=False)
        self.hidden_norm, self.norm = RmsNorm(width, eps), RmsNorm(width, eps)
        self.layers = nn.ModuleList(stack_layer(shape) for _ in range(shape.num_layers))
        self.lm_head = None if shape.shares_lm_head else nn.Linear(width, shape.draft_vocab_size, bias=False)
        if shape.draft_vocab_size < shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(shape.vocab_size) < shape.draft_vocab_size)
        if rank:
            bias = nn.Linear(rank, shape.draft_vocab_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": nn.Embedding(shape.vocab_size, rank), "markov_w2": bias})

    def layer(self, index: int = 0) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[index])

    def read(self, features: Tensor) -> Tensor:
        """What every layer's keys and values of the text are made of. Shapes: [..., F] -> [..., H]."""
        return cast(Tensor, self.hidden_norm(self.fc(features).float()))

    def logits(self, state: Tensor, project: Projection, step: int = 0, previous: Tensor | None = None) -> Tensor:
        """Without `previous`, the bias by the token before is left out."""
        logits = project(state) if self.lm_head is None else cast(Tensor, self.lm_head(state))
        return logits if previous is None or not self.config.markov_rank else logits + self.bias(previous)

    def bias(self, previous_tokens: Tensor) -> Tensor:
        """Shapes: int64 [N] -> float32 [N, Vd]."""
        return cast(Tensor, self.markov_head["markov_w2"](self.markov_head["markov_w1"](previous_tokens).float()))

    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        """All draft steps of a row come from its block, which stands behind the token after the row."""
        num_tokens, size = embedded.shape[1], self.config.block_size
        cos, sin = (table.to(embedded.device) for table in rotations_of(self.shape, num_tokens + size))
        text, positions = self.read(features), torch.arange(num_tokens, device=embedded.device)
        bias = torch.where(positions <= rows[..., None], 0.0, HIDDEN_SCORE)[:, None, None]  # [B, 1, 1, A, T]
        last = rows_of(embedded, rows + 1)
        hidden = [last, *[self.get_buffer("mask_embedding").expand_as(last)] * (size - 1)]
        places = [(cos[rows + i], sin[rows + i]) for i in range(1, size + 1)]
        for layer in map(self.layer, range(self.shape.num_layers)):
            attend = layer.self_attn
            context = attend.keys_values(text, (cos[None, :num_tokens], sin[None, :num_tokens]))
            normed = [layer.input_layernorm(state) for state in hidden]
            own = [attend.keys_values(x, place) for x, place in zip(normed, places, strict=True)]
            hidden = [
                layer.finish(state, attend(x, place, context, own, bias))
                for state, x, place in zip(hidden, normed, places, strict=True)
            ]
        guesses = hidden[-self.config.num_guesses :][: objective.num_steps]
        return cast(Tensor, self.norm(torch.stack(guesses)))


@dataclass(frozen=True)
class LookAheadConfig:
    """`num_embeddings`: rows behind the last token. No tap is read."""

    num_embeddings: int
    hidden_size: int
    aux_layers: tuple[int, ...] = ()


class LookAheadHead(Head):
    """The embeddings. `read`: the target's states of given input embeddings, as `FrozenTarget.read`."""

    loss_weights = LossWeights(teacher=1.0)

    def __init__(self, config: LookAheadConfig, read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.config, self._read = config, read
        self.embeddings = nn.Parameter(torch.zeros(config.num_embeddings, config.hidden_size))

    def logits(self, state: Tensor, project: Projection, step: int = 0, previous: Tensor | None = None) -> Tensor:
        return project(state)

    def unroll(self, embedded: Tensor, features: Tensor, rows: Tensor, objective: Objective) -> Tensor:
        """Step j is row j behind the text up to the chosen row's token."""
        (size, num_tokens), num_anchors = embedded.shape[:2], rows.shape[1]
        count = min(objective.num_steps, self.config.num_embeddings)
        text, own = (torch.arange(n, device=rows.device) for n in (num_tokens, num_anchors * count))
        inputs = torch.cat([embedded, self.embeddings[:count].repeat(num_anchors, 1).expand(size, -1, -1)], 1)
        last = torch.cat([text.expand(size, -1), rows.repeat_interleave(count, 1)], 1)  # text token that a row sees
        positions = last.clone()
        positions[:, num_tokens:] += 1 + own % count
        sees = torch.zeros(size, *[num_tokens + len(own)] * 2, dtype=torch.bool, device=rows.device)
        sees[:, :, :num_tokens] = text <= last[..., None]
        sees[:, num_tokens:, num_tokens:] = (own[:, None] // count == own // count) & (own[:, None] >= own)
        states = self._read(inputs, sees, positions)[:, num_tokens:]
        return torch.movedim(states.unflatten(1, (num_anchors, count)), 2, 0)


class BlockNetwork(EagleNetwork):
    """Products in `dtype` (None: the target's), everything between them in float32.

    Raises: ModelError if the head was made for another target.
    """

    def __init__(
        self, checkpoint: BlockCheckpoint, target: DraftTarget, max_positions: int, dtype: torch.dtype | None = None
    ) -> None:
        self.block, tensors = checkpoint
        super().__init__(HeadCheckpoint(self.block.shape, tensors), target, max_positions, dtype)
        self.mask_hidden = torch.zeros(0)
        if self.block.is_causal:
            self.mask_hidden = tensors[MASK_HIDDEN].flatten().float().to(self.backend.device)

    def _make_head(self, tensors: Mapping[str, Tensor]) -> EagleHead | BlockHead:
        return super()._make_head(tensors) if self.block.is_causal else BlockHead(self.block)

    @torch.inference_mode()
    def read(self, features: Tensor, cache: KvPool, metadata: AttentionMetadata) -> None:
        """Write the keys and values of the text's positions. Shape: float32 [N, F]."""
        assert isinstance(self.head, BlockHead)
        if len(features) < self.backend.least_rows:
            features = features.repeat(2, 1)
        x, context = self.head.read(features), self.backend.context(cache, metadata)
        for layer in self._layers:
            layer.write(x, context)

    @torch.inference_mode()
    def first(self, token_ids: Ints, features: Tensor, cache: KvPool, metadata: AttentionMetadata) -> Tensor:
        """The states of a block's rows; P-EAGLE's rows are pairs, other heads do not read the features here.

        Shapes: int32 [N], float32 [N, F] -> [N, H].
        """
        if not isinstance(self.head, BlockHead):
            return super().first(token_ids, features, cache, metadata)
        num_rows, tokens = len(token_ids), self.backend.tokens(token_ids)
        if num_rows < self.backend.least_rows:
            tokens = tokens.repeat(2)
        hidden, context = F.embedding(tokens, self.embedding).float(), self.backend.context(cache, metadata)
        for i, layer in enumerate(self._layers):
            hidden = layer(hidden, self.head.layer(i).input_layernorm(hidden), context)
        return cast(Tensor, self.head.norm(hidden))[:num_rows]

    @torch.inference_mode()
    def base_logits(self, states: Tensor) -> Tensor:
        """Logits without the bias by the previous token. Shapes: [N, H] -> [N, Vd]."""
        return cast(Tensor, self.head.logits(states, self._project))

    @torch.inference_mode()
    def level_logits(self, base_logits: Tensor, previous_tokens: Tensor) -> LogitRows:
        """Logits of the tokens behind `previous_tokens`. Shapes: [N, Vd], int64 [N] -> float32 [N, Vd]."""
        if isinstance(self.head, BlockHead) and self.block.markov_rank:
            base_logits = base_logits + self.head.bias(previous_tokens)
        return self.backend.logits(base_logits, self._ids_on_device, self.config.vocab_size)
