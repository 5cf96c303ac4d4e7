"""The texts of each optimizer step, drawn by processes beside the training and grouped by length.

A pool of steps is a function of (seed, rank, number of the pool), and pools come in order, so a resumed run goes on with the very
texts of an unbroken one, whatever the number of processes. The texts of a pool are sorted by length and divided into steps, so
that little of a batch is padding; the steps of a pool come in random order.

    >>> data = StepData(draw_text, length_of=len, size_of=len, step_size=512, seed="0/0", num_processes=1)
    >>> for texts in data.steps(first=120): ...
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

POOL_STEPS = 16
Item = TypeVar("Item")


@dataclass(frozen=True)
class StepData(Dataset[list[list[Item]]], Generic[Item]):
    """`draw`: one text, a function of the generator. Texts are grouped by `length_of`; the sizes of a step's texts by `size_of`
    add up to about `step_size`.

    `num_processes`: processes that draw ahead; 0: the caller's own.
    """

    draw: Callable[[random.Random], Item]
    length_of: Callable[[Item], int]
    size_of: Callable[[Item], int]
    step_size: int
    seed: str
    num_processes: int = 0

    def steps(self, first: int) -> Iterator[list[Item]]:
        """The texts of each step from the step `first` on, without end."""
        pools: Iterator[list[list[Item]]] = iter(
            DataLoader(
                self,
                batch_size=None,
                sampler=itertools.count(first // POOL_STEPS),
                num_workers=self.num_processes,
                collate_fn=_unchanged,
            )
        )
        return itertools.islice(itertools.chain.from_iterable(pools), first % POOL_STEPS, None)

    def __getitem__(self, pool: int) -> list[list[Item]]:
        """The steps of a pool."""
        rng = random.Random(f"{self.seed}/{pool}")
        texts: list[Item] = []
        for _ in range(POOL_STEPS):
            size = 0
            while size < self.step_size:
                texts.append(self.draw(rng))
                size += self.size_of(texts[-1])
        steps = split_evenly(sorted(texts, key=self.length_of), POOL_STEPS, self.size_of)
        rng.shuffle(steps)
        return steps


def split_evenly(items: Sequence[Item], count: int, size_of: Callable[[Item], int]) -> list[list[Item]]:
    """Neighbours in `count` parts of about equal size, none of them empty. Needs at least `count` items."""
    left, rest = list(items), sum(map(size_of, items))
    parts: list[list[Item]] = []
    for num_parts in range(count, 0, -1):
        part = [left.pop()]
        size = size_of(part[0])
        while len(left) >= num_parts and (num_parts == 1 or size + size_of(left[-1]) / 2 < rest / num_parts):
            size += size_of(left[-1])
            part.append(left.pop())
        rest -= size
        parts.append(part[::-1])
    return parts


def _unchanged(pool: Any) -> Any:
    return pool
