"""What a drafter is. A drafter guesses; it can make the engine faster or slower, never change its output."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Request
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.tree import DraftTree, Proposal

Features = Mapping[int, NDArray[np.float32]]
"""The target's states of some positions by tap (`ragspec.engine.target`). Shape of each: float32 [T, H]."""


class Drafted(Protocol):
    """The part of a running sequence that drafters see. `tokens` is prompt + output so far, the last one the tree's root.

    `prepared[name]` is what the drafter of that name made of the request; None where that failed. `slots` are the places of its
    kept positions, which a drafter may store something of its own under.
    """

    request: Request
    tokens: list[int]
    num_prompt: int
    prepared: Mapping[str, Any]
    slots: SequenceSlots | None

    @property
    def key(self) -> tuple[str, int]: ...

    @property
    def num_output(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...


class Budget(NamedTuple):
    """What a draft may cost: at most `max_nodes` nodes a tree, and no more time than it is likely to save.

    `token_s`: seconds that one more accepted token saves; 0.0 where time is no matter. `trees`: what other drafters proposed for
    the same sequences, in their order. `depths`: how many levels each may have at most.
    """

    max_nodes: int
    token_s: float
    trees: SequenceOf[DraftTree]
    depths: SequenceOf[int]


class Drafter(Protocol):
    """Called from the engine's thread only, but for `prepare`. An exception costs the row its draft and nothing else."""

    name: str
    taps: tuple[int, ...]
    """Which of the target's states `observe` wants to see; usually none."""

    def prepare(self, request: Request) -> Any:
        """What `start` needs of a request and takes long to make. Called by who submits: in any thread, in several at once."""

    def start(self, sequence: Drafted) -> None:
        """A sequence begins."""

    def cost_s(self, sequences: SequenceOf[Drafted]) -> float:
        """Seconds that `propose` is expected to take; 0.0 for no time worth counting, infinity where nothing can be proposed."""

    def propose(self, sequences: SequenceOf[Drafted], budget: Budget) -> list[list[Proposal]]:
        """Guesses for each sequence, parents before children, with the probability that the path is accepted."""

    def observe(self, sequence: Drafted, tokens: SequenceOf[int], features: Features) -> None:
        """Tokens just decided, in order, and the states of the positions just kept, the last ones of `sequence.slots`.

        There are no tokens while a prompt is read in pieces.
        """

    def learn(self, feedback: object, accepted: bool) -> None:
        """What became of one of its nodes whose parent was accepted; `feedback` is what it wrote into the node's origin."""

    def finish(self, sequence: Drafted) -> None:
        """The sequence has ended, however it ended; forget its text."""

    def purge(self, salt: str) -> None:
        """Forget what is kept of one tenant's earlier requests."""
