"""The target: a transformers causal LM whose attention reads and writes the engine's slot pool.

The model's own forward runs; only its attention function and known layers are replaced (`ragspec.numerics.layers`). One
forward takes the flattened rows of any number of sequences, prompts and trees alike.

    >>> target = Target.load(TargetConfig(), num_kv_slots=4096)
    >>> logits = target.forward(token_ids, rows, wanted)      # float32 [len(wanted), V]

Drafters may tap the stream of hidden states: tap i is what enters layer i, tap L (the number of layers) what leaves the last one,
both before any norm; tap `FINAL` is the final norm's output, which the logits come from.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AutoTokenizer, PreTrainedTokenizerBase

from ragspec.config import TargetConfig
from ragspec.engine.step_messages import Kind, Step, send, send_step
from ragspec.engine.weights import Parts, load_part, load_whole, loading
from ragspec.errors import ModelError, RankLost
from ragspec.numerics.attention import AttentionShape, Rows, attend
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import Decoder, StepContext, make_row_invariant
from ragspec.numerics.linear import PackedLinear
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.sharding import cut_to

log = logging.getLogger(__name__)

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

FINAL = -1

_EXPECTED_ABSENT = {
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "cache_position",
}


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    step: StepContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function for models whose attention module is not replaced; keys arrive rotated.

    Shapes: query [1, heads, N, head_dim], key and value [1, KV heads, N, head_dim] -> [1, N, heads, head_dim].
    Raises: ModelError for a keyword that would change the result and is not understood.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _EXPECTED_ABSENT]
    if unknown or step is None:
        raise ModelError(
            f"{type(module).__name__} passes {unknown or 'no step'} to attention, which the engine does not know"
        )
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scaling is None else scaling
    shape = AttentionShape(query.shape[1], key.shape[1], head_dim, scale, sliding_window or 0, softcap or 0.0)
    qkv = (
        torch.cat([query, key, value], 1)[0].transpose(0, 1).float().contiguous().numpy()
    )  # [N, heads + 2 KV heads, D]
    layer = module.layer_idx
    if not step.pool.fits(layer, shape):
        raise ModelError(
            f"layer {layer} has {shape.num_kv_heads} heads of {head_dim}, which its cache was not made for"
        )
    out = attend(qkv, step.pool.keys[layer], step.pool.values[layer], step.rows, shape)
    return torch.from_numpy(out).to(query.dtype)[None], None


AttentionInterface.register("ragspec", paged_attention)


class Target:
    """A loaded model, its tokenizer and its slot pool. Owned by one engine; not thread-safe.

    Of several ranks each has a part of the weights and of every slot; rank 0 announces each forward to the others, who
    `compute` the same. Every method raises RankLost when the group is broken.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: TargetConfig,
        num_kv_slots: int,
        parts: Parts | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._parts = parts
        self.ranks: Ranks = parts.ranks if parts else ONE_RANK
        text_config = model.config.get_text_config()
        _check_servable(model, text_config)
        self.vocab_size: int = text_config.vocab_size
        self.hidden_size: int = text_config.hidden_size
        longest = int(text_config.max_position_embeddings)
        self.num_positions = longest
        self.max_context_tokens = min(config.max_context_tokens or longest, longest)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.shapes = _attention_shapes(text_config, self.ranks.size)
        """Of this rank's part of each layer."""
        self._change = _LogitChange.of(text_config)
        self.num_parameters = parts.num_parameters if parts else int(sum(p.numel() for p in model.parameters()))
        self._embedding: torch.Tensor | None = None if parts else model.get_input_embeddings().weight.detach()
        make_row_invariant(model, longest, self.ranks)
        self._model = model
        self.pool = KvPool(self.shapes, num_kv_slots)

    @classmethod
    def load(cls, config: TargetConfig, num_kv_slots: int, ranks: Ranks = ONE_RANK) -> Target:
        """Read weights (safetensors, or .bin without pickled code) and tokenizer from a directory or the local hub cache.

        Of several ranks each reads its part. Raises: ModelError.
        """
        path = config.model
        is_path = Path(path).exists() or path.startswith(("/", "./", "../"))
        if is_path and not (Path(path) / "config.json").is_file():
            raise ModelError(f"{path} is not a model directory: it has no config.json")
        tokenizer = load_tokenizer(path)
        model, parts = (load_whole(config), None) if ranks.size == 1 else load_part(config, ranks)
        return cls(model.eval(), tokenizer, config, num_kv_slots, parts)

    @property
    def embedding(self) -> torch.Tensor:
        """Rows of all tokens, as weights; some models scale them. One rank of several reads them when asked. Shape: [V, H]."""
        if self._embedding is None:
            self._embedding = self._whole("model.embed_tokens.weight")
        return self._embedding

    def forward(self, token_ids: Ints, rows: Rows, wanted: Ints) -> Floats:
        """One pass over N rows; logits of the wanted ones.

        Shapes: token_ids int32 [N], rows of N, wanted int32 [W] row numbers -> float32 [W, V].
        """
        with self._announced(token_ids, rows, wanted):
            return self.compute(token_ids, rows, wanted)

    def compute(self, token_ids: Ints, rows: Rows, wanted: Ints) -> Floats:
        """As `forward`, where every rank knows already; only rank 0 has the logits."""
        with torch.inference_mode():
            return self._logits(self._wanted_states(token_ids, rows, wanted))

    def forward_tapped(
        self, token_ids: Ints, rows: Rows, wanted: Ints, taps: Sequence[int]
    ) -> tuple[Floats, dict[int, Floats]]:
        """As `forward`, and the stream of every row at each of `taps`. Shapes: -> float32 [W, V], float32 [N, H] each."""
        with self._announced(token_ids, rows, wanted), torch.inference_mode():
            hidden, tapped = self._hidden(torch.from_numpy(token_ids.astype(np.int64)), rows, taps)
            if FINAL in taps:
                tapped[FINAL] = hidden
            logits = self._logits(_chosen(hidden, wanted))
            return logits, {tap: stream.float().numpy() for tap, stream in tapped.items()}

    def forward_states(self, token_ids: Ints, rows: Rows, wanted: Ints) -> tuple[Floats, Floats]:
        """As `forward`, and the hidden states that the logits come from. Shapes: -> float32 [W, H], float32 [W, V]."""
        with self._announced(token_ids, rows, wanted), torch.inference_mode():
            states = self._wanted_states(token_ids, rows, wanted)
            return states.float().numpy(), self._logits(states)

    def states(self, token_ids: Ints, rows: Rows) -> Floats:
        """Hidden states of all rows, as `forward_states` has them; no logits. Shapes: -> float32 [N, H]."""
        every = np.arange(len(token_ids), dtype=np.int32)
        with self._announced(token_ids, rows, every[:0]), torch.inference_mode():
            return cast(Floats, self._wanted_states(token_ids, rows, every).float().numpy())

    def logits_of(self, states: torch.Tensor) -> Floats:
        """What the output layer makes of hidden states after the final norm; no rank but this one takes part.

        Shapes: [N, H] -> float32 [N, V].
        """
        with torch.inference_mode():
            return self._change(cast(Floats, self._own_head(states).float().numpy()))

    def beat(self) -> None:
        """Nothing to compute: are the other ranks there? To be asked every BEAT_S, so that they know of this one."""
        if self.ranks.size > 1:
            send(self.ranks, Kind.BEAT)
            self.ranks.beat()

    def close(self) -> None:
        """Tell the other ranks to end. A group that is broken already ends by itself."""
        if self.ranks.size > 1:
            try:
                send(self.ranks, Kind.STOP)
            except RankLost as cause:
                log.warning("ranks were not told to stop: %s", cause)
            self.ranks.close()

    @property
    def num_layers(self) -> int:
        return len(self.shapes)

    @contextmanager
    def _announced(self, token_ids: Ints, rows: Rows, wanted: Ints) -> Iterator[None]:
        """The other ranks are told; a failure on this one leaves them out of step, which ends the group."""
        assert rows.positions.max() < self.num_positions, "the kernel reads its table of rotations unchecked"
        if self.ranks.size == 1:
            yield
            return
        send_step(self.ranks, Step(token_ids, rows, wanted), torch.get_num_threads())
        try:
            yield
        except RankLost:
            raise
        except Exception as cause:
            self.ranks.close()
            raise RankLost(f"rank 0 failed inside a step: {cause}") from cause

    def _wanted_states(self, token_ids: Ints, rows: Rows, wanted: Ints) -> torch.Tensor:
        return _chosen(self._hidden(torch.from_numpy(token_ids.astype(np.int64)), rows)[0], wanted)

    def _logits(self, states: torch.Tensor) -> Floats:
        if self.ranks.size == 1:
            return self._change(cast(Floats, self._model.lm_head(states).float().numpy()))  # [W, V]
        if not len(states):
            return np.empty((0, self.vocab_size), np.float32)
        logits = self.ranks.gather_to_first(self._model.lm_head(states))
        return self._change(cut_to(logits, self.vocab_size).float().numpy())

    @functools.cached_property
    def _own_head(self) -> Any:
        return self._model.lm_head if self._parts is None else PackedLinear(self._whole("lm_head.weight"))

    def _whole(self, name: str) -> torch.Tensor:
        assert self._parts is not None and self.ranks.rank == 0, "only rank 0 ever has the whole of a weight"
        return self._parts.checkpoint.whole(name)

    def _hidden(
        self, token_ids: torch.Tensor, rows: Rows, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        step, inside = StepContext(self.pool, rows), [tap for tap in taps if tap != FINAL]
        if isinstance(self._model.model, Decoder):
            return cast(tuple[torch.Tensor, dict[int, torch.Tensor]], self._model.model(token_ids, step, inside))
        positions = torch.from_numpy(rows.positions.astype(np.int64))
        with _Tapped(self._model.model, inside) as tapped:
            output = self._model.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, step=step
            )
        return output.last_hidden_state[0], {tap: stream[0] for tap, stream in tapped.items()}


class _Tapped:
    """The stream at some layers of a model whose own forward runs. Shape of each: [1, N, H]."""

    def __init__(self, decoder: Any, taps: Sequence[int]) -> None:
        self._places = [(tap, decoder.layers[tap] if tap < len(decoder.layers) else decoder.norm) for tap in taps]
        self._hooks: list[Any] = []

    def __enter__(self) -> dict[int, torch.Tensor]:
        tapped: dict[int, torch.Tensor] = {}
        for tap, module in self._places:
            note = functools.partial(_note_input, tapped, tap)
            self._hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
        return tapped

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _note_input(tapped: dict[int, torch.Tensor], tap: int, module: Any, args: Any, kwargs: Any) -> None:
    tapped[tap] = args[0] if args else kwargs["hidden_states"]


def _chosen(hidden: torch.Tensor, wanted: Ints) -> torch.Tensor:
    return hidden[torch.from_numpy(wanted.astype(np.int64))] if len(wanted) < len(hidden) else hidden


def _check_servable(model: Any, config: Any) -> None:
    """Raises: ModelError for what the engine would compute wrongly or not at all."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"{type(model).__name__} attends in a way the engine does not know: {', '.join(sorted(unknown))}"
        )
    missing = [name for name in ("model", "lm_head") if not hasattr(model, name)]
    if missing or not getattr(config, "max_position_embeddings", None):
        raise ModelError(f"{type(model).__name__} is not laid out as the engine expects; it serves Llama-like models")


class _LogitChange(NamedTuple):
    """What some models do to their logits, in float32: a factor (Cohere), a divisor (Granite), a soft cap (Gemma 2)."""

    factor: float
    divisor: float
    softcap: float

    @classmethod
    def of(cls, config: Any) -> _LogitChange:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return cls(*(float(getattr(config, name, None) or none) for name, none in zip(names, (1, 1, 0), strict=True)))

    def __call__(self, logits: Floats) -> Floats:
        if self.factor != 1.0:
            logits = logits * np.float32(self.factor)
        if self.divisor != 1.0:
            logits = logits / np.float32(self.divisor)
        if self.softcap:
            logits = np.tanh(logits / np.float32(self.softcap)) * np.float32(self.softcap)
        return logits


def _attention_shapes(config: Any, num_ranks: int) -> list[AttentionShape]:
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    shape = AttentionShape(heads // num_ranks, kv_heads // num_ranks, head_dim, head_dim**-0.5)
    return [shape] * config.num_hidden_layers


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """A target's tokenizer alone, for whoever prepares what engines elsewhere read. Raises: ModelError."""
    with loading(path):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path))


def _eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    found: set[int] = set()
    for given in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        found.update(given if isinstance(given, list) else [] if given is None else [given])
    return tuple(sorted(found))
