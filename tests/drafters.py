"""Drafters for tests: perfect, wrong, random and broken ones. All follow the protocol of `ragspec.drafting.drafter`."""

import random
from collections.abc import Mapping, Sequence

from ragspec.drafting.drafter import Budget, Drafter, Features, SequenceView
from ragspec.tree import DraftTree, Origin, Proposal


def add_node(tree: DraftTree, parent: int, token_id: int) -> int:
    """A new child, or the child that holds the token already."""
    if (present := tree.child(parent, token_id)) is not None:
        return present
    tree.token_ids.append(token_id)
    tree.parents.append(parent)
    tree.depths.append(tree.depths[parent] + 1)
    tree.path_probs.append(0.5)
    tree.origins.append(Origin("test"))
    return len(tree) - 1


class Quiet(Drafter):
    """Proposes nothing; the base of the others. `events` counts what it was told."""

    name = "quiet"

    def __init__(self) -> None:
        self.events: dict[str, int] = {"start": 0, "observe": 0, "learn": 0, "finish": 0}
        self.observed: dict[tuple[str, int], list[int]] = {}

    def start(self, sequence: SequenceView) -> None:
        self.events["start"] += 1

    def propose(self, sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        return [self.draft(sequence, budget.max_nodes) for sequence in sequences]

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        return []

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        self.events["observe"] += 1
        self.observed.setdefault(sequence.key, []).extend(tokens)

    def learn(self, feedback: object, accepted: bool) -> None:
        self.events["learn"] += 1

    def finish(self, sequence: SequenceView) -> None:
        self.events["finish"] += 1


class Knowing(Quiet):
    """Knows each choice's true output."""

    def __init__(self, answers: Mapping[tuple[str, int], Sequence[int]], vocab_size: int = 300) -> None:
        super().__init__()
        self.answers = answers
        self.vocab_size = vocab_size

    def ahead(self, sequence: SequenceView) -> list[int]:
        return list(self.answers.get(sequence.key, ()))[sequence.num_output :]


class Perfect(Knowing):
    """Drafts exactly what the target will say, and past its end if there are tokens left."""

    name = "perfect"

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        tokens = self.ahead(sequence)[:max_nodes]
        return [Proposal(token, i - 1, 0.9, Origin(self.name, feedback=i)) for i, token in enumerate(tokens)]


class Wrong(Knowing):
    """Drafts siblings and chains of every token but the right one, and is sure of them."""

    name = "wrong"

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        ahead = self.ahead(sequence)
        origin = Origin(self.name, feedback="x")
        proposals: list[Proposal] = []
        for wrong in range(1, 4):
            parent = -1
            for token in ahead[:3]:
                proposals.append(Proposal((token + wrong) % self.vocab_size, parent, 0.99, origin))
                parent = len(proposals) - 1
        return proposals[:max_nodes]


class Half(Knowing):
    """The true path hidden among wrong siblings at every depth; some drafts leave it half way."""

    name = "half"

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        ahead = self.ahead(sequence)
        origin = Origin(self.name)
        proposals: list[Proposal] = []
        parent = -1
        for depth, token in enumerate(ahead[:4]):
            siblings = [(token + 1) % self.vocab_size, token, (token + 2) % self.vocab_size]
            if (sequence.num_output + depth) % 5 == 4:
                siblings.remove(token)
            first = len(proposals)
            proposals += [Proposal(sibling, parent, 0.5, origin) for sibling in siblings]
            if token not in siblings:
                break
            parent = first + 1
        return proposals[:max_nodes]


class Random(Quiet):
    """Trees of random shape and tokens, with random and partly absurd probabilities."""

    name = "random"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._random = random.Random(seed)

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        draw, proposals = self._random, list[Proposal]()
        for i in range(draw.randrange(max_nodes + 1)):
            token = draw.choice([*sequence.tokens[-8:], draw.randrange(self.vocab_size)])
            parent, prob = draw.randrange(-1, i), draw.choice((0.0, 0.3, 1.0, 7.0))
            proposals.append(Proposal(token, parent, prob, Origin(self.name)))
        return proposals


class Raising(Knowing):
    """Fails in one of its methods; otherwise perfect."""

    name = "raising"

    def __init__(self, where: str, answers: Mapping[tuple[str, int], Sequence[int]]) -> None:
        super().__init__(answers)
        self.where = where

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError(f"a drafter's own bug in {where}")

    def start(self, sequence: SequenceView) -> None:
        self._fail("start")

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        self._fail("propose")
        if self.where == "malformed":
            return [Proposal(5, 99, 0.9, Origin(self.name))]
        if self.where == "vocabulary":
            return [Proposal(10**9, -1, 0.9, Origin(self.name)), Proposal(-3, -1, 0.9, Origin(self.name))]
        if self.where == "nan":
            return [Proposal(token, i - 1, float("nan"), Origin(self.name)) for i, token in enumerate((7, 8, 9))]
        if self.where == "too few":
            return [Proposal(7, -1, 0.9, Origin(self.name))]
        return Perfect.draft(self, sequence, max_nodes)  # type: ignore[arg-type]

    def propose(self, sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        lists = super().propose(sequences, budget)
        return lists[:-1] if self.where == "too few" else lists

    def observe(self, sequence: SequenceView, tokens: Sequence[int], features: Features) -> None:
        self._fail("observe")

    def learn(self, feedback: object, accepted: bool) -> None:
        self._fail("learn")

    def finish(self, sequence: SequenceView) -> None:
        self._fail("finish")


def noted(drafter: Drafter) -> list[tuple[list[int], list[Proposal]]]:
    """Every later draft, behind the text that it follows."""
    kept: list[tuple[list[int], list[Proposal]]] = []
    propose = drafter.propose

    def noting(sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        lists = propose(sequences, budget)
        kept.extend((list(s.tokens), proposals) for s, proposals in zip(sequences, lists, strict=True))
        return lists

    drafter.propose = noting  # type: ignore[method-assign]
    return kept
