"""A sequence as drafters see it, drafters of chains, and steps of a planner: shared by the planner's tests."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from drafters import Quiet

from ragspec.core import CopySource, Request, SamplingParams
from ragspec.drafting.children import draws_children
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.planner import Planner
from ragspec.speculation import AcceptanceRule, Speculation
from ragspec.tree import DraftTree, Draw, Origin, Proposal, StepResult

FREE = CostTable({64: [1.0, 1.0]}, rows=(1, 2))
LAW = np.full(300, 1 / 300)
BY_RULE = Speculation(rule=AcceptanceRule.TRAVERSAL)


@dataclass
class Running:
    """A sequence as drafters see it."""

    name: str = "a"
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_prompt: int = 2
    most_tokens: int = 100
    speculation: Speculation | bool = True
    prepared: dict[str, object] = field(default_factory=dict)
    sources: tuple[CopySource, ...] = ()
    salt: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        prompt = tuple(self.tokens[: self.num_prompt])
        self.request = Request(self.name, prompt, self.params, self.sources, self.salt, self.speculation)

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


class Drawn(Chain):
    """Draws its chain by chance, by `law`, where the request's rule is for such drafts."""

    def __init__(self, tokens: Sequence[int], prob: float, law: np.ndarray = LAW) -> None:
        super().__init__(tokens, prob)
        self.law = law

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        chain = super().draft(sequence, max_nodes)
        return [p._replace(draw=Draw((p.token_id,), self.law)) for p in chain] if draws_children(sequence) else chain


class Costly(Chain):
    """Takes time for each sequence, and counts for which it is asked."""

    def __init__(self, tokens: Sequence[int], prob: float, seconds: float, name: str = "costly") -> None:
        super().__init__(tokens, prob, name)
        self.seconds = seconds
        self.asked_for: Counter[str] = Counter()

    def cost_s(self, sequences: Sequence[SequenceView]) -> float:
        return self.seconds * len(sequences)

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        self.asked_for[sequence.key[0]] += 1
        return super().draft(sequence, max_nodes)


def plan(planner: Planner, *sequences: Running, spare: int = 100) -> list[DraftTree]:
    return planner.plan(sequences, 0, lambda _: spare)


def accept(planner: Planner, sequence: Running, tree: DraftTree, right_tokens: Collection[int]) -> None:
    """The target agrees with the nodes of the tree, a chain, that hold these tokens."""
    path = [n for n in range(1, len(tree)) if tree.token_ids[n] in right_tokens]
    planner.observe([sequence], [StepResult(tree, path, [*(tree.token_ids[n] for n in path), 50])], [{}])


def run(planner: Planner, sequence: Running, right_tokens: Collection[int], num_steps: int) -> list[int]:
    """How many nodes were drafted in each of so many steps."""
    drafted = []
    for _ in range(num_steps):
        (tree,) = plan(planner, sequence)
        drafted.append(tree.num_drafted)
        accept(planner, sequence, tree, right_tokens)
    return drafted
