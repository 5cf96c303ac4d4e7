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
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ragspec.config import TargetConfig
from ragspec.engine.hf_attention import Tapped
from ragspec.engine.model_config import LogitChange, attention_shapes, check_servable, eos_ids
from ragspec.engine.step_messages import Kind, Step, send, send_step
from ragspec.engine.weights import Parts, load_part, load_whole, loading
from ragspec.errors import ModelError, RankLost
from ragspec.numerics.attention import Rows
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import Decoder, StepContext, make_row_invariant
from ragspec.numerics.linear import PackedLinear
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.sharding import cut_to

log = logging.getLogger(__name__)

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

FINAL = -1


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
        check_servable(model, text_config)
        self.vocab_size: int = text_config.vocab_size
        self.hidden_size: int = text_config.hidden_size
        longest = int(text_config.max_position_embeddings)
        self.num_positions = longest
        self.max_context_tokens = min(config.max_context_tokens or longest, longest)
        self.eos_ids = eos_ids(model, tokenizer)
        self.shapes = attention_shapes(text_config, self.ranks.size)
        """Of this rank's part of each layer."""
        self._change = LogitChange.of(text_config)
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
        with Tapped(self._model.model, inside) as tapped:
            output = self._model.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, step=step
            )
        return output.last_hidden_state[0], {tap: stream[0] for tap, stream in tapped.items()}


def _chosen(hidden: torch.Tensor, wanted: Ints) -> torch.Tensor:
    return hidden[torch.from_numpy(wanted.astype(np.int64))] if len(wanted) < len(hidden) else hidden


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """A target's tokenizer alone, for whoever prepares what engines elsewhere read. Raises: ModelError."""
    with loading(path):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path))
