"""Faults of one service under load: of its process, its disk, its memory and its network. Run by `soak faults`.

    >>> faults_batch(seed=0, first=0, last=10)["lost"]
    0

Fault n of a seed and its kinds always has the same kind and the same numbers. A batch has a service of its own. After its faults
and one more kill, the service's data are compared with everything that it acknowledged. Needs the right to mount a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM
from typing import NamedTuple

from pipelines.benchmarks.chaos.faulty_service import ServiceOptions
from pipelines.benchmarks.chaos.gateway import GatewayProcess, deployment, num_left_running
from pipelines.benchmarks.chaos.network_namespace import NetworkNamespace, network_namespace
from pipelines.benchmarks.chaos.service_clients import ServiceClients
from pipelines.benchmarks.chaos.service_process import Network, ServiceProcess, SmallDisk, small_disk
from pipelines.benchmarks.service import free_port
from ragspec.disk import write_atomically
from ragspec.errors import EngineError
from services.keys import add_key
from services.settings import ServiceSettings
from services.stores.backup import back_up

KINDS = ("kill", "stop", "full", "no growth", "read-only", "slow disk", "memory", "latency", "partition", "reset")
_OF_NAMESPACE = ("partition-ns", "latency-ns")
"""Faults of a real network, that of a namespace which the service is in."""
_OF_GATEWAY = ("gateway-kill", "gateway-stop")
"""Faults of a gateway with its router, in front of engines on a Ray cluster; not in a run with others."""
OTHER_KINDS = ("clock", "clock-start", "upgrade", *_OF_NAMESPACE, *_OF_GATEWAY)
"""Kinds that a run has to ask for. Why not in `KINDS`: fault n of a seed would be another than in earlier runs."""
_HOUR_S, _DAY_S = 3600.0, 86_400.0
_MOST_AHEAD_S = {"clock": 30 * _DAY_S, "clock-start": 6 * _DAY_S}
"""Why less at a start: a service cannot tell a wrong clock from a week in which it was down, and forgets conversations then."""
_KILLS = ("kill", "gateway-kill")
_GENTLE = ("clock", "upgrade")
"""Kinds that may not cut off any stream."""
_LONGER = {"partition-ns": 10.0}
"""Why: a partition of two seconds is over before TCP has begun to wait for long."""
_ENDED_S = 240.0
"""A service that was told to end has ended by then: running answers have `service.drain_s`, and threads that hang a minute."""
_PROBE_S = 60.0
"""A service that does not recover within it is killed and started again, as by a liveness probe."""
_RECOVERY_S = (1, 2, 5, 15, 60)
_MOST_S, _LOOK_S = 600.0, 0.02
_TENANT = "ann"


class Fault(NamedTuple):
    """`hold_s`: how long it lasts. `share`: how bad it is, from 0 to 1."""

    kind: str
    hold_s: float
    share: float

    @property
    def ahead_s(self) -> int:
        """By how much the clock is wrong: hours or days, forwards or backwards."""
        size_s = _HOUR_S * (_MOST_AHEAD_S[self.kind] / _HOUR_S) ** (2 * self.share % 1)
        return round(size_s if self.share < 0.5 else -size_s)


def fault_of(seed: int, number: int, kinds: Sequence[str] = KINDS) -> Fault:
    """Kinds in turn, each `len(kinds)` in an order of their own."""
    turn, place = divmod(number, len(kinds))
    shuffled = list(kinds)
    random.Random(f"{seed} turn {turn}").shuffle(shuffled)
    draw = random.Random(f"{seed} fault {number}")
    return Fault(shuffled[place], draw.uniform(0.2, 2.0), draw.random())


def faults_batch(seed: int, first: int, last: int, kinds: Sequence[str] = KINDS) -> Counter[str]:
    """Raises: EngineError without the rights or programs that a kind needs, SystemExit if the service does not start."""
    faults = [fault_of(seed, number, kinds) for number in range(first, last)]
    if 0 < len(set(kinds) & set(_OF_GATEWAY)) < len(set(kinds)):
        raise EngineError(f"{' and '.join(_OF_GATEWAY)} need a run of their own")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragspec-")))
        disk = stack.enter_context(small_disk(folder / "disk"))
        options, namespace = ServiceOptions(disk.folder, folder, free_port()), None
        if set(kinds) & set(_OF_NAMESPACE):
            namespace = stack.enter_context(network_namespace())
            options = options._replace(host=namespace.host, namespace=namespace.name)
        if namespace and "latency-ns" in kinds:
            namespace.delay(0.0)  # Why: says now whether it can be
        key, _ = add_key(options.keys, _TENANT)
        engines: Mapping[str, str] | None = None
        if set(kinds) & set(_OF_GATEWAY):
            engines = stack.enter_context(deployment(folder))
        service = stack.enter_context(ServiceProcess(options) if engines is None else GatewayProcess(options, engines))
        counts = asyncio.run(ServiceFaults(disk, service, namespace).run(key, faults))
        if engines is not None:
            service.kill()
            counts["left running"] += num_left_running(engines)
        return counts


class ServiceFaults:
    """One service and its faults, one after the other."""

    def __init__(self, disk: SmallDisk, service: ServiceProcess, namespace: NetworkNamespace | None = None) -> None:
        self._disk, self._service, self._namespace = disk, service, namespace
        self._network = Network(service.options.port, service.options.host)
        self._counts = Counter[str]()

    async def run(self, key: str, faults: list[Fault]) -> Counter[str]:
        await self._start()
        async with self._network:
            clients = ServiceClients(self._network.url, key, lambda line: print(line, file=sys.stderr, flush=True))
            await clients.learn()
            load = asyncio.create_task(clients.run())
            await self._recovery_s(clients, time.monotonic())
            for fault in faults:
                await self._strike(fault, clients)
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
            self._service.kill()
            await self._start()
            await clients.check()
        return self._counts + clients.counts + clients.marks

    async def _start(self) -> None:
        """As a supervisor does: again and again."""
        while not await asyncio.to_thread(self._service.start):
            self._counts["starts refused"] += 1
            if self._counts["starts refused"] > 100:
                raise SystemExit("the service does not start")

    async def _strike(self, fault: Fault, clients: ServiceClients) -> None:
        begin_s, num_cut = time.monotonic(), clients.num_cut
        async with self._fault(fault):
            await asyncio.sleep(fault.hold_s * _LONGER.get(fault.kind, 1.0))
            cleared_s = begin_s if fault.kind in _KILLS else time.monotonic()
        if not self._service.is_up:
            self._counts[f"died of {fault.kind}"] += fault.kind not in (*_KILLS, "read-only", "upgrade")
            await self._start()
        seconds = await self._recovery_s(clients, cleared_s)
        within = next((f"recovered within {most} s" for most in _RECOVERY_S if seconds <= most), "recovered later")
        self._counts += Counter({fault.kind: 1, within if seconds < _MOST_S else "not recovered": 1})
        if fault.kind in _GENTLE:
            self._counts["cut off"] += clients.num_cut - num_cut

    async def _recovery_s(self, clients: ServiceClients, since_s: float) -> float:
        """Seconds until every kind of operation that began afterwards has succeeded."""
        restarts_s = time.monotonic() + _PROBE_S  # Why not from `since_s` on: a start may take longer
        while min(clients.succeeded_s.values()) < since_s and time.monotonic() < since_s + _MOST_S:
            if not self._service.is_up:
                self._counts["ended with its engine"] += 1
                await self._start()
            if time.monotonic() > restarts_s:
                self._counts["restarted by the probe"] += 1
                self._service.kill()
                await self._start()
                restarts_s = time.monotonic() + _PROBE_S
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - since_s

    @contextlib.asynccontextmanager
    async def _fault(self, fault: Fault) -> AsyncIterator[None]:
        service, disk, network = self._service, self._disk, self._network
        match fault.kind:
            case "kill" | "gateway-kill":
                service.kill()
                yield
            case "stop" | "gateway-stop":
                service.send(SIGSTOP)
                yield
                service.send(SIGCONT)
            case "full":
                disk.fill()
                yield
                disk.empty()
            case "no growth":
                service.limit(resource.RLIMIT_FSIZE, int(fault.share * 2**16))
                yield
                service.limit(resource.RLIMIT_FSIZE)
            case "read-only":
                service.kill()
                disk.mount("ro")
                await asyncio.to_thread(service.start)
                yield
                service.kill()
                disk.mount("rw")
            case "slow disk":
                service.options.slow.touch()
                yield
                service.options.slow.unlink()
            case "memory":
                service.limit(resource.RLIMIT_AS, service.memory_bytes + int(fault.share * 2**25))
                yield
                service.limit(resource.RLIMIT_AS)
            case "latency":
                network.latency_s = 0.1 + fault.share
                yield
                network.latency_s = 0.0
            case "partition":
                network.part(True)
                yield
                network.part(False)
            case "reset":
                network.cut()
                yield
            case "clock" | "clock-start":
                if fault.kind == "clock-start":
                    service.kill()
                write_atomically(service.options.clock, str(fault.ahead_s))
                if fault.kind == "clock-start":
                    await self._start()
                yield
                service.options.clock.unlink()
            case "partition-ns":
                assert self._namespace
                self._namespace.part(True)
                yield
                self._namespace.part(False)
            case "latency-ns":
                assert self._namespace
                self._namespace.delay(0.1 + fault.share)
                yield
                self._namespace.delay(0.0)
            case "upgrade":
                await asyncio.to_thread(self._back_up)
                service.send(SIGTERM)
                yield
                has_ended = await asyncio.to_thread(service.has_ended, _ENDED_S)
                self._counts += Counter({"hang": not has_ended, "upgrade failed": has_ended and service.exit_code != 0})
                service.kill()

    def _back_up(self) -> None:
        """As before every upgrade. Raises: RagspecError."""
        disk, target = self._disk.folder, self._service.options.folder / "backup"
        back_up(disk / "index", ServiceSettings(data_dir=str(disk / "data")), target)
        shutil.rmtree(target)
