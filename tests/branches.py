"""Every branch of a program that takes its chances from one object, with its probability: exact laws instead of samples."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

Outcome = TypeVar("Outcome")


class ScriptedRandom:
    """Takes the options that the script names, then the first possible one; notes the scripts of those it did not take."""

    def __init__(self, script: list[int]) -> None:
        self.prob = 1.0
        self.others: list[list[int]] = []
        self._script, self._taken = script, 0

    def bernoulli(self, threshold: float) -> bool:
        assert 0.0 <= threshold <= 1.0
        return self._take(np.array([1.0 - threshold, threshold])) == 1

    def categorical(self, weights: np.ndarray) -> int:
        assert weights.min() >= 0.0
        return self._take(weights / weights.sum())

    def _take(self, probs: np.ndarray) -> int:
        options = [int(option) for option in np.flatnonzero(probs)]
        if self._taken == len(self._script):
            self.others += [[*self._script, option] for option in options[1:]]
            self._script = [*self._script, options[0]]
        option = self._script[self._taken]
        self._taken += 1
        self.prob *= float(probs[option])
        return option


def branches(run: Callable[[ScriptedRandom], Outcome]) -> Iterator[tuple[float, Outcome]]:
    """(probability, outcome) of every way `run` can go."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = ScriptedRandom(scripts.pop())
        outcome = run(chance)
        scripts += chance.others
        yield chance.prob, outcome
