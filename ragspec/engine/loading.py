"""From configuration to a running engine: loads the target, tests the numerics, measures costs, builds the drafters.

>>> engine = load_engine(TargetConfig(), EngineConfig(), DraftingConfig())
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Protocol, TypeVar

import torch

from ragspec.config import (
    MIN_STEP_TOKENS,
    DatastoreConfig,
    DraftingConfig,
    DraftModelConfig,
    DraftTreeConfig,
    EagleConfig,
    EngineConfig,
    HeadConfig,
    SelfDraftConfig,
    TargetConfig,
)
from ragspec.core import Say, log_progress
from ragspec.drafting.block.checkpoint import BlockFamily, family_in, read_block, read_look_ahead
from ragspec.drafting.block.drafter import BlockDrafter, LookAheadDrafter
from ragspec.drafting.block.network import BlockNetwork
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.datastore import Datastore, DatastoreDrafter
from ragspec.drafting.draft_model import ModelDrafter, check_vocabulary
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.eagle.checkpoint import read_head
from ragspec.drafting.eagle.drafter import HEAD_WINDOW, EagleDrafter, Network, PairTimer
from ragspec.drafting.eagle.layout import reachable
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.eagle.online import OnlineEagleDrafter, trainable_head
from ragspec.drafting.growing.draft import MEDUSA_TREE, STATIC_TREE, TreeShape, make_shape
from ragspec.drafting.lookahead import LookaheadDrafter
from ragspec.drafting.medusa.checkpoint import read_hydra, read_medusa
from ragspec.drafting.medusa.drafter import HydraDrafter, MedusaDrafter, PrefixHydraDrafter
from ragspec.drafting.medusa.network import PositionCheckpoint, PositionNetwork, PrefixNetwork
from ragspec.drafting.planner import Planner
from ragspec.drafting.self_draft import SelfDrafter
from ragspec.drafting.suffix_index import longest_matches
from ragspec.engine.admission import Admission, SamplerFactory
from ragspec.engine.engine import Engine
from ragspec.engine.measurements import forward_s, kept_costs, kept_self_test
from ragspec.engine.parallel import load_rank, threads_a_rank
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.target import Target, load_tokenizer, notices, with_available_dtype
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.attention import PAGE
from ragspec.numerics.compiled import is_kept
from ragspec.numerics.linear import packing_available
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.self_test import SelfTest, self_test
from ragspec.numerics.threads import AdaptiveThreads, num_processors, run_in_thread, set_num_threads
from ragspec.verification.sampling import compile_samplers

log = logging.getLogger(__name__)

_TYPICAL_ROWS, _NUM_TIMED = 8, 7
_EARLIER_TOKENS = 50_000
"""Of a tenant's earlier answers, with `drafting.reuse_earlier_answers`."""
_COMPILE = """
import runpy, sys
sys.path = sys.argv[1:]
runpy.run_module("ragspec.evaluation.stub_device", run_name="__main__")
"""
"""The program of the process that compiles beside, which imports from the folders of this process."""
_COMPILE_S = 120.0
"""The longest run of that process."""
_NUM_ROUNDS = 3
"""Of all threads against one; few, because `AdaptiveThreads` goes on measuring."""

T = TypeVar("T")
TimedHead = TypeVar("TimedHead", bound="Timed")


def load_engine(
    target_config: TargetConfig,
    config: EngineConfig,
    drafting: DraftingConfig,
    make_sampler: SamplerFactory | None = None,
    ranks: Ranks = ONE_RANK,
    planner_class: type[Planner] = Planner,
    adaptive_threads: bool = True,
    say: Say = log_progress,
    quiet: Callable[[], object] = lambda: None,
    step_thread: Executor | None = None,
    falls_back: bool = True,
) -> Engine:
    """A running engine. In a tensor-parallel group this is rank 0; the other ranks run `load_follower(...).run()`.

    `say` gets a line for each part of the start. The first start of a target takes many times as long as later ones.
    `adaptive_threads`: use one thread or all of them, whichever is faster at the moment. `quiet` is
    called before forwards are timed; it returns when nothing else computes in this process. `step_thread`: of one thread; engines
    that share it take turns, a step each, and so never compete for the processors. `falls_back`: run in float32 on a processor
    without bfloat16 products; False where several engines must compute alike.
    Raises: ModelError, ConfigError, SaveError, RankLost.
    """
    if falls_back and ranks.size == 1:
        target_config = with_available_dtype(target_config)
    most_threads, adaptive = threads_a_rank(config, ranks), adaptive_threads and ranks.size == 1

    def build() -> tuple[Target, Planner, Admission, EngineConfig, AdaptiveThreads]:
        compiling = compile_beside()
        say("reading the weights")
        target = load_rank(target_config, config, ranks, say, network_bytes(drafting))
        tested = _accepted(kept_self_test(target, most_threads, say), target.config)
        if target.tokenizer.chat_template is None:
            notices.warning(
                "%s has no chat template, so prompts are plain text and answers may ramble: it may be a base model, and its "
                "publisher may have an instruction-tuned one",
                target_config.model,
            )
        say("reading compiled samplers")
        compiling.join()
        compile_samplers()
        quiet()
        num_threads = choose_num_threads(target, most_threads) if adaptive else most_threads
        max_num_batched_tokens = max(MIN_STEP_TOKENS, min(config.max_num_batched_tokens, tested.num_rows))
        costs = kept_costs(
            target,
            tested.numerics_id,
            most_threads,
            partial(forward_s, target),
            lambda: measure_costs(target, max_num_batched_tokens, say),
        )
        drafters = make_drafters(target, drafting)
        planner = planner_class(drafters, costs, drafting.tree.max_nodes, target.vocab_size, target.num_embeddings)
        if planner.taps:
            forward_s(target, 1, 1, taps=planner.taps)  # compiles the search for probable tokens
        settled = config.model_copy(update={"max_num_batched_tokens": max_num_batched_tokens})
        admission = Admission(target, tested.fingerprint, make_sampler, tested.passed)
        # A second before the first question. No daemon: an interpreter that ends while the library reads crashes.
        Thread(target=admission.grammars.can_follow, name="ragspec-grammars").start()
        threads = AdaptiveThreads(most_threads, num_threads, adaptive=adaptive)
        return target, planner, admission, settled, threads

    try:
        return Engine(*run_in_thread(build, most_threads), step_thread)
    except BaseException:
        ranks.close()
        raise


def compile_beside() -> Thread:
    """Compile all that plans, drafts and samples in a process of its own, while this one compiles the forward; at the first start
    with this version's code, if a second processor is there. The thread ends with the process, which changes no result."""

    def run() -> None:
        if num_processors() == 1 or is_kept(longest_matches) or not sys.executable:
            return
        command = [sys.executable, "-Pc", _COMPILE, *filter(None, sys.path)]
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S, check=True)
        except (OSError, subprocess.SubprocessError) as cause:
            log.info("nothing was compiled beside: %s", cause)

    thread = Thread(target=run, name="ragspec-compile", daemon=True)
    thread.start()
    return thread


def choose_num_threads(target: Target, most: int) -> int:
    """`most` or one, whichever is faster: beside other load, threads that wait for each other lose. Leaves it set."""

    def seconds(num_threads: int) -> float:
        set_num_threads(num_threads)
        return forward_s(target, _TYPICAL_ROWS, _TYPICAL_ROWS)

    fastest = _fastest(list(dict.fromkeys((most, 1))), seconds)
    set_num_threads(fastest)
    return fastest


def check_numerics(target: Target, num_threads: int) -> SelfTest:
    """Run the whole self-test of a target. Raises: ModelError if it fails and `exactness` is bitwise."""
    return _accepted(
        self_test(target, target.max_context_tokens, target.config.numerics_dtype, num_threads), target.config
    )


def _accepted(tested: SelfTest, config: TargetConfig) -> SelfTest:
    if tested.passed:
        log.info(
            "numerics self-test passed: a row's bits do not depend on the rest of its batch (%s)", tested.numerics_id
        )
    elif config.exactness == "bitwise":
        raise ModelError(
            "the numerics self-test failed on this machine ("
            + "; ".join(map(str, tested.failures))
            + '); set target.exactness to "fast" to serve without the bitwise promise'
        )
    else:
        log.warning("numerics self-test failed: %s", "; ".join(map(str, tested.failures)))
    return tested


def make_drafters(target: Target, drafting: DraftingConfig) -> list[Drafter]:
    """The configured drafters. Raises: ConfigError for an unknown drafter, ModelError for an unusable or foreign head."""
    tree = drafting.tree
    known: dict[str, Callable[[], Drafter]] = {
        "copy": lambda: CopyDrafter(
            target.tokenizer, target.eos_ids, _EARLIER_TOKENS if drafting.reuse_earlier_answers else 0
        ),
        "eagle": lambda: make_eagle(target, drafting.eagle, tree),
        "medusa": lambda: make_medusa(target, drafting.medusa, tree),
        "hydra": lambda: make_hydra(target, drafting.hydra, tree),
        "draft_model": lambda: make_draft_model(target, drafting.draft_model, tree),
        "self": lambda: make_self_drafter(target, drafting.self_draft, tree),
        "datastore": lambda: make_datastore(target, drafting.datastore),
        "lookahead": LookaheadDrafter,
    }
    for name, head in drafting.eagle_heads.items():
        if name in known:
            raise ConfigError(f"drafting.eagle_heads names {name!r}, the name of another drafter")
        known[name] = partial(make_eagle, target, head, tree, name)
    names = _names_of(drafting)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"unknown drafter {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name]() for name in names] if drafting.speculation else []


def _names_of(drafting: DraftingConfig) -> SequenceOf[str]:
    if drafting.drafters is not None:
        return drafting.drafters
    return "copy", *(name for name, section in drafting.networks.items() if section.path)


def network_bytes(drafting: DraftingConfig) -> int:
    """Memory that the networks of drafters take: twice their files, for some are held in a wider type than their file's."""
    names = _names_of(drafting) if drafting.speculation else ()
    paths = [Path(section.path) for name, section in drafting.networks.items() if section.path and name in names]
    files = [file for path in paths for file in (path, *path.glob("*")) if file.is_file()]
    return 2 * sum(file.stat().st_size for file in files)


def make_eagle(
    target: Target, config: EagleConfig, tree: DraftTreeConfig, name: str = "eagle"
) -> EagleDrafter | BlockDrafter | LookAheadDrafter:
    """Load a head from its directory in the faster dtype, and measure its costs. Raises: ConfigError, ModelError."""
    path = _path_of(config, name if name == "eagle" else f"eagle_heads.{name}")
    family = family_in(path)
    if family and config.online.enabled:
        raise ConfigError(
            f"drafting.{name}.online: heads that draft blocks do not learn while they serve; EAGLE-3 heads do"
        )
    if family is BlockFamily.PASS:
        embeddings = read_look_ahead(path, target.hidden_size)
        return LookAheadDrafter(target.add_embeddings(embeddings), len(embeddings), name)
    if family:
        return make_block(target, config, tree, path, name)
    checkpoint = read_head(path, config.positions_per_layer, config.norm_output)
    shape = _head_shape(tree)
    checkpoint = checkpoint._replace(config=reachable(checkpoint.config, shape.max_depth))
    most = target.num_positions + shape.max_depth
    window = min(config.window, checkpoint.config.window or config.window)
    network, costs = _pair_network(target, partial(EagleNetwork, checkpoint, target, most), window, config.dtype)
    make: Callable[..., EagleDrafter] = EagleDrafter
    if config.online.enabled:
        head = trainable_head(checkpoint, target.backend.device)
        make = partial(OnlineEagleDrafter, head=head, online=config.online)
    return make(network, shape, costs, window=window, name=name)


def make_block(target: Target, config: EagleConfig, tree: DraftTreeConfig, path: str, name: str) -> BlockDrafter:
    """As `make_eagle`, for heads that draft a block in one forward; its size is the tree's depth unless that is configured."""
    checkpoint = read_block(path)
    block = checkpoint.config
    shape = _head_shape(tree.model_copy(update={"max_depth": tree.max_depth or block.num_guesses or None}))
    most = target.num_positions + max(shape.max_depth, block.block_size)
    window = min(config.window, block.shape.window or config.window)
    network, costs = _pair_network(target, partial(BlockNetwork, checkpoint, target, most), window, config.dtype)
    return BlockDrafter(network, shape, costs, window=window, name=name)


def _pair_network(
    target: Target, make: Callable[[torch.dtype], Network], window: int, dtype: str = "auto"
) -> tuple[Network, CostTable]:
    """A network that reads pairs, in the configured dtype or the fastest one, and its costs."""
    context = min(target.max_context_tokens, window, target.pool.num_slots) // 2

    def build(dtype: torch.dtype) -> PairTimer[Network]:
        return PairTimer(make(dtype), target.pool)

    timer, costs = _fastest_dtype(target, build, context, min(64, context), dtype)
    return timer.network, costs


def make_medusa(target: Target, config: HeadConfig, tree: DraftTreeConfig) -> MedusaDrafter:
    """As `make_eagle`, for Medusa's heads."""
    network, costs = _measured(target, read_medusa(_path_of(config, "medusa"), target))
    return MedusaDrafter(network, _head_shape(tree, MEDUSA_TREE), costs)


def make_hydra(target: Target, config: HeadConfig, tree: DraftTreeConfig) -> HydraDrafter | PrefixHydraDrafter:
    """As `make_eagle`, for Hydra's heads."""
    heads, shape = read_hydra(_path_of(config, "hydra"), target), _head_shape(tree, MEDUSA_TREE)
    if not heads.config.has_prefix:
        network, costs = _measured(target, heads)
        return HydraDrafter(network, shape, costs)
    prefix_network, costs = _pair_network(
        target, partial(PrefixNetwork, heads, target, target.num_positions), HEAD_WINDOW
    )
    return PrefixHydraDrafter(prefix_network, shape, costs, window=HEAD_WINDOW)


def _measured(target: Target, heads: PositionCheckpoint) -> tuple[PositionNetwork, CostTable]:
    return _fastest_dtype(target, lambda dtype: PositionNetwork(heads, target, dtype), 0, 64)


def _head_shape(tree: DraftTreeConfig, static: SequenceOf[tuple[int, ...]] = STATIC_TREE) -> TreeShape:
    """The tree of a head. `static`: the published tree of its family."""
    top_k, max_depth = tree.top_k or 4, tree.max_depth or 6
    if tree.kind == "confidence":
        return make_shape("dynamic", top_k, top_k, max_depth, num_nodes=tree.max_nodes)
    return make_shape(tree.kind, top_k, top_k, max_depth, static)


def _model_shape(tree: DraftTreeConfig, max_depth: int) -> TreeShape:
    """The tree of a drafter whose every level is a forward of a language model; it ranks paths by their acceptance alone.

    `max_depth`: the drafter's own, where the configuration names none.
    """
    kind = "dynamic" if tree.kind == "confidence" else tree.kind
    return make_shape(kind, tree.top_k or 3, tree.top_k or 1, tree.max_depth or max_depth)


def _path_of(config: HeadConfig, name: str) -> str:
    if not config.path:
        raise ConfigError(f"drafting.{name}.path is empty: it names the directory of a head for this target")
    return config.path


class Timed(Protocol):
    def seconds(self, num_rows: int, context: int) -> float: ...


def _fastest_dtype(
    target: Target, build: Callable[[torch.dtype], TimedHead], context: int, max_rows: int, configured: str = "auto"
) -> tuple[TimedHead, CostTable]:
    """A head with products in the configured dtype, or in the fastest one, and its costs. Memory holds one head at a time."""
    on_cpu = target.backend.name == "cpu"
    known = ("float32", "bfloat16", *(["int8"] if on_cpu and target.config.is_int8 else []))
    dtypes = [getattr(torch, name) for name in (known if configured == "auto" else (configured,))]
    dtypes = [dtype for dtype in dtypes if not on_cpu or dtype == torch.int8 or packing_available(dtype)]

    def median_s(dtype: torch.dtype) -> float:
        head = build(dtype)
        return median(head.seconds(_TYPICAL_ROWS, context) for _ in range(_NUM_TIMED))

    head = build(min(dtypes, key=median_s) if len(dtypes) > 1 else dtypes[0])
    return head, CostTable.measure(head.seconds, [context], max_rows)


def make_draft_model(target: Target, config: DraftModelConfig, tree: DraftTreeConfig) -> ModelDrafter:
    """Load a small model beside the target, on the same device, and measure its costs.

    Raises: ConfigError, ModelError.
    """
    if not config.path:
        raise ConfigError("drafting.draft_model.path is empty: it names a small language model")
    quantization = "int8" if target.config.is_int8 else "none"
    others = {"model": config.path, "adapter": "auto", "quantization": quantization, "max_model_len": None}
    others["max_weight_bytes"] = None
    others["device"] = target.ranks.device(target.config.device)
    settings = TargetConfig(**{**target.config.model_dump(), **others})
    tokenizer = load_tokenizer(settings)
    check_vocabulary(config.path, tokenizer, target.tokenizer)
    model = Target.load(settings, min(config.max_kv_tokens, target.pool.num_slots))
    context = min(model.max_context_tokens, model.pool.num_slots - PAGE, 2048) // 2
    costs = CostTable.measure(partial(forward_s, model), [context], min(64, context))
    return ModelDrafter(model, target.vocab_size, _model_shape(tree, 6), costs, PrefixCache(model.pool))


def make_self_drafter(target: Target, config: SelfDraftConfig, tree: DraftTreeConfig) -> SelfDrafter:
    """Raises: ConfigError, ModelError if the target's layers cannot be separated."""
    if not config.keep:
        raise ConfigError("drafting.self_draft.keep is empty: it lists the target's layers that draft")
    context = min(target.max_context_tokens, target.pool.num_slots - PAGE, 2048) // 2
    costs = CostTable.measure(partial(forward_s, target, layers=config.keep), [context], min(64, context))
    return SelfDrafter(target, config.keep, _model_shape(tree, 4), costs)


def make_datastore(target: Target, config: DatastoreConfig) -> DatastoreDrafter:
    """Open the index and sort what is not sorted yet. Raises: ConfigError, StoreError."""
    if not config.index_dir:
        raise ConfigError("drafting.datastore.index_dir is empty: it names the folder of an index")
    return DatastoreDrafter(Datastore(Path(config.index_dir), target.tokenizer))


def measure_costs(target: Target, max_rows: int, say: Say = log_progress) -> CostTable:
    """Seconds of a forward by number of rows, for a short and a long context."""
    say("measuring what steps of 1 to 128 rows cost")
    room = min(target.max_context_tokens, target.pool.num_slots - PAGE)
    max_rows = min(max_rows, room // 2)
    contexts = [c for c in (128, 1024) if c + min(max_rows, 128) <= room] or [room // 2]
    return CostTable.measure(partial(forward_s, target), contexts, max_rows)


def _fastest(options: SequenceOf[T], seconds: Callable[[T], float]) -> T:
    """The option of the least median time; the options take turns."""
    rounds = [[seconds(option) for option in options] for _ in range(_NUM_ROUNDS)]
    return options[min(range(len(options)), key=lambda i: median(times[i] for times in rounds))]
