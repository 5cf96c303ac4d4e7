"""What ranks say to each other. Here they are threads of one process; `tests/engine/test_parallel_losses.py` kills real ones.

Cutting a product by its outputs changes no bit, and every column is on exactly one rank.
"""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_process import Rank

from ragspec.errors import ConfigError, ModelError, RankLost
from ragspec.numerics.linear import PackedLinear
from ragspec.numerics.ranks import ONE_RANK, DistributedRanks, Ranks, Rendezvous
from ragspec.numerics.sharding import FFN_MULTIPLE, check_head_counts, weight_slice, without_padding


def together(size: int, call: Callable[[Ranks], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `call` gives on every rank of a group; an exception is a value too."""
    meeting = Rendezvous("127.0.0.1")

    def run(rank: int) -> Any:
        ranks = DistributedRanks(meeting if rank == 0 else meeting.address, rank, size, timeout_s=timeout_s)
        try:
            return call(ranks)
        except RankLost as error:
            return error
        finally:
            ranks.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def own_part(rank: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(num_rows * 3).view(num_rows, 3) + 100 * rank).to(dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_are_put_side_by_side_bit_for_bit(size: int) -> None:
    """Rows of one rank above those of another, ranks in order of arrival, or bfloat16 summed instead of moved."""

    def gather(ranks: Ranks) -> list[torch.Tensor]:
        time.sleep(0.05 * (size - ranks.rank))
        return [
            method(own_part(ranks.rank, num_rows, dtype))
            for method in (ranks.all_gather, ranks.gather_to_first)
            for dtype in (torch.float32, torch.bfloat16, torch.int64)
            for num_rows in (1, 7)
        ]

    found = together(size, gather)
    for i, first in enumerate(found[0]):
        num_rows = len(first)
        expected = torch.cat([own_part(rank, num_rows, first.dtype) for rank in range(size)], 1)
        assert torch.equal(first, expected) and first.is_contiguous()
        for rank in range(1, size):
            own = own_part(rank, num_rows, first.dtype)
            assert torch.equal(found[rank][i], expected if i < 6 else own)


def test_columns_of_a_view_are_gathered_as_they_are_seen() -> None:
    """A part that is not contiguous was sent as it lies in memory."""
    found = together(2, lambda ranks: ranks.all_gather(own_part(ranks.rank, 4, torch.float32)[:, 1:]))
    assert torch.equal(found[1], torch.cat([own_part(rank, 4, torch.float32)[:, 1:] for rank in range(2)], 1))


def test_followers_hear_what_rank_0_says_however_late() -> None:
    """A follower gave up after the seconds that a gather may take, while rank 0 had nothing to say."""

    def speak(ranks: Ranks) -> torch.Tensor:
        words = torch.full((4,), ranks.rank, dtype=torch.int32)
        if ranks.rank == 0:
            time.sleep(0.8)
            words = torch.arange(4, dtype=torch.int32)
        ranks.broadcast(words)
        ranks.barrier()
        return words

    assert all(torch.equal(words, torch.arange(4, dtype=torch.int32)) for words in together(3, speak, timeout_s=0.5))


CALLS: dict[str, Callable[[Ranks], None]] = {
    "barrier": lambda ranks: ranks.barrier(),
    "broadcast": lambda ranks: ranks.broadcast(torch.zeros(4, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", CALLS)
def test_who_does_not_answer_in_time_is_lost_and_so_is_the_group(name: str) -> None:
    """A rank that hangs was waited for, a day between two steps, since what rank 0 says is only gone when it is heard; or a group
    that lost its step was used again."""

    def beat(ranks: Ranks) -> str:
        if ranks.rank == 1:
            time.sleep(1.2)
            return "late"
        begin = time.monotonic()
        with pytest.raises(RankLost, match="Timed out"):
            CALLS[name](ranks)
        assert time.monotonic() < begin + 2
        for call in CALLS.values():
            with pytest.raises(RankLost, match="closed"):
                call(ranks)
        return "noticed"

    assert together(2, beat, timeout_s=0.5) == ["noticed", "late"]


def test_a_rank_that_leaves_is_noticed_at_once() -> None:
    """Only the timeout told that a process had ended, and for a broadcast that is a day."""

    def leave(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            time.sleep(0.3)
            return ranks.close()
        ranks.broadcast(torch.zeros(4, dtype=torch.int32))

    begin = time.monotonic()
    assert isinstance(together(2, leave)[1], RankLost)
    assert time.monotonic() < begin + 20


def test_patience_outlasts_the_timeout_and_ends() -> None:
    """A rank that compiles for a minute at the start was lost; or the group stayed patient for ever."""

    def load(ranks: Ranks) -> str:
        with ranks.without_timeout():
            time.sleep(0.8 * ranks.rank)
            ranks.barrier()
        time.sleep(0.8 * ranks.rank)
        ranks.barrier()
        return "answered"

    first, _ = together(2, load, timeout_s=0.5)
    assert isinstance(first, RankLost)


def test_who_never_comes_is_lost() -> None:
    """Rank 0 waited for ever for ranks that could not be started, or one for a rank 0 that is not there."""
    with pytest.raises(RankLost):
        DistributedRanks(Rendezvous("127.0.0.1"), 0, 2, connect_s=0.3)
    address = Rendezvous("127.0.0.1").address  # closed again at once
    with pytest.raises(RankLost):
        DistributedRanks(address, 1, 2, connect_s=0.3)


@pytest.mark.parametrize(
    ("address", "rank", "match"),
    [
        ("127.0.0.1:40001", 2, "no rank 2 among 2"),
        ("127.0.0.1:40001", -1, "no rank -1"),
        ("127.0.0.1", 0, "looks like 127"),
        (":", 0, "looks like 127"),
        ("host:port", 0, "looks like 127"),
    ],
)
def test_impossible_ranks_and_addresses_are_refused(address: str, rank: int, match: str) -> None:
    """A wrong address was waited for, or a rank beyond the last took part in nothing."""
    with pytest.raises(ConfigError, match=match):
        DistributedRanks(address, rank, 2, connect_s=1.0)


def test_gpus_that_are_not_there_are_refused() -> None:
    """A group on GPUs began on a machine that has fewer of them."""
    with pytest.raises(ConfigError, match="nccl needs a GPU for each of 99 ranks; torch finds none"):
        DistributedRanks("127.0.0.1:40001", 98, 99, backend="nccl", connect_s=1.0)


def test_one_rank_is_a_group_of_its_own() -> None:
    """The whole of something copied, or waited for, where there is nobody else."""
    part = torch.zeros(2, 3)
    assert ONE_RANK.all_gather(part) is part is ONE_RANK.gather_to_first(part)
    ONE_RANK.barrier()
    ONE_RANK.broadcast(part)
    with ONE_RANK.without_timeout():
        assert (ONE_RANK.rank, ONE_RANK.size) == (0, 1)


ROWS = (1, 2, 3, 7, 16, 31, 64, 65, 257)
WIDTHS = [(320, 320), (1024, 320), (64, 88), (88, 64), (1001, 384), (30, 50), (2, 16), (17, 1000)]
REALISTIC = [(768, 768), (2048, 768), (768, 2048), (6144, 320), (32000, 768), (896, 4864), (1536, 8960), (4096, 2048)]


def group(size: int) -> list[Ranks]:
    return [Rank(rank, size) for rank in range(size)]


def assert_columns_equal(out_features: int, in_features: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(out_features + in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    whole = PackedLinear(weight, bias)
    own = []
    for ranks in group(size):
        cut = weight_slice("x.o_proj.weight", (out_features, in_features), ranks)
        part, own_bias = torch.zeros(cut.width, in_features, dtype=dtype), torch.zeros(cut.width, dtype=dtype)
        part[: cut.stop - cut.start] = weight[cut.start : cut.stop]
        own_bias[: cut.stop - cut.start] = bias[cut.start : cut.stop]
        own.append(PackedLinear(part, own_bias))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in ROWS:
            x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
            gathered = without_padding(torch.cat([linear(x) for linear in own], 1), out_features)
            assert torch.equal(gathered, whole(x)), (num_threads, num_rows)


@pytest.mark.parametrize(
    ("number", "shape"),
    [*enumerate(WIDTHS), *(pytest.param(n, shape, marks=pytest.mark.slow) for n, shape in enumerate(REALISTIC))],
)
def test_columns_of_a_part_are_those_of_the_whole(number: int, shape: tuple[int, int]) -> None:
    """A group's products differed from one rank's in the last bit: oneDNN takes another path for another width."""
    assert_columns_equal(*shape, size=(2, 4)[number % 2], dtype=(torch.float32, torch.bfloat16)[number // 2 % 2])


@given(st.integers(2, 700), st.integers(1, 700), st.integers(2, 8), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=15, deadline=None)
def test_columns_of_any_part_are_those_of_the_whole(
    out_features: int, in_features: int, size: int, dtype: torch.dtype
) -> None:
    """A width that nobody thought of."""
    assert_columns_equal(out_features, in_features, size, dtype)


def test_a_column_alone_would_differ() -> None:
    """Why parts have at least 16 columns: this check shows that the others can fail."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 384, generator=generator)
    x = torch.randn(33, 384, generator=generator)
    whole = PackedLinear(weight)(x)
    alone = torch.cat([PackedLinear(weight[i : i + 1])(x) for i in range(64)], 1)
    sixteen = torch.cat([PackedLinear(weight[i : i + 16])(x) for i in range(0, 64, 16)], 1)
    assert torch.equal(sixteen, whole)
    assert not torch.equal(alone, whole)


def test_every_column_is_on_one_rank() -> None:
    """A column on two ranks or on none, at widths that do not divide."""
    weights = (
        ("model.layers.0.mlp.gate_proj.weight", 0, FFN_MULTIPLE),
        ("model.layers.0.mlp.up_proj.bias", 0, FFN_MULTIPLE),
        ("model.layers.0.self_attn.o_proj.weight", 0, 16),
        ("lm_head.weight", 0, 16),
        ("model.embed_tokens.weight", 1, 16),
    )
    widths, sizes = (1, 16, 63, 64, 65, 88, 320, 1001), (1, 2, 3, 4, 8)
    for (name, dim, multiple), width, size in itertools.product(weights, widths, sizes):
        shape = (width,) if name.endswith("bias") else (width, 5) if dim == 0 else (5, width)
        cuts = [weight_slice(name, shape, ranks) for ranks in group(size)]
        columns = [column for cut in cuts for column in range(cut.start, cut.stop)]
        assert columns == list(range(width)), (name, width, size)
        assert {(cut.dim, cut.width) for cut in cuts} == {(dim, cuts[0].width)}, (name, width, size)
        assert cuts[0].width % multiple == 0, (name, width, size)


def test_heads_are_cut_where_heads_end() -> None:
    """Queries of one head on two ranks, or not with the keys of their group."""
    queries = weight_slice("model.layers.1.self_attn.q_proj.weight", (8 * 24, 64), Rank(1, 4))
    keys = weight_slice("model.layers.1.self_attn.k_proj.bias", (4 * 24,), Rank(1, 4))
    assert (queries.start, queries.stop, queries.width) == (48, 96, 48)
    assert (keys.start, keys.stop, keys.width) == (24, 48, 24)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_inputs_are_cut_as_the_outputs_that_they_come_from(size: int) -> None:
    """A rank multiplied its part of the feed-forward by another part's weights, or each rank had the whole of them."""
    for rank in range(size):
        ranks = Rank(rank, size)
        ranks.adds = True
        gate = weight_slice("model.layers.0.mlp.gate_proj.weight", (200, 64), ranks)
        down = weight_slice("model.layers.0.mlp.down_proj.weight", (64, 200), ranks)
        assert down == gate._replace(dim=1)
        queries = weight_slice("model.layers.0.self_attn.q_proj.weight", (8 * 24, 64), ranks)
        output = weight_slice("model.layers.0.self_attn.o_proj.weight", (64, 8 * 24), ranks)
        assert output == queries._replace(dim=1)
        assert weight_slice("model.layers.0.self_attn.o_proj.bias", (64,), ranks) is None


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_norms_are_whole_on_every_rank(name: str) -> None:
    """A norm over a part of the hidden states, which are whole."""
    assert weight_slice(name, (64,), Rank(1, 2)) is None


def test_heads_that_do_not_divide_are_refused_with_the_sum() -> None:
    """Four ranks shared two key and value heads by holding none of them."""
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)
    check_head_counts(config, 2)
    with pytest.raises(ModelError, match=r"4 ranks cannot share 2 key and value heads .*: 2 = 4 x 0 \+ 2"):
        check_head_counts(config, 4)
    with pytest.raises(ModelError, match=r"3 ranks cannot share 8 heads .*: 8 = 3 x 2 \+ 2"):
        check_head_counts(config, 3)
    with pytest.raises(ModelError, match="6 heads"):
        check_head_counts(SimpleNamespace(num_attention_heads=6), 4)
