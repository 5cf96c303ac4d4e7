"""The suite `gpu`: milliseconds of a step on a GPU by backend and model size, beside the memory's bandwidth.

Models of 0.1 to 32 billion parameters have random weights; for the smallest size the target's own weights stand in if they are
here. Each row also has a tree of 64 nodes over one row, exact products over the device's own, and decoding with drafts over
decoding without. What a backend promises is tested, not measured: `infra/gpu/check.sh tests`.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from pipelines.benchmarks.cases.timing import Case, EngineDecoder, TimedBatch, take_turns
from pipelines.benchmarks.harness import Result, Row, Run, Suite, metrics_of
from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import CopySource, SourceKind
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.checkpoints.weights import model_classes
from ragspec.engine.engine import Engine
from ragspec.engine.loading import make_drafters, measure_costs
from ragspec.engine.measurements import forward_s
from ragspec.engine.target import PoolSize, Target
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.torch.backend import TiledLinear

TEXT = "The quick brown fox jumps over the lazy dog, and the river rises in the northern hills past the old mill. "
_CONTEXT, _TREE_ROWS, _ROUNDS = 512, 64, 20
_BATCHES, _NUM_PROMPT, _NUM_TOKENS, _NUM_PAIRS = (1, 32), 48, 32, 4
_COPIED_NUMBERS = 2**28
_BUDGET_S = 400.0
"""No model is begun after so many seconds, so that a machine which is lent for ten minutes gives a result."""

BackendName = Literal["torch", "cuda"]
KV_SLOTS = 4096
MAX_CONTEXT_TOKENS = 2048


class Shape(NamedTuple):
    """A Llama of random weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, intermediate_size=self.inner, vocab_size=self.vocab,
            max_position_embeddings=MAX_CONTEXT_TOKENS, tie_word_embeddings=False, eos_token_id=None,
        )  # fmt: skip


SHAPES = (
    Shape("0.1 B", 576, 30, 9, 3, 1536, 49_152),
    Shape("1 B", 2048, 16, 32, 8, 8192, 128_256),
    Shape("8 B", 4096, 32, 32, 8, 14_336, 128_256),
    Shape("32 B", 5120, 64, 40, 8, 27_648, 152_064),
)


def run_gpu(run: Run) -> Iterator[Row]:
    """Raises: ConfigError without a GPU, ModelError."""
    if not torch.cuda.is_available():
        raise ConfigError("the suite gpu needs a CUDA device")
    shapes = SHAPES[:3] if run.quick else SHAPES[2:] + SHAPES[:2]  # the time may not do for all
    yield from rows_of(run, shapes, ("torch", "cuda"), "cuda")


def rows_of(run: Run, shapes: Sequence[Shape], backends: Sequence[BackendName], device: str) -> Iterator[Row]:
    """A row for each shape and backend, in bfloat16, until the time is used up. Raises: ModelError."""
    begin, bandwidth = time.perf_counter(), functools.cache(functools.partial(measured_bandwidth, device))
    pairs = [(shape, name) for shape in shapes for name in backends]
    for number, (shape, name) in enumerate(pairs):
        if number and time.perf_counter() - begin > _BUDGET_S:
            return
        measure = functools.partial(_row, run, shape, name, device, bandwidth)
        yield run.row(f"{shape.name}, {name}", measure)
        run.tick("models", number + 1, len(pairs))


def _row(run: Run, shape: Shape, backend: BackendName, device: str, bandwidth: Any) -> Row:
    target = target_of(run.target, shape, backend, device)
    one_s, tree_s = (_forward_s(target, rows) for rows in (1, _TREE_ROWS))
    row = {
        "model": shape.name,
        "backend": backend,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "bandwidth_gb_s": bandwidth() / 1e9,
        "step_ms": 1e3 * one_s,
        "tree64_ms": 1e3 * tree_s,
        "bandwidth_share": 2 * target.num_parameters / one_s / bandwidth(),
        "tree64_over_1": tree_s / one_s,
        "on_over_off": on_over_off(target),
        "bitwise_over_fast": tree_s / fast_forward_s(target, _TREE_ROWS),  # last: the target stays fast
    }
    del target
    torch.cuda.empty_cache()
    return row


def target_of(config: TargetConfig, shape: Shape, backend: BackendName, device: str) -> Target:
    """The configured target for the smallest shape if its weights are here, else random weights."""
    own: dict[str, Any] = {"device": device, "backend": backend, "dtype": "bfloat16", "quantization": "none"}
    if shape.name == SHAPES[0].name:
        try:
            target_folder(config)
            return Target.load(TargetConfig(**{**config.model_dump(), **own}), KV_SLOTS)
        except ModelError:
            pass  # no weights here
    return random_target(shape, TargetConfig(**own))


def measured_bandwidth(device: str) -> float:
    """Bytes a second that the device reads and writes in copies."""
    source = torch.empty(_COPIED_NUMBERS, device=device)
    target, seconds = torch.empty_like(source), list[float]()
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / median(seconds[2:])


def _forward_s(target: Target, num_rows: int) -> float:
    """A tree of one chain after a context."""
    chain = range(-1, num_rows - 1)
    return median([forward_s(target, num_rows, _CONTEXT, chain) for _ in range(_ROUNDS)][2:])


def fast_forward_s(target: Target, num_rows: int) -> float:
    """As `_forward_s`, with the device's own products, whose bits may depend on the number of rows. The target stays so."""
    for module in target._model.modules():
        if isinstance(module, TiledLinear):
            product = functools.partial(F.linear, weight=module.weight, bias=module.bias)
            module.forward, module.gated = product, functools.partial(_gated, product)  # type: ignore[method-assign,assignment]
    target.reset_pool(KV_SLOTS)
    return _forward_s(target, num_rows)


def _gated(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = product(x).chunk(2, -1)
    return F.silu(gate) * up


def on_over_off(target: Target) -> float:
    """Tokens a second with drafts over those without, the least of all batches."""
    ratios = list[float]()
    for size in _BATCHES:
        with engine_over(target, EngineConfig(max_kv_tokens=KV_SLOTS)) as engine:
            on, off = with_and_without_drafts(engine, size, _NUM_TOKENS)
        ratios.append(median(b.wall_s / a.wall_s for a, b in zip(on, off, strict=True)))
    return min(ratios)


def with_and_without_drafts(
    engine: Engine, num_requests: int, num_tokens: int
) -> tuple[list[TimedBatch], list[TimedBatch]]:
    """Requests that run side by side, each for so many tokens, with drafts and without by turns; a first pair is not counted."""
    source = (CopySource(SourceKind.PASSAGE, TEXT, "0"),)
    ids = tuple(engine.target.tokenizer(3 * TEXT).input_ids)  # a model of real weights goes on with the text
    cases = [Case(f"{i}", ids[i % 10 :][:_NUM_PROMPT], source, num_tokens) for i in range(num_requests)]
    together = {
        name: EngineDecoder(engine, speculation=name == "on", seed=0, salt="on", ignore_eos=True).together
        for name in ("on", "off")
    }
    taken = take_turns(together, [cases], _NUM_PAIRS + 1)
    on, off = ([batch for (batch,) in runs[1:]] for runs in taken.values())
    return on, off


def random_target(shape: Shape, config: TargetConfig) -> Target:
    """The same weights every time on one device. The first 256 tokens are bytes; no other has text."""
    with torch.random.fork_rng(), torch.device(config.device):
        torch.manual_seed(0)
        options = {"dtype": getattr(torch, config.dtype), "attn_implementation": "ragspec"}
        model = model_classes().from_config(shape.config(), **options).eval()
    tokenizer = _byte_tokenizer()
    return Target(model, lambda: tokenizer, config, PoolSize(KV_SLOTS))


def engine_over(target: Target, config: EngineConfig) -> Engine:
    """An engine with the default drafters over a loaded target, whose pool it replaces."""
    drafting = DraftingConfig()
    target.reset_pool(config.max_kv_tokens)
    drafters, costs = make_drafters(target, drafting), measure_costs(target, config.max_num_batched_tokens)
    planner = Planner(drafters, costs, drafting.tree.max_nodes, target.vocab_size)
    return Engine(target, planner, Admission(target, "benchmark"), config)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def summarise(rows: Sequence[Row]) -> Result:
    """`on_off_min` of all rows; the rest of the rows of 8 billion parameters."""
    result: Result = {"device": rows[0]["device"], "bandwidth_gb_s": rows[0]["bandwidth_gb_s"]}
    result["on_off_min"] = min(row["on_over_off"] for row in rows)
    largest = [row for row in rows if row["model"] == SHAPES[2].name]
    if largest:
        result["bandwidth_share"] = max(row["bandwidth_share"] for row in largest)
        for key in ("tree64_over_1", "bitwise_over_fast"):
            result[key] = min(row[key] for row in largest)
    return result


SUITE = Suite("gpu", run_gpu, summarise, metrics_of("gpu"))
