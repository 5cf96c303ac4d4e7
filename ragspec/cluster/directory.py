"""Who serves at the moment: the members of a deployment, as a table that grows a version with every change.

>>> table = directory.table(after=table.version, timeout_s=30.0)   # returns as soon as something changed
>>> engines = table.of("engine")
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["engine", "shard", "encoder"]
State = Literal["starting", "live", "lost"]


class Member(NamedTuple):
    """One actor that answers. `epoch` grows each time that it is replaced: an actor of an older epoch is dead or about to be.

    `actor` is its handle; None while it starts. `facts` is what its kind says of itself once it is loaded (`HostFacts` for
    engines); None before. `node` is Ray's id of the node, in hexadecimal.
    """

    kind: Kind
    name: str
    epoch: int
    state: State
    facts: Any
    actor: Any
    node: str


class Table(NamedTuple):
    """All members, always in the same order."""

    version: int
    members: tuple[Member, ...]

    def of(self, kind: Kind) -> tuple[Member, ...]:
        """The live ones."""
        return tuple(member for member in self.members if member.kind == kind and member.state == "live")


class Directory(Protocol):
    """What clients know of a supervisor. Safe to call from several threads."""

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        """The table, as soon as its version exceeds `after`; the one that is there when `timeout_s` have passed."""
        ...

    def report(self, name: str, epoch: int, why: str) -> None:
        """This one is dead or hangs: it is killed and replaced. An epoch other than the member's changes nothing."""
        ...
