"""A target on 2 or 4 ranks gives the bits, and so the tokens, of one rank.

Followers are processes, which import torch first: all tests with them are slow. Two ranks of threads run by default.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conversation_turns import NUM_KV_SLOTS, PLENTY, answered, turns
from drafting.block_heads import FORMS, network_for
from drafting.medusa_heads import position_drafter
from head_parts import drafter_for, free
from oracle_cases import (
    PARAMS,
    asked,
    assert_equal,
    drafters,
    generated,
    total,
    truth,
)
from rank_process import PATIENCE_S, Followers
from tiny_target import save_model, target_config, tiny_engine

from ragspec.config import DraftingConfig, DraftModelConfig, DraftTreeConfig, EngineConfig, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.block.drafter import BlockDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.drafting.growing.draft import make_shape
from ragspec.engine.loading import load_engine, make_draft_model
from ragspec.engine.parallel import Follower, load_rank
from ragspec.engine.target import FINAL, Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.ranks import DistributedRanks, Rendezvous
from ragspec.numerics.torch import graphs

ENGINE = EngineConfig(max_kv_tokens=2048, num_threads=1)
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
}
DTYPES = ("float32", "bfloat16", "int8")
CASES = [  # every kind with every dtype, and with both sizes
    *((kind, dtype, (2, 4)[(i + j) % 2]) for i, kind in enumerate(KINDS) for j, dtype in enumerate(DTYPES)),
    ("llama", "torch-float32", 2),
    ("biases", "torch-int8", 2),
]

Models = Callable[[str], str]


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with Followers(3) as followers:
        yield followers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The directory of a model by its name in KINDS."""
    folder = tmp_path_factory.mktemp("models")

    def saved(name: str) -> str:
        kind, more = KINDS[name]
        return str(folder / name if (folder / name).exists() else save_model(kind, folder / name, **SHAPE, **more))

    return saved


def outputs(target: Target) -> dict[str, np.ndarray]:
    """Logits, states and taps of two sequences and a tree in one forward, after a context computed in chunks."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, target.vocab_size, 200).astype(np.int32)
    first, second = SequenceSlots(target.pool), SequenceSlots(target.pool)
    found = {}
    for start, end in ((0, 70), (70, 71), (71, 90)):
        batch = Batch([ScheduledSequence(first, text[start:end])])
        found[f"{start}:{end}"] = target.forward(
            text[start:end], batch.metadata, np.arange(end - start, dtype=np.int32)
        )
        batch.keep(())
    parents = (-1, 0, 0, 1, 3, 2, 0)
    batch = Batch([ScheduledSequence(second, text[100:117]), ScheduledSequence(first, text[117:124], parents)])
    wanted = np.array([0, 16, *range(17, 24)], np.int32)
    found["tree"], taps = target.forward_tapped(text[100:124], batch.metadata, wanted, (0, 1, 2, FINAL))
    batch.keep((), [1, 3])
    found |= {f"tap {tap}": stream.cpu().numpy() for tap, stream in taps.items()}
    # the path kept through the tree is now context
    batch = Batch([ScheduledSequence(first, text[130:132]), ScheduledSequence(second, text[132:133])])
    found["logits"], taps = target.forward_tapped(batch.token_ids, batch.metadata, np.array([0, 2], np.int32), (FINAL,))
    found["states"] = taps[FINAL].cpu().numpy()
    unread = target.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows[:0], (FINAL,))[1][FINAL]
    found["unread"] = unread.cpu().numpy()
    last, heads = first.slots, [(1, 0), (1, 7)]
    assert target.has_heads(heads)
    found["attention"] = np.array(target.attention_of(heads, {1: taps[FINAL][1]}, last))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "size"), CASES)
def test_ranks_compute_the_bits_of_one(followers: Followers, models: Models, name: str, dtype: Any, size: int) -> None:
    """A sum in another order, a bias or a norm cut at the wrong place, a head that met another head's keys."""
    config = target_config(models(name), dtype)
    expected = outputs(Target.load(config, ENGINE.max_kv_tokens))
    with followers.target(size, config, ENGINE) as target:
        assert target.shapes[0].num_kv_heads == 4 // size
        found = outputs(target)
    for what, values in expected.items():
        assert np.array_equal(found[what], values), what


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "size"), [("biases", "torch-float32", 2), ("qwen3", "torch-int8", 4)])
def test_fast_ranks_add_up_their_parts(
    followers: Followers, models: Models, monkeypatch: pytest.MonkeyPatch, name: str, dtype: Any, size: int
) -> None:
    """A bias that every rank added, inputs that met the weights of others; or gathers all the same, two for every exchange."""
    config = target_config(models(name), dtype).model_copy(update={"exactness": "fast"})
    expected, calls = outputs(Target.load(config, ENGINE.max_kv_tokens)), Counter[str]()

    def counted(method: str) -> Any:
        real = getattr(DistributedRanks, method)
        return lambda self, part: calls.update([method]) or real(self, part)

    with followers.target(size, config, ENGINE) as target:
        for method in ("all_gather", "add_up"):
            monkeypatch.setattr(DistributedRanks, method, counted(method))
        found = outputs(target)
        monkeypatch.undo()
    num_forwards = calls["all_gather"] - len(found["attention"])  # of keys
    assert calls["add_up"] == 2 * 2 * num_forwards > 0  # an embedding and two layers a forward
    for what, values in expected.items():
        tolerance = (2e-5 if "float32" in dtype else 0.03) * np.abs(values).max(initial=1.0)
        np.testing.assert_allclose(found[what], values, atol=tolerance, rtol=0.0, err_msg=what)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_ranks_on_gpus_compute_the_bits_of_one(followers: Followers, models: Models, backend: Any) -> None:
    """Captured gathers that read or write other memory when they are replayed, or that wait for each other."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    config = TargetConfig(model=models("llama"), device="cuda", backend=backend, dtype="bfloat16")
    expected = outputs(Target.load(config, ENGINE.max_kv_tokens))
    with followers.target(2, config, ENGINE) as target:
        for _ in range(3):  # captured, then replayed
            assert all(np.array_equal(values, expected[what]) for what, values in outputs(target).items())


def test_all_ranks_replay_the_same_graphs(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank captured, and so gathered, where the others replayed: on GPUs every rank then waits for ever."""

    def capture(self: Any, packed: Any, inputs: Any, compute: Any) -> Any:
        """As on a GPU: the kernels run once before they are captured. A replay runs them again."""
        hidden, tapped = graphs._split(packed, inputs, compute)

        def replay() -> None:
            again, streams = graphs._split(packed, inputs, compute)
            hidden.copy_(again)
            for tap, stream in streams.items():
                tapped[tap].copy_(stream)

        return graphs._Captured(SimpleNamespace(replay=replay), packed, (hidden, tapped))

    monkeypatch.setattr(graphs.TieredForwards, "_capture", capture)
    config, meeting = target_config(models("llama"), "torch-float32"), Rendezvous("127.0.0.1")
    expected = outputs(Target.load(config, ENGINE.max_kv_tokens))

    def run(rank: int) -> Any:
        ranks = DistributedRanks(meeting if rank == 0 else meeting.address, rank, 2, timeout_s=PATIENCE_S)
        target = load_rank(config, ENGINE, ranks)
        target.backend._forwards.captures = True
        found = outputs(target) if rank == 0 else Follower(target).run()
        if rank == 0:
            target.close()
        return found, [key[1:] for key in target.backend._forwards._graphs]

    with ThreadPoolExecutor(2) as threads:
        (found, ours), (_, theirs) = threads.map(run, range(2))
    assert ours == theirs and len({key[0] for key in ours}) > 1
    assert all(np.array_equal(found[what], values) for what, values in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("float32", 2), ("bfloat16", 4), ("int8", 2), ("int8", 4)])
def test_every_setting_of_the_oracle(followers: Followers, models: Models, dtype: Any, size: int) -> None:
    """A draft, the company in a batch or a preemption changed the output, because followers kept other slots than rank 0."""
    config = target_config(models("llama"), dtype)
    one = Target.load(config, ENGINE.max_kv_tokens)
    with followers.target(size, config, ENGINE) as target:
        for name in PARAMS:
            requests, expected = asked(one, name)
            for which in ("half", "copy", "random"):
                drafter = drafters(one, expected)[which]
                found = generated(target, [drafter], [requests], num_kv_slots=256, max_num_batched_tokens=23)
                assert_equal(found, expected)
                assert total(found, "num_accepted") > 0 or which != "half"
            plain = [replace(request, speculation=False) for request in requests]
            assert_equal(generated(target, [drafters(one, expected)["half"]], [plain]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle", "eagle3", "medusa", "hydra", "hydra++", "poss", *FORMS])
def test_a_head_on_rank_0_drafts_what_it_drafts_beside_one_rank(
    followers: Followers, models: Models, tmp_path: Path, family: str
) -> None:
    """A head read rank 0's part of the embedding or of the output layer; its draft had the followers compute."""
    config = TargetConfig(model=models("tied"))
    one = Target.load(config, ENGINE.max_kv_tokens)
    requests, expected = asked(one, "T=1")

    def drafter(target: Target) -> Drafter:
        if family in FORMS:
            return BlockDrafter(network_for(target, tmp_path, family), make_shape("dynamic", 3, 2, 4), free())
        return (
            drafter_for(target, family)
            if family in ("eagle", "eagle3", "poss")
            else position_drafter(target, tmp_path, family)
        )

    with tiny_engine(one, [drafter(one)]) as engine:
        drafted = total(engine.generate(requests), "num_drafted")
    with followers.target(2, config, ENGINE) as target, tiny_engine(target, [drafter(target)]) as engine:
        completions = engine.generate(requests)
        assert engine.num_drafter_failures == 0
    assert_equal(completions, expected)
    assert total(completions, "num_drafted") == drafted > 0


@pytest.mark.slow
def test_a_draft_model_runs_on_rank_0_alone(followers: Followers, models: Models) -> None:
    """The followers were told of the draft model's forwards and computed them with the target's weights."""
    config, settings = TargetConfig(model=models("tied")), DraftModelConfig(path=models("llama"))
    one = Target.load(config, ENGINE.max_kv_tokens)
    requests, expected = asked(one, "T=1")
    with followers.target(2, config, ENGINE) as target:
        drafter = make_draft_model(target, settings, DraftTreeConfig())
        completions = generated(target, [drafter], [requests], fixed_nodes=8)
    assert_equal(completions, expected)
    assert total(completions, "num_drafted") > 0


@pytest.mark.slow
def test_an_engine_is_loaded_on_several_ranks(followers: Followers, models: Models) -> None:
    """The loader measured, tested or served with rank 0 alone; the followers were not told that it is over."""
    config = TargetConfig(model=models("qwen3"), max_model_len=48)
    drafting, prompt = DraftingConfig(), tuple(range(5, 17))
    request = Request("a", prompt, SamplingParams(max_tokens=20, temperature=1.0, seed=7))
    with load_engine(config, ENGINE, drafting) as engine:
        fingerprint, expected = engine.fingerprint, engine.generate([request])[0]
    with followers.group(2, config, ENGINE) as ranks, load_engine(config, ENGINE, drafting, ranks=ranks) as engine:
        assert engine.fingerprint == fingerprint
        assert engine.generate([request])[0].token_ids == expected.token_ids
    assert followers.outcomes(2) == ["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "biases"])
def test_ranks_start_again_from_their_saved_weights(followers: Followers, models: Models, name: str) -> None:
    """The second start of an int8 target on several ranks took the shapes of the whole weights, and failed."""
    config = target_config(models(name), "int8")
    expected = outputs(Target.load(config, ENGINE.max_kv_tokens))
    for _ in range(2):
        with followers.target(2, config, ENGINE) as target:
            found = outputs(target)
        assert all(np.array_equal(found[what], values) for what, values in expected.items())


@pytest.mark.slow
def test_ranks_keep_and_read_back_their_own_parts(followers: Followers, models: Models, tmp_path: Path) -> None:
    """Only rank 0's keys came back, or the ranks waited for each other for ever."""
    config = target_config(models("llama"), "float32")
    alone = Target.load(config, ENGINE.max_kv_tokens)
    requests = turns(alone, PARAMS["T=1"])
    expected = truth(alone, [*requests[0], *requests[1]], "T=1")
    options: dict[str, Any] = {"kv_offload_bytes": PLENTY, "kv_offload_dir": str(tmp_path), "num_threads": 1}
    engine_config = EngineConfig(max_kv_tokens=NUM_KV_SLOTS, **options)
    with (
        followers.target(2, config, engine_config) as target,
        tiny_engine(target, (), NUM_KV_SLOTS, **options) as engine,
    ):
        found = answered(engine, requests)
        assert engine.load().num_kv_offload_errors == 0
        engine.purge("")
        again = engine.generate(requests[1])
        assert not any(c.stats.num_restored_tokens for c in again[:1])
    assert_equal([*found[0], *found[1]], expected)
    assert_equal(again, {key: expected[key] for key in ((r.id, 0) for r in requests[1])})
    assert sum(c.stats.num_restored_tokens for c in found[1]) > 150
