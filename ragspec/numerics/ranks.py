"""The ranks of one tensor-parallel group and the few things that they say to each other.

Every product of a target is split by its output columns; what a rank computed is gathered, never added, so a group of any size
gives the bits of one rank (`ragspec.numerics.sharding`). Owns the connections of one group; knows no model and no step.

    >>> meeting = Meeting("127.0.0.1")                                  # rank 0's process; the system chooses the port
    >>> ranks = DistributedRanks(meeting, rank=0, size=2)               # there
    >>> ranks = DistributedRanks(meeting.address, rank=1, size=2)       # elsewhere

There are two sets of connections. Gathers and beats are to be answered promptly, within `timeout_s`, or the group is lost; for a
broadcast ranks wait quietly as long as rank 0 has nothing to say. When a process ends its connections break, which the others
notice at once in either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions, PrefixStore, ProcessGroupGloo, TCPStore

from ragspec.errors import ConfigError, RankLost

Backend = Literal["gloo", "nccl"]

BEAT_S = 1.0
"""Seconds between two signs of life of an idle group."""

TIMEOUT_S = 4.0
"""A rank that is stopped is noticed after a beat and this: within five seconds."""

_QUIET_S = 24 * 3600.0
_CONNECT_S = 120.0


class Ranks(Protocol):
    """One rank's view of its group. Parts have the same shape on every rank. All methods raise RankLost."""

    rank: int
    size: int

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks side by side, on every rank. Shapes: [N, C] -> [N, size * C]."""

    def gather_to_first(self, part: Tensor) -> Tensor:
        """As `all_gather`, on rank 0; the others get their part back. Shapes: [N, C] -> [N, size * C]."""

    def broadcast(self, words: Tensor) -> None:
        """Rank 0's `words` on every rank, in place. Waits until rank 0 speaks. Shape: int32 [words]."""

    def beat(self) -> None:
        """Return when every rank has come here."""

    def patiently(self) -> AbstractContextManager[None]:
        """Within: wait for each other as long as it takes, to load weights or to compile. All ranks enter and leave together."""

    def close(self) -> None:
        """Leave the group; whoever still waits for this rank loses it."""


class OneRank:
    """A group of one: everything is whole."""

    rank = 0
    size = 1

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def gather_to_first(self, part: Tensor) -> Tensor:
        return part

    def broadcast(self, words: Tensor) -> None:
        pass

    def beat(self) -> None:
        pass

    def patiently(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


ONE_RANK = OneRank()


class Meeting:
    """Where the ranks of a group find each other; in the process of rank 0, and open as long as the group is.

    `address`: host:port, to be told to the others. Port 0: any that is free.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        try:
            self.store = TCPStore(
                host, port, None, is_master=True, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
            )
        except RuntimeError as cause:
            raise RankLost(f"rank 0 cannot open {host}:{port}: {first_line(cause)}") from cause
        self.host, self.address = host, f"{host}:{self.store.port}"


class DistributedRanks:
    """A rank of a group of processes on one machine, joined when the constructor returns.

    Raises: ConfigError for an impossible rank or address, RankLost if the others do not come within `connect_s`.
    """

    def __init__(
        self,
        meeting: Meeting | str,
        rank: int,
        size: int,
        backend: Backend = "gloo",
        timeout_s: float = TIMEOUT_S,
        connect_s: float = _CONNECT_S,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"there is no rank {rank} among {size}: ranks count from 0 to {size - 1}")
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        host, port = _host_and_port(meeting if isinstance(meeting, str) else meeting.address)
        self._meeting: Meeting | None = None if isinstance(meeting, str) else meeting
        if rank == 0 and self._meeting is None:
            self._meeting = Meeting(host, port)
        self._quiet: _Connections | None = None
        self._prompt: _Connections | None = None
        with self._guarded():
            store = self._store(host, port, timedelta(seconds=connect_s))
            self._quiet = _gloo(PrefixStore("quiet", store), rank, size, host, _QUIET_S)
            connect = _gloo if backend == "gloo" else _nccl
            self._prompt = connect(PrefixStore("prompt", store), rank, size, host, timeout_s)
        self._current: _Connections | None = self._prompt

    def all_gather(self, part: Tensor) -> Tensor:
        with self._guarded():
            group, device = _open(self._current)
            part = part.to(device).contiguous()
            num_rows, width = part.shape
            parts = part.new_empty((self.size * num_rows, width))
            group._allgather_base(parts, part).wait()
            return _side_by_side(parts.view(self.size, num_rows, width)).cpu()

    def gather_to_first(self, part: Tensor) -> Tensor:
        with self._guarded():
            group, device = _open(self._current)
            part = part.to(device).contiguous()
            parts = [[torch.empty_like(part) for _ in range(self.size)]] if self.rank == 0 else []
            options = GatherOptions()
            options.rootRank = 0
            group.gather(parts, [part], options).wait()
            return torch.cat(parts[0], 1).cpu() if self.rank == 0 else part.cpu()

    def broadcast(self, words: Tensor) -> None:
        with self._guarded():
            group, _ = _open(self._quiet)
            options = BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            if self.rank == 0:  # the others listen already, or will at once
                options.timeout = timedelta(seconds=self._timeout_s)
            group.broadcast([words], options).wait()

    def beat(self) -> None:
        self.all_gather(torch.zeros(1, 1, dtype=torch.int32))

    @contextmanager
    def patiently(self) -> Iterator[None]:
        self._current = self._quiet
        yield
        self._current = self._prompt

    def close(self) -> None:
        self._quiet = self._prompt = self._current = self._meeting = None

    def _store(self, host: str, port: int, wait: timedelta) -> Any:
        if self._meeting is not None:
            store: Any = self._meeting.store
            store.set_timeout(wait)
            return store
        return TCPStore(host, port, None, is_master=False, timeout=wait)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """torch's failures as ours. Whatever went wrong, the group has lost its step and cannot be used again."""
        try:
            yield
        except RuntimeError as cause:
            self.close()
            raise RankLost(f"rank {self.rank} of {self.size} lost its group: {_reason(cause)}") from cause
        except RankLost:
            self.close()
            raise


class _Connections(NamedTuple):
    """One of torch's process groups, and where the tensors lie that it moves."""

    group: Any
    device: torch.device


def _gloo(store: Any, rank: int, size: int, host: str, timeout_s: float) -> _Connections:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return _Connections(gloo(store, rank, size, options), torch.device("cpu"))


def _nccl(store: Any, rank: int, size: int, host: str, timeout_s: float) -> _Connections:
    """Through the GPUs of this machine, one a rank; `host` has no part in it."""
    nccl: Any = getattr(distributed, "ProcessGroupNCCL", None)
    if nccl is None or torch.cuda.device_count() < size:
        raise ConfigError(f"nccl needs a GPU for each of {size} ranks; torch finds {torch.cuda.device_count()}")
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return _Connections(nccl(store, rank, size, options), torch.device("cuda", rank))


def _open(connections: _Connections | None) -> _Connections:
    if connections is None:
        raise RankLost("this group of ranks is closed")
    return connections


def _reason(cause: BaseException) -> str:
    """Without the place in gloo's source before it and the advice behind."""
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
