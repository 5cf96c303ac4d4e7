"""What a drafter is. A drafter guesses; it can make the engine faster or slower, never change its output."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from ragspec.core import Request
from ragspec.tree import Proposal


class Drafted(Protocol):
    """The part of a running sequence that drafters see. `tokens` is prompt + output so far, the last one the tree's root.

    `prepared[name]` is what the drafter of that name made of the request; None where that failed.
    """

    request: Request
    tokens: list[int]
    num_prompt: int
    prepared: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, int]: ...

    @property
    def num_output(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...


class Drafter(Protocol):
    """Called from the engine's thread only, but for `prepare`. An exception costs the row its draft and nothing else."""

    name: str

    def prepare(self, request: Request) -> Any:
        """What `start` needs of a request and takes long to make. Called by who submits: in any thread, in several at once."""

    def start(self, sequence: Drafted) -> None:
        """A sequence begins."""

    def propose(self, sequences: SequenceOf[Drafted], max_nodes: int) -> list[list[Proposal]]:
        """Guesses for each sequence, parents before children, with the probability that the path is accepted."""

    def observe(self, sequence: Drafted, tokens: SequenceOf[int], hidden: Any) -> None:
        """Tokens just committed, in order. `hidden`: the target's states of their positions, where the drafter asked for them."""

    def learn(self, feedback: object, accepted: bool) -> None:
        """What became of one of its nodes whose parent was accepted; `feedback` is what it wrote into the node's origin."""

    def finish(self, sequence: Drafted) -> None:
        """The sequence has ended, however it ended; forget its text."""

    def purge(self, salt: str) -> None:
        """Forget what is kept of one tenant's earlier requests."""
