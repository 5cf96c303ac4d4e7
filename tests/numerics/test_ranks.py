"""What ranks say to each other. Here they are threads of one process; `tests/engine/test_parallel_losses.py` kills real ones."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ragspec.errors import ConfigError, RankLost
from ragspec.numerics.ranks import ONE_RANK, DistributedRanks, Ranks, Rendezvous


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


def test_who_does_not_answer_in_time_is_lost_and_so_is_the_group() -> None:
    """A rank that hangs was waited for; a group that lost its step was used again."""

    def beat(ranks: Ranks) -> str:
        if ranks.rank == 1:
            time.sleep(1.2)
            return "late"
        begin = time.monotonic()
        with pytest.raises(RankLost, match="Timed out"):
            ranks.barrier()
        assert time.monotonic() < begin + 2
        with pytest.raises(RankLost, match="closed"):
            ranks.barrier()
        with pytest.raises(RankLost, match="closed"):
            ranks.broadcast(torch.zeros(4, dtype=torch.int32))
        return "noticed"

    assert together(2, beat, timeout_s=0.5) == ["noticed", "late"]


def test_rank_0_does_not_wait_long_for_a_listener() -> None:
    """What rank 0 says is only gone when it is heard: a rank that hangs between two steps was waited for a day."""

    def speak(ranks: Ranks) -> str:
        if ranks.rank == 1:
            time.sleep(1.2)
            return "late"
        with pytest.raises(RankLost, match="Timed out"):
            ranks.broadcast(torch.zeros(4, dtype=torch.int32))
        return "noticed"

    assert together(2, speak, timeout_s=0.5) == ["noticed", "late"]


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
