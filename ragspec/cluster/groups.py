"""The processes of one member, started, watched and ended as one: a shard is a group of one, an engine has its ranks.

Each group reserves what it needs in a placement group of its own, all on one node; a replacement takes that over, from a warm
spare if the node has one. Used by one thread, that of its member; blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ragspec.cluster.answers import answers, whatever_happens
from ragspec.cluster.directory import Kind
from ragspec.cluster.keepers import Keepers, Timing
from ragspec.cluster.ledger import NAMESPACE, Entry, Ledger
from ragspec.cluster.processes import STOPPED
from ragspec.cluster.shell import Place, Role, shell_class
from ragspec.cluster.spares import Spares
from ragspec.cluster.teardown import remove_placement_groups
from ragspec.errors import EngineError, RagspecError

_RESERVE_TIMEOUT_S = 15.0
_STARTING_PATIENCE = 8.0
"""A process that imports or loads may hold Python's lock for this many times as long as one that serves."""

_LOOKS_STOPPED = 2
_LONGEST_STEP_S = 30.0
_LOOPBACK = "127.0.0.1"


class Rank(NamedTuple):
    """Which of a group's processes one is, and where they meet: at rank 0's address."""

    rank: int
    size: int
    address: str
    timeout_s: float


class Wanted(NamedTuple):
    """A member as the deployment wants it.

    `lead` is what rank 0 becomes, `follow` what the others do; with several ranks, a `Rank` comes behind their arguments, and
    a follower's `run()` is called, which must not return while the group lives. CPUs and GPUs are per process.
    """

    name: str
    kind: Kind
    lead: Role
    follow: Role | None = None
    num_ranks: int = 1
    cpus: float = 0.1
    gpus: float = 0.0
    rank_timeout_s: float = 30.0


class Tools(NamedTuple):
    """What groups share."""

    deployment: str
    timing: Timing
    keepers: Keepers
    spares: Spares
    ledger: Ledger
    used: Callable[[str], dict[str, float]]
    """How many members of a kind each node has, by its id; those that are being started count."""
    choosing: threading.Lock


class Group:
    """States: nothing -> starting -> live -> nothing. `epoch` counts the starts."""

    def __init__(self, wanted: Wanted, tools: Tools) -> None:
        self.wanted, self._tools = wanted, tools
        self.epoch = 0
        self.node = ""
        self.facts: Any = None
        self.actors: list[Any] = []
        self.places: list[Place] = []
        self._names: list[str] = []
        self._runs: list[Any] = []  # the calls of the followers' `run`
        self._reserved: PlacementGroup | None = None
        self._num_stopped = 0

    def adopt(self) -> bool:
        """Take over what an earlier supervisor started; whether it lives. What is left of a dead one is ended."""
        entry = self._tools.ledger.read(self.wanted.name)
        if entry is None:
            return False
        self.epoch, self.places, self._names = entry.epoch, list(entry.places), list(entry.actors)
        self._reserved = _placement_group(entry.group)
        self.node = self.places[0].node if self.places else ""
        for name in entry.actors:
            with whatever_happens():
                self.actors.append(ray.get_actor(name, namespace=NAMESPACE))
        with whatever_happens():
            if entry.live and len(self.places) == len(self.actors) == self.wanted.num_ranks and not self.unfit():
                (self.facts,) = answers([self.actors[0].facts.remote()], self._tools.timing.hang_s, self.wanted.name)
                return True
        self.end()
        remove_placement_groups(f"{self._tools.deployment}/{self.wanted.name}@")
        self._reserved = None
        return False

    def start(self) -> None:
        """Blocks until it is loaded. Raises: what loading raises, EngineError; then nothing of it is left but its place."""
        self.epoch += 1
        self._num_stopped = 0
        self._runs = []
        try:
            self._write(live=False)
            self._reserve()
            self._find_processes()
            self._load(time.monotonic() + self._tools.timing.start_timeout_s)
            self._write(live=True)
        except BaseException:
            self.end()
            raise

    def unfit(self) -> str:
        """As `unwell`, and whether what runs in the process is dead or hangs; empty if it serves."""
        if why := self.unwell():
            return why
        timing = self._tools.timing
        try:
            (busy_s,) = answers(
                [self.actors[0].busy_s.remote()], timing.hang_s * self._tools.keepers.slowness(self.node), "it"
            )
        except RagspecError as error:
            return str(error)
        return f"a step lasts for {busy_s:.0f} s" if busy_s > _LONGEST_STEP_S else ""

    def unwell(self, patience: float = 1.0) -> str:
        """Why it cannot be relied on, after one heartbeat; empty if all is well."""
        timing = self._tools.timing
        waiting = [actor.ping.remote() for actor in self.actors]
        begin = time.monotonic()
        while True:
            answered, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=timing.heartbeat_s)
            if why := _failure(answered):
                return why
            if not waiting:
                self._num_stopped = 0
                return _failure(ray.wait(self._runs, timeout=0)[0], "a rank ended") if self._runs else ""
            look = self._tools.keepers.look(self.places)
            stopped = look is not None and any(state in STOPPED for state in look.states if state)
            self._num_stopped = self._num_stopped + 1 if stopped else 0
            if self._num_stopped >= _LOOKS_STOPPED:
                return "a process of it is stopped"
            patient_s = timing.hang_s * patience * self._tools.keepers.slowness(self.node)
            if time.monotonic() - begin > patient_s:
                return f"did not answer for {patient_s:.1f} s"

    def end(self) -> None:
        """End every process of it, for certain; its place stays reserved."""
        self._tools.keepers.kill(self.places)
        for actor in self.actors:
            with whatever_happens():
                ray.kill(actor)
        self.actors, self.places, self._names, self._runs, self.facts = [], [], [], [], None

    def _reserve(self) -> None:
        """Keep the place if its node answers, else find another."""
        tools, wanted = self._tools, self.wanted
        if self._reserved is not None:
            if tools.keepers.keeper(self.node) is not None:
                return
            remove_placement_group(self._reserved)
            self._reserved = None
        ranks = wanted.num_ranks
        with tools.choosing:  # Why: groups that choose at the same time would all see the same node empty
            self.node = ""
            target = tools.keepers.choose(wanted.cpus * ranks, wanted.gpus * ranks, tools.used(wanted.kind))
            self.node = target
        bundle = {"CPU": wanted.cpus, **({"GPU": wanted.gpus} if wanted.gpus else {})}
        name = f"{NAMESPACE}/{tools.deployment}/{wanted.name}@{self.epoch}"
        found = placement_group(
            [bundle] * ranks, "STRICT_PACK", name=name, lifetime="detached", _soft_target_node_id=target
        )
        node = _node_of(found) if found.wait(_RESERVE_TIMEOUT_S) else ""
        if tools.keepers.keeper(node) is None:
            remove_placement_group(found)
            needs = f"{wanted.cpus * ranks:g} CPUs" + (f" and {wanted.gpus * ranks:g} GPUs" if wanted.gpus else "")
            raise EngineError(f"no node that answers has {needs} free for {wanted.name}")
        self._reserved, self.node = found, node

    def _find_processes(self) -> None:
        """Why names are written first: a supervisor that dies here must find what it started."""
        tools, count = self._tools, self.wanted.num_ranks
        spares = [None if self.wanted.gpus else tools.spares.take(self.node) for _ in range(count)]
        own = [f"{tools.deployment}/{self.wanted.name}.{rank}@{self.epoch}" for rank in range(count)]
        self._names = [spare.name if spare else name for spare, name in zip(spares, own, strict=True)]
        self._write(live=False)
        self.places = [spare.place for spare in spares if spare]
        for rank, spare in enumerate(spares):
            self.actors.append(spare.actor if spare else self._new_process(own[rank], rank))
        pings = [actor.ping.remote() for actor in self.actors]
        self.places = answers(pings, tools.timing.start_timeout_s, f"a new process for {self.wanted.name}")
        self._write(live=False)
        for spare in spares:
            if spare:
                tools.spares.forget(spare)

    def _new_process(self, name: str, rank: int) -> Any:
        assert self._reserved is not None
        strategy = PlacementGroupSchedulingStrategy(self._reserved, rank)
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "scheduling_strategy": strategy}
        return shell_class().options(num_cpus=self.wanted.cpus, num_gpus=self.wanted.gpus, **options).remote()

    def _load(self, deadline: float) -> None:
        """Why a follower runs as soon as it is loaded: rank 0 computes with it while it still loads."""
        what = self.wanted.name
        loading = {actor.become.remote(role): actor for actor, role in zip(self.actors, self._roles(), strict=True)}
        waiting = list(loading)
        while waiting:
            loaded, waiting = ray.wait(waiting, timeout=self._tools.timing.heartbeat_s)
            for call in loaded:
                (facts,) = answers([call], 0.0, what)
                if loading[call] is self.actors[0]:
                    self.facts = facts
                else:
                    self._runs.append(loading[call].call.remote("run"))
            if waiting and (why := self.unwell(_STARTING_PATIENCE)):
                answers(ray.wait(waiting, timeout=1.0)[0], 0.0, what)  # Why: what it died of says more
                raise EngineError(f"{what}: {why} while it started")
            if waiting and time.monotonic() > deadline:
                raise EngineError(f"{what} was not ready after {self._tools.timing.start_timeout_s:g} s")

    def _roles(self) -> list[Role]:
        wanted = self.wanted
        if wanted.num_ranks == 1 or wanted.follow is None:
            return [wanted.lead]
        _, port = self._tools.keepers.free_address(self.node)
        # STRICT_PACK: all ranks are on one node
        ranks = [
            Rank(r, wanted.num_ranks, f"{_LOOPBACK}:{port}", wanted.rank_timeout_s) for r in range(wanted.num_ranks)
        ]
        roles = [wanted.lead, *[wanted.follow] * (wanted.num_ranks - 1)]
        return [role._replace(arguments=(*role.arguments, rank)) for role, rank in zip(roles, ranks, strict=True)]

    def _write(self, *, live: bool) -> None:
        group = self._reserved.id.hex() if self._reserved else ""
        entry = Entry(self.epoch, tuple(self._names), tuple(self.places), group, live)
        self._tools.ledger.write(self.wanted.name, entry)


def _failure(calls: list[Any], otherwise: str = "") -> str:
    """What went wrong with calls that have ended, or `otherwise` if there are any."""
    if not calls:
        return ""
    try:
        answers(calls, 0.0, "its process")
    except RagspecError as error:
        return str(error)
    return otherwise


def _node_of(group: PlacementGroup) -> str:
    """The node that all its bundles are on; empty while there is none."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return next(iter(nodes.values()), "")


def _placement_group(hexadecimal: str) -> PlacementGroup | None:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(hexadecimal))) if hexadecimal else None
