"""What a drafter is. A drafter proposes tokens; it can make the engine faster or slower, never change the output."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ragspec.core import Request
from ragspec.drafting.acceptance import Guess, Guesses
from ragspec.numerics.batch import NODES as NODES
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.tree import Proposal

Features = Mapping[int, Tensor]
"""Hidden states of the target at some positions, by tap (`ragspec.engine.target`), on the target's device. Shape of each:
float32 [T, H]. Sequences of a step share their memory: never write to them, and copy states that are kept for long.

On the host is `NODES`, int64 [N, 3], of every node of the step's tree, accepted or not: its token, its parent, and the target's
most probable token behind it."""


class SequenceView(Protocol):
    """The part of a running sequence that drafters see. `tokens` is prompt + output; the last token is the tree's root.

    `prepared[name]` is what the drafter of that name prepared for the request, None if that failed. `slots` are the KV slots of
    kept positions; a drafter may store data of its own under the same slot numbers.
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
    """What a draft may cost: at most `max_nodes` nodes beside its likeliest path, and no more time than it is likely to save.

    `token_s`: seconds that one more accepted token saves; 0.0 if time does not count. `depths`: the most levels of each
    sequence's draft, the step's free rows at most. `least_prob`: no less probable path pays, so a drafter may leave it out; 0
    beside other drafters' nodes, below which probabilities may rise.
    """

    max_nodes: int
    token_s: float
    depths: SequenceOf[int]
    least_prob: float = 0.0


class Drafter:
    """Base class of all drafters; only `propose` must be written. An exception costs the sequence its draft, nothing else.

    The engine's thread makes all calls except `prepare`.
    """

    name: str
    taps: tuple[int, ...] = ()
    """The target's hidden states that `observe` needs."""

    def prepare(self, request: Request) -> Any:
        """Slow work for a request, before `start`. Runs in the submitting thread, several threads at once."""

    def start(self, sequence: SequenceView) -> None:
        """A sequence begins."""

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        """Expected seconds of `propose`: 0.0 if negligible, infinity if nothing can be proposed."""
        return 0.0

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> SequenceOf[SequenceOf[Proposal]]:
        """Nodes for each sequence, parents before children, with the probability that each node's path is accepted."""
        raise NotImplementedError

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        """The tokens just decided, and the features of the positions just kept, which are the last of `sequence.slots`.

        `tokens` is empty after a chunk of a prompt that goes on.
        """

    def learn(self, feedback: object, accepted: Any) -> None:
        """The fate of one proposed node whose parent was accepted. `feedback` comes from the node's origin.

        A drafter that proposes arrays gets feedback and fates as arrays.
        """
        if isinstance(feedback, Guess | Guesses):
            feedback.learn(accepted)

    def note_idle(self, is_idle: bool) -> None:
        """No request is left in the engine, or the first of some is there."""

    def finish(self, sequence: SequenceView) -> None:
        """The sequence has ended, for any reason; forget its text."""

    def purge(self, salt: str) -> None:
        """Forget everything kept of one tenant's earlier requests."""

    def close(self) -> None:
        """End the drafter's own threads; no other method is called after it."""
