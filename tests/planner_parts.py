"""A sequence as drafters see it, a drafter of chains, and one step of a planner: shared by the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafters import Quiet

from ragspec.core import Request
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.planner import Planner
from ragspec.speculation import Speculation
from ragspec.tree import DraftTree, Origin, Proposal

FREE = CostTable({64: [1.0, 1.0]}, rows=(1, 2))


@dataclass
class Running:
    """A sequence as drafters see it."""

    name: str = "a"
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_prompt: int = 2
    most_tokens: int = 100
    speculation: Speculation | bool = True
    prepared: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request = Request(self.name, tuple(self.tokens[: self.num_prompt]), speculation=self.speculation)

    @property
    def key(self) -> tuple[str, int]:
        return self.name, 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


class Chain(Quiet):
    """Drafts a chain of `tokens`, each as probable as given."""

    def __init__(self, tokens: Sequence[int], prob: float, name: str = "chain") -> None:
        super().__init__()
        self.tokens, self.prob, self.name = tokens, prob, name
        self.asked = 0
        self.learned: list[tuple[object, bool]] = []

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        self.asked += 1
        return [
            Proposal(token, i - 1, self.prob ** (i + 1), Origin(self.name, feedback=token))
            for i, token in enumerate(self.tokens[:max_nodes])
        ]

    def learn(self, feedback: object, accepted: bool) -> None:
        self.learned.append((feedback, accepted))


def plan(planner: Planner, *sequences: Running, spare: int = 100) -> list[DraftTree]:
    return planner.plan(sequences, 0, spare)
