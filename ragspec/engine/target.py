"""The target: a transformers causal LM whose attention reads and writes the engine's slot pool.

The model's own forward runs; only its attention function and known layers are replaced (`ragspec.numerics.layers`). One
forward takes the rows of any number of sequences, prompts and trees alike. Knows no request and decides no token.

    >>> target = Target.load(TargetConfig(), num_kv_slots=4096)
    >>> logits = target.forward(batch.token_ids, batch.metadata, batch.logit_rows)      # float32 [W, V]

Drafters may tap hidden states: tap i is the stream entering layer i, tap L (the number of layers) the stream leaving the last
layer, both before any norm. Tap `FINAL` is the output of the final norm, which the logits come from.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ragspec.config import TargetConfig
from ragspec.core import Attention, Say, log_progress
from ragspec.engine.checkpoints.model_config import (
    LogitTransform,
    attention_shapes,
    check_servable,
    eos_ids,
    read_tokenizer,
)
from ragspec.engine.checkpoints.saved_model import SavedWeights, load_saved
from ragspec.engine.checkpoints.target_files import return_freed, target_folder
from ragspec.engine.checkpoints.weights import WeightShards, load_shards, load_whole
from ragspec.engine.hf_attention import tapped_layers
from ragspec.engine.prompt_attention import PromptAttention
from ragspec.engine.rank_messages import ForwardInput, KeyRead, MessageKind, in_step, send, send_forward, send_key_read
from ragspec.errors import ModelError, RankLost
from ragspec.numerics.attention import PAGE, AttentionMetadata, Floats, Ints, padded
from ragspec.numerics.backend import Backend, LogitRows
from ragspec.numerics.batch import NODES, Batch, ScheduledSequence
from ragspec.numerics.cpu.backend import CpuBackend
from ragspec.numerics.cpu.int8 import Int8Decoder
from ragspec.numerics.cpu.int8_weights import WeightArena
from ragspec.numerics.health import why_lost
from ragspec.numerics.kv_cache import OutOfSlots, SequenceSlots
from ragspec.numerics.layers import Decoder, make_row_invariant
from ragspec.numerics.linear import packing_available
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.sharding import without_padding
from ragspec.numerics.torch.backend import TorchBackend
from ragspec.numerics.torch.transfer import free_bytes

_POOL_SHARE, _POOL_STEP = 0.9, 4096
"""Of a GPU's free memory, the rest of which is for activations, captured graphs and sampling; and the slots in which a pool is
counted that has fewer than asked for: some megabytes more or less change neither its size nor the name of kept measurements."""
log = logging.getLogger(__name__)
notices = logging.getLogger("ragspec.engine.notices")
"""Warnings about the configured model that its user must see; the command line keeps other warnings off the terminal."""
notices.setLevel(logging.WARNING)

FINAL = -1


class PoolSize(NamedTuple):
    """Slots asked for, the most bytes that they may take, and a GPU's bytes that are left to what is loaded later."""

    num_slots: int
    max_bytes: int | None = None
    reserved_bytes: int = 0


class Target:
    """A loaded model, its tokenizer and its slot pool. Belongs to one engine; not thread-safe. `tokenizer` waits for the thread
    that reads it, beside the weights and the self-test.

    In a tensor-parallel group each rank holds a part of the weights and of every slot. Rank 0 announces each forward to the
    other ranks, which `compute` the same rows. Every method raises RankLost when the group is broken.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        config: TargetConfig,
        pool_size: PoolSize,
        shards: WeightShards | None = None,
        arena: WeightArena | None = None,
        folder: str = "",
    ) -> None:
        """`folder`: of the weights; without it no attention can be shown."""
        self._tokenizer, self._folder = tokenizer, folder
        self.config = config
        self._shards = shards
        self.ranks: Ranks = shards.ranks if shards else ONE_RANK
        self.backend = make_backend(config, self.ranks, arena)
        self.backend.place(model.get_input_embeddings())
        text_config = model.config.get_text_config()
        check_servable(model, text_config)
        self.vocab_size = self.num_embeddings = int(text_config.vocab_size)
        self.hidden_size: int = text_config.hidden_size
        self.num_positions = int(text_config.max_position_embeddings)
        self.max_context_tokens = min(config.max_model_len or self.num_positions, self.num_positions)
        self.shapes = attention_shapes(text_config, self.ranks.size)
        """The attention of this rank's part of each layer."""
        self._transform = LogitTransform.of(text_config)
        self.num_parameters = shards.num_parameters if shards else model.num_parameters()
        self._embedding: torch.Tensor | None = None if shards else model.get_input_embeddings().weight.detach()
        make_row_invariant(model, self.num_positions, self.backend, self.ranks)
        self._model, self._pool_size = model, pool_size
        self._decoders: dict[tuple[int, ...], Decoder] = {}
        self.reset_pool(pool_size.num_slots)

    @classmethod
    def load(
        cls,
        config: TargetConfig,
        num_kv_slots: int,
        ranks: Ranks = ONE_RANK,
        max_kv_bytes: int | None = None,
        say: Say = log_progress,
        reserved_bytes: int = 0,
    ) -> Self:
        """Read weights (safetensors, .bin without pickled code, or GGUF) and tokenizer, and merge the adapter.

        The pool has fewer slots than asked for if they would take more than `max_kv_bytes`. Each rank of a group reads its own
        part. `say` as for `target_folder`; `reserved_bytes` as in `PoolSize`. Raises: ModelError, SaveError.
        """
        check_dtype(config)
        dtype = getattr(torch, config.dtype)
        if config.max_weight_bytes and ranks.size > 1:
            raise ModelError("target.max_weight_bytes reads weights from disk, which a target on one rank alone does")
        folder = target_folder(config, say)
        is_saved = config.is_int8 and config.backend_name == "cpu"
        saved = SavedWeights(folder, config, ranks) if is_saved else None
        arena = saved.load() if saved else None
        model, shards = load_saved(folder, dtype, arena, saved.config) if saved and ranks.size == 1 else None, None
        beside = ThreadPoolExecutor(1, "ragspec-tokenizer")
        tokenizer = beside.submit(read_tokenizer, folder).result
        beside.shutdown(wait=False)
        if model is None:
            tokenizer()  # an error is found before the long part, and no two threads import transformers
        if model is None and ranks.size == 1 and not (arena and arena.is_saved):
            if saved:
                say("quantising the weights")
            model = load_whole(folder, dtype)
        elif model is None:
            model, shards = load_shards(folder, dtype, ranks, only_embedding=bool(arena and arena.is_saved))
        pool_size = PoolSize(num_kv_slots, max_kv_bytes, reserved_bytes)
        target = cls(model.eval(), tokenizer, config, pool_size, shards if ranks.size > 1 else None, arena, folder)
        if saved and arena and isinstance(target._model.model, Int8Decoder):
            saved.save(arena, target._model.model.rotations, target._model.config)
            if ranks.size == 1 and not arena.is_saved and saved.load().is_saved:
                del target, model, arena
                return_freed()  # Why: with the saved weights alone, a target takes half the memory
                return cls.load(config, num_kv_slots, ranks, max_kv_bytes, say, reserved_bytes)
        if config.max_weight_bytes and arena and not arena.streams:
            if not isinstance(target._model.model, Int8Decoder):
                raise ModelError(
                    f"target.max_weight_bytes needs kernels that run the whole decoder, which {folder} has not"
                )
            raise ModelError(
                "target.max_weight_bytes reads quantised weights from target.cache_dir, and they could not be kept there"
            )
        return target

    def reset_pool(self, num_kv_slots: int) -> None:
        """A fresh pool; sequences of the old pool are lost.

        On a GPU it takes at most its share of the memory that weights, indexes, FAISS's scratch and the reserved bytes leave;
        of a group, the rank with the least decides. Raises: ModelError if not even a page fits.
        """
        if (max_bytes := self._pool_size.max_bytes) is not None:
            num_kv_slots = self._slots_within("max_kv_bytes", max_bytes, num_kv_slots)
        self.__dict__.pop("pool", None)  # frees the old pool's memory
        free, asked = free_bytes(self.backend.device), num_kv_slots
        if free is not None:
            least = int(self.ranks.all_gather(torch.tensor([[max(0, free - self._pool_size.reserved_bytes)]])).min())
            num_kv_slots = self._slots_within("a GPU's free memory", int(_POOL_SHARE * least), asked)
            if _POOL_STEP < num_kv_slots < asked:
                num_kv_slots -= num_kv_slots % _POOL_STEP
        if num_kv_slots < asked:
            notices.warning("the GPU has memory for keys and values of %d tokens, not of %d", num_kv_slots, asked)
        self.pool = self.backend.make_pool(self.shapes, num_kv_slots)

    def _slots_within(self, name: str, num_bytes: int, num_slots: int) -> int:
        """As many of the slots as take so many bytes, in whole pages. Raises: ModelError if not even a page fits."""
        if (most := num_bytes // self.token_bytes // PAGE * PAGE) < PAGE:
            raise ModelError(f"{name} is {num_bytes} bytes; a token takes {self.token_bytes}, a page {PAGE}")
        return min(num_slots, most)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises: ModelError if it cannot be read."""
        return self._tokenizer()

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an output. Raises: as `tokenizer`."""
        return eos_ids(self._model, self.tokenizer)

    @property
    def token_bytes(self) -> int:
        """Memory of a token's keys and values on this rank."""
        return sum(2 * s.num_kv_heads * padded(s.head_dim) for s in self.shapes) * self.backend.kv_itemsize

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding matrix on the device, without the scale that some models apply. Rank 0 of a group reads the file.
        Shape: [V, H]."""
        if self._embedding is None:
            self._embedding = self._whole_weight("model.embed_tokens.weight")
        return self._embedding

    def add_embeddings(self, rows: torch.Tensor) -> int:
        """Inputs for token ids behind the vocabulary, of which no logits exist; returns the first id. Shape: [rows, H].

        Raises: ModelError for a target whose decoder ragspec does not replace, or on several ranks.
        """
        decoder = self._model.model
        if not isinstance(decoder, Decoder | Int8Decoder) or self.ranks.size > 1:
            raise ModelError("look-ahead embeddings need a model whose decoder ragspec replaces, and one rank")
        table, first = decoder.embedding.weight.detach(), self.num_embeddings
        rows = torch.cat([table[:first], rows.to(table.device, table.dtype)])
        decoder.embedding.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.num_embeddings = len(rows)
        return first

    @property
    def text_config(self) -> Any:
        """The model's configuration, as transformers reads it."""
        return self._model.config.get_text_config()

    @property
    def num_layers(self) -> int:
        return len(self.shapes)

    def forward(self, token_ids: Ints, metadata: AttentionMetadata, logit_rows: Ints) -> Floats:
        """Logits of some rows, on the host. Shapes: token_ids int32 [N], logit_rows int32 [W] -> float32 [W, V]."""
        return np.asarray(self.forward_tapped(token_ids, metadata, logit_rows, ())[0])

    def forward_tapped(
        self, token_ids: Ints | torch.Tensor, metadata: AttentionMetadata, logit_rows: Ints, taps: Sequence[int]
    ) -> tuple[LogitRows, dict[int, torch.Tensor]]:
        """Logits where the backend keeps them, and the hidden states of every row at each tap, on the device; token ids by tap on
        the host, complete after the backend's next `wait`.

        Shapes: token_ids int32 [N], or with one rank int64 on the device; logit_rows int32 [W] -> float32 [W, V], float32 [N, H]
        each.
        """
        layer_taps = [tap for tap in taps if tap >= 0]
        step = ForwardInput(token_ids, metadata, logit_rows, layer_taps)
        with self._announced(step), torch.inference_mode():
            hidden, tapped = self._hidden(token_ids, metadata, layer_taps)
            if FINAL in taps:
                tapped[FINAL] = hidden
            values = self._logits(hidden, logit_rows)
            features = {tap: stream.float() for tap, stream in tapped.items()}
            if NODES in taps:
                features[NODES] = self.backend.best_tokens(values, logit_rows, len(token_ids))
            return self.backend.logits(values), features

    def compute(
        self, token_ids: Ints | torch.Tensor, metadata: AttentionMetadata, logit_rows: Ints, taps: Sequence[int] = ()
    ) -> LogitRows:
        """As `forward`, without telling the other ranks. Only rank 0 gets whole logits. `taps`: of layers."""
        with torch.inference_mode():
            return self.backend.logits(self._logits(self._hidden(token_ids, metadata, taps)[0], logit_rows))

    def states_through(
        self, layers: Sequence[int], token_ids: Ints | torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """States after the final norm of a forward through some layers alone, whose keys go to the rows' slots.

        Shapes: int32 [N] -> [N, H]. Raises: ModelError if the layers cannot be separated.
        """
        assert metadata.positions.max() < self.num_positions, "the kernel reads its table of rotations unchecked"
        decoder = self._decoders.get(tuple(layers)) or self._decoder_of(tuple(layers))
        with torch.inference_mode():
            states: torch.Tensor = decoder(self.backend.tokens(token_ids), self.backend.context(self.pool, metadata))[0]
        return states

    def _decoder_of(self, layers: tuple[int, ...]) -> Decoder:
        whole = self._model.model
        if not isinstance(whole, Decoder) or self.ranks.size > 1:
            raise ModelError(
                "drafting with some of the target's layers needs a model whose decoder ragspec replaces, one rank, and on "
                'backend cpu float weights (target.quantization: "none")'
            )
        if not layers or min(layers) < 0 or max(layers) >= self.num_layers or sorted(set(layers)) != list(layers):
            raise ModelError(f"{list(layers)} are no rising layers of a target of {self.num_layers} layers")
        return self._decoders.setdefault(layers, whole.with_layers(layers))

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """The output layer on states after the final norm; the other ranks take no part. Shapes: [N, H] -> float32 [N, V]."""
        with torch.inference_mode():
            return self._transform(self._own_head(states).float())

    def has_heads(self, heads: Sequence[tuple[int, int]]) -> bool:
        """Whether the attention of each (layer, head) can be shown. Callable from any thread. Raises: ModelError."""
        return self._prompt_attention is not None and all(map(self._prompt_attention.has, heads))

    def attention_of(
        self, heads: Sequence[tuple[int, int]], streams: Mapping[int, torch.Tensor], slots: Ints
    ) -> Attention:
        """The attention of heads that the target has, from the last of these positions.

        Shapes: streams of that position by layer [H]; slots int32 [T] -> [heads, T].
        """
        attention = cast(PromptAttention, self._prompt_attention)
        rows = list[tuple[float, ...]]()
        for layer, head in heads:
            read = KeyRead(layer, attention.kv_head(head), slots)
            if self.ranks.size > 1:
                send_key_read(self.ranks, read)
            with in_step(self.ranks):
                rows.append(attention.row((layer, head), streams[layer], self.keys_of(read)))
        return tuple(rows)

    def keys_of(self, read: KeyRead) -> Floats:
        """The rotated keys of one KV head, on every rank. Shapes: -> [T, head_dim]."""
        shape = self.shapes[read.layer]
        owner, own = divmod(read.kv_head, shape.num_kv_heads)
        keys = torch.from_numpy(self.pool.keys_of(read.layer, own, read.slots)[:, : shape.head_dim].copy())
        whole = self.ranks.all_gather(keys).numpy()  # [T, ranks * head_dim]
        return np.asarray(whole[:, owner * shape.head_dim : (owner + 1) * shape.head_dim])

    @functools.cached_property
    def _prompt_attention(self) -> PromptAttention | None:
        decoder = self._model.model
        if not self._folder or not isinstance(decoder, Decoder | Int8Decoder):
            return None
        shape = attention_shapes(self.text_config, 1)[0]
        return PromptAttention(self._folder, self.text_config, shape, decoder.rotations)

    def check_health(self, num_rows: int, num_logits: int) -> None:
        """After a step that failed, with so many rows and logits: whether forwards of its size still compute.

        Raises: RankLost if the target is lost. A group of several ranks is not asked: it ends with any forward that fails.
        """

        def compute() -> None:
            slots = SequenceSlots(self.pool)
            try:
                batch = Batch([ScheduledSequence(slots, np.zeros(num_rows, np.int32))])
                self.forward_tapped(batch.token_ids, batch.metadata, np.arange(num_logits, dtype=np.int32), ())
                self.backend.wait()
            except OutOfSlots:
                pass  # nothing is known: running sequences hold the pages, and tell more with their next step
            finally:
                slots.release()

        if self.ranks.size == 1 and (reason := why_lost("the target", compute)):
            raise RankLost(reason)

    def heartbeat(self) -> None:
        """Check that the other ranks are alive, and tell them that rank 0 is. The engine calls this every HEARTBEAT_S."""
        if self.ranks.size > 1:
            send(self.ranks, MessageKind.HEARTBEAT)
            self.ranks.barrier()

    def close(self) -> None:
        """Tell the other ranks to end. A group that is broken already ends by itself."""
        if self.ranks.size > 1:
            try:
                send(self.ranks, MessageKind.STOP)
            except RankLost as cause:
                log.warning("the other ranks could not be told to stop: %s", cause)
            self.ranks.close()

    @contextmanager
    def _announced(self, step: ForwardInput) -> Iterator[None]:
        """Tell the other ranks of a forward, which runs inside."""
        assert step.metadata.positions.max() < self.num_positions, "the kernel reads its table of rotations unchecked"
        if self.ranks.size > 1:
            send_forward(self.ranks, step, torch.get_num_threads())
        with in_step(self.ranks):
            yield

    def _hidden(
        self, token_ids: Ints | torch.Tensor, metadata: AttentionMetadata, taps: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if isinstance(self._model.model, Decoder | Int8Decoder):
            return self.backend.decode(self._model.model, token_ids, self.pool, metadata, taps)
        context, tokens = self.backend.context(self.pool, metadata), self.backend.tokens(token_ids)
        positions = self.backend.tokens(metadata.positions)
        with tapped_layers(self._model.model, taps) as tapped:
            output = self._model.model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, forward_context=context
            )
        return output.last_hidden_state[0], {tap: stream[0] for tap, stream in tapped.items()}

    def _logits(self, hidden: torch.Tensor, logit_rows: Ints) -> torch.Tensor:
        """Shapes: hidden [N, H] -> float32 [W, V]."""
        states = hidden
        if len(logit_rows) < len(hidden):
            states = hidden.index_select(0, self.backend.tokens(logit_rows))
        if not len(states):
            return states.new_empty((0, self.vocab_size), dtype=torch.float32)
        logits = self._model.lm_head(states)
        if self.ranks.size > 1:
            logits = without_padding(self.ranks.gather_to_first(logits), self.vocab_size)
        return self._transform(logits.float())

    @functools.cached_property
    def _own_head(self) -> Any:
        if self._shards is None:
            return self._model.lm_head
        return self.backend.alone.make_linear(self._whole_weight("lm_head.weight"))

    def _whole_weight(self, name: str) -> torch.Tensor:
        assert self._shards is not None and self.ranks.rank == 0, "only rank 0 ever holds a whole weight"
        return self._shards.checkpoint.whole(name).to(self.backend.device)


def lacks_dtype(config: TargetConfig) -> bool:
    """Whether this processor lacks the products that float weights of the configured dtype need."""
    return config.backend_name == "cpu" and not config.is_int8 and not packing_available(getattr(torch, config.dtype))


def check_dtype(config: TargetConfig) -> None:
    """Raises: ModelError if `lacks_dtype`."""
    if lacks_dtype(config):
        raise ModelError(
            f"this processor has no packed {config.dtype} product, and replicas and ranks must compute alike: set target.dtype "
            "to float32, or target.quantization to int8"
        )


def with_available_dtype(config: TargetConfig) -> TargetConfig:
    """`config` in float32, with a warning, if this processor lacks bfloat16 products. The numerics id is float32's then."""
    if config.dtype == "float32" or not lacks_dtype(config):
        return config
    notices.warning(
        "this processor has no %s products: the target runs in float32, with twice the memory and the texts of float32; "
        "target.quantization: int8 takes a quarter",
        config.dtype,
    )
    return config.model_copy(update={"dtype": "float32"})


def make_backend(config: TargetConfig, ranks: Ranks, arena: WeightArena | None) -> Backend:
    """On a GPU "auto" is `cuda` where Triton can be imported, else `torch`; there `torch` has Triton's products if it can.

    Raises: ModelError for Triton kernels without Triton, ConfigError for a GPU that several ranks would share.
    """
    if config.backend_name == "cpu":
        kv_dtype = np.uint16 if config.kv_dtype == "bfloat16" else np.float32
        return CpuBackend(arena or (WeightArena() if config.is_int8 else None), ranks, kv_dtype, config.kv_dir)
    make: type[TorchBackend] = TorchBackend
    if config.device != "cpu":
        try:
            from ragspec.numerics.cuda.backend import CudaBackend, TritonProducts
        except ImportError as cause:
            if config.backend == "cuda":
                raise ModelError('target.backend "cuda" needs Triton: pip install "ragspec[kernels]"') from cause
        else:
            make = TritonProducts if config.backend == "torch" else CudaBackend
    return make(ranks.device(config.device), getattr(torch, config.dtype), is_int8=config.is_int8)


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """A target's tokenizer alone, without the model. Raises: ModelError, SaveError."""
    return read_tokenizer(target_folder(config))
