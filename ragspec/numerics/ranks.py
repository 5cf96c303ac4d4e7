"""Collective communication between the ranks of one tensor-parallel group.

Products are split by output columns, and the parts are gathered, never added, so a group of any size gives the bits of one rank
(`ragspec.numerics.sharding`). Owns the connections of one group; knows no model and no step.

    >>> rendezvous = Rendezvous("127.0.0.1")                                  # rank 0's process; the system chooses the port
    >>> ranks = DistributedRanks(rendezvous, rank=0, size=2)               # there
    >>> ranks = DistributedRanks(rendezvous.address, rank=1, size=2)       # elsewhere

Gathers and barriers must complete within `timeout_s`, or the group is lost; a broadcast waits without limit for rank 0. When a
process ends, its connections break and every waiting rank fails at once.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from ragspec.errors import ConfigError, RankLost

Backend = Literal["gloo", "nccl"]

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of an idle group."""

TIMEOUT_S = 4.0
"""A stopped rank is noticed after one heartbeat interval and this timeout: within five seconds."""

_QUIET = timedelta(days=1)
_CONNECT_S = 120.0


class Ranks:
    """One rank's view of its group; this base class is a group of one rank.

    Parts have the same shape on every rank. All methods raise RankLost when the group is broken. `adds`: products into the stream
    are split by inputs and added up, one exchange where two gathers would be; the sum's order is the group's, so bits are not.
    """

    rank = 0
    size = 1
    adds = False

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks side by side, on every rank. Shapes: [N, C] -> [N, size * C]."""
        return part

    def gather_to_first(self, part: Tensor) -> Tensor:
        """As `all_gather`, on rank 0; the other ranks get their own part back. Shapes: [N, C] -> [N, size * C]."""
        return part

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on every rank. Shapes: [N, C] -> [N, C]."""
        return part

    def broadcast(self, words: Tensor) -> None:
        """Copy rank 0's `words` to every rank, in place. Waits without limit for rank 0. Shape: int32 [words]."""

    def barrier(self) -> None:
        """Return when every rank has called this."""

    def device(self, name: str) -> str:
        """This rank's device of that kind."""
        return name

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Inside, ranks wait for each other without limit, to load weights or to compile. All ranks enter and leave together."""
        yield

    def close(self) -> None:
        """Leave the group. A rank that waits for this one then loses its group."""


ONE_RANK = Ranks()


class Rendezvous:
    """The store where the ranks of one group find each other. Lives in rank 0's process as long as the group.

    `address` is host:port for the other ranks. Port 0 takes any free port.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        try:
            self.store = TCPStore(
                host, port, None, is_master=True, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
            )
        except RuntimeError as cause:
            raise RankLost(f"rank 0 cannot open {host}:{port}: {first_line(cause)}") from cause
        self.host, self.address = host, f"{host}:{self.store.port}"


class DistributedRanks(Ranks):
    """A rank of a group of processes on one machine; the group is complete when the constructor returns.

    Raises: ConfigError for an impossible rank or address, RankLost if a rank does not join within `connect_s` seconds.
    """

    def __init__(
        self,
        rendezvous: Rendezvous | str,
        rank: int,
        size: int,
        backend: Backend = "gloo",
        timeout_s: float = TIMEOUT_S,
        connect_s: float = _CONNECT_S,
        *,
        adds: bool = False,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"there is no rank {rank} among {size}: ranks count from 0 to {size - 1}")
        host, port = _host_and_port(rendezvous if isinstance(rendezvous, str) else rendezvous.address)
        if backend == "nccl" and not torch.cuda.device_count():
            raise ConfigError(f"nccl needs a GPU for each of {size} ranks; torch finds none")
        self.rank, self.size, self.adds = rank, size, adds
        self._usual_timeout, self._timeout = timedelta(seconds=timeout_s), timedelta(seconds=timeout_s)
        self._meeting: Rendezvous | str | None = (
            Rendezvous(host, port) if rank == 0 and isinstance(rendezvous, str) else rendezvous
        )
        # one GPU a rank: its own where the process sees one alone (Ray's actors), else the GPU of its number
        self._gpu = f"cuda:{rank % torch.cuda.device_count()}" if backend == "nccl" else ""
        self._group: Any = None
        with self._guarded():
            wait = timedelta(seconds=connect_s)
            store = self._store(host, port, wait)
            self._group = _gloo(PrefixStore("words", store), rank, size, host, wait)
            self._data = _nccl(PrefixStore("data", store), rank, size, self._gpu) if backend == "nccl" else self._group

    def all_gather(self, part: Tensor) -> Tensor:
        with self._guarded():
            home, part = part.device, self._placed(part)
            num_rows, width = part.shape
            parts = part.new_empty((self.size * num_rows, width))
            options = AllgatherOptions()
            options.timeout = self._timeout
            self._data._allgather_base(parts, part, options).wait()
            return _side_by_side(parts.view(self.size, num_rows, width)).to(home)

    def gather_to_first(self, part: Tensor) -> Tensor:
        with self._guarded():
            home, part = part.device, self._placed(part)
            parts = [[torch.empty_like(part) for _ in range(self.size)]] if self.rank == 0 else []
            options = GatherOptions()
            options.rootRank, options.timeout = 0, self._timeout
            self._data.gather(parts, [part], options).wait()
            return (torch.cat(parts[0], 1) if self.rank == 0 else part).to(home)

    def add_up(self, part: Tensor) -> Tensor:
        with self._guarded():
            home, total = part.device, self._placed(part)
            options = AllreduceOptions()
            options.timeout = self._timeout
            self._data.allreduce([total], options).wait()
            return total.to(home)

    def broadcast(self, words: Tensor) -> None:
        with self._guarded():
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = self._timeout if self.rank == 0 else _QUIET
            self._group.broadcast([words], options).wait()

    def device(self, name: str) -> str:
        """Raises: ConfigError for a GPU by its number, which the ranks would share."""
        if name == "cpu":
            return name
        if name != "cuda" or not self._gpu:
            raise ConfigError(f"{self.size} ranks need nccl and a GPU each; target.device must be cuda, not {name!r}")
        return self._gpu

    def _placed(self, part: Tensor) -> Tensor:
        return part.to(self._gpu or "cpu").contiguous()

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1, 1, dtype=torch.int32))

    @contextmanager
    def without_timeout(self) -> Iterator[None]:
        self._timeout = _QUIET
        yield
        self._timeout = self._usual_timeout

    def close(self) -> None:
        self._group = self._data = self._meeting = None

    def _store(self, host: str, port: int, wait: timedelta) -> Any:
        """The shared store, once all ranks have joined."""
        own = self._meeting.store if isinstance(self._meeting, Rendezvous) else None
        store: Any = own or TCPStore(host, port, None, is_master=False, timeout=wait)
        store.set(f"rank {self.rank}", "")
        store.wait([f"rank {rank}" for rank in range(self.size)], wait)
        return store

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn torch's errors into RankLost. After any error the ranks are out of step, so the group is closed."""
        if self._meeting is None:
            raise RankLost("this group of ranks is closed")
        try:
            yield
        except RuntimeError as cause:
            self.close()
            raise RankLost(f"rank {self.rank} of {self.size} lost its group: {_reason(cause)}") from cause


def _gloo(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout, options._threads = timeout, 1
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, gpu: str) -> Any:
    """One GPU of this machine a rank."""
    torch.cuda.set_device(gpu)
    nccl: Any = distributed.ProcessGroupNCCL
    return nccl(store, rank, size, nccl.Options())


def _reason(cause: BaseException) -> str:
    """The error without gloo's source location and advice."""
    return re.sub(r"^\[\S*\] | This is typically .*", "", first_line(cause))


def first_line(cause: BaseException) -> str:
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _side_by_side(parts: Tensor) -> Tensor:
    """Shapes: [size, N, C] -> [N, size * C], contiguous."""
    size, num_rows, width = parts.shape
    return parts.transpose(0, 1).reshape(num_rows, size * width)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is not an address of ranks; it looks like 127.0.0.1:40001")
    return host, int(port)
