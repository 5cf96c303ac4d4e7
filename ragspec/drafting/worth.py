"""Whether a drafter is worth asking: how it has fared in a sequence, and what its drafts bring for their time.

Everything here is an estimate that decides about time alone. Only counts are kept, never text.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

_PATIENCE = 3
"""Drafts in a row without an accepted token before a drafter is asked less often."""
_LONGEST_SLEEP = 8

_PRIOR_TOKENS = 6.0
"""Accepted tokens that a new sequence is believed to have had, of as many expected."""
_TRUST_MEMORY = 0.98
"""What is kept of the balance a step, drafted or not, so that a sequence that begins to copy late is tried again."""

_EXPECTED = (0.02, 0.5, 1.0, 2.0, 4.0)
_PRIOR_GAIN, _PRIOR_WEIGHT = 1.5, 3.0
_GAIN_MEMORY = 1.0 - 1.0 / 150.0
_PROBE_STEPS = 48
"""How often a drafter that does not pay is tried again: at a step's cost each, a loss of 2 % at most."""


class Trust:
    """Accepted over expected tokens of one drafter in one sequence, at most 1: where it guesses badly, drafts soon end."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0
        self.factor = 1.0

    def learn(self, expected: float, num_accepted: int) -> None:
        """`expected` by probabilities that were scaled by the factor."""
        self._expected = self._expected * _TRUST_MEMORY + expected / self.factor
        self._accepted = self._accepted * _TRUST_MEMORY + num_accepted
        self.factor = min(1.0, (_PRIOR_TOKENS + self._accepted) / (_PRIOR_TOKENS + self._expected))


class Rest:
    """After some drafts in vain in a row, a drafter is asked again after 1, 2, 4 and then every 8 steps."""

    def __init__(self) -> None:
        self._left = self._num_vain = 0

    def due(self) -> bool:
        """Whether to ask in this step; counts it as slept if not."""
        self._left -= self._left > 0
        return self._left == 0

    def note(self, accepted: bool) -> None:
        self._num_vain = 0 if accepted else self._num_vain + 1
        beyond = self._num_vain - _PATIENCE
        self._left = min(_LONGEST_SLEEP, 2 ** (beyond - 1)) + 1 if beyond > 0 else 0


class Course:
    """One drafter in one sequence."""

    def __init__(self) -> None:
        self.trust, self.rest = Trust(), Rest()


class Worth:
    """What a drafter that takes time adds to what cheaper ones have proposed: accepted tokens a draft, by their expectation.

    Beside a long match it adds little, so the gain is learned apart for each class of what others expect.
    """

    def __init__(self) -> None:
        self._tokens = [_PRIOR_GAIN * _PRIOR_WEIGHT] * (len(_EXPECTED) + 1)
        self._drafts = [_PRIOR_WEIGHT] * (len(_EXPECTED) + 1)
        self._steps_left = _PROBE_STEPS

    def gain(self, expected_of_others: float) -> float:
        """Accepted tokens that a draft is expected to add."""
        row = _class(expected_of_others)
        return self._tokens[row] / self._drafts[row]

    def learn(self, expected_of_others: float, num_added: int) -> None:
        row = _class(expected_of_others)
        self._tokens[row] = self._tokens[row] * _GAIN_MEMORY + num_added
        self._drafts[row] = self._drafts[row] * _GAIN_MEMORY + 1.0

    def probe_due(self) -> bool:
        """Asked when drafting does not seem to pay: true now and then."""
        self._steps_left = _PROBE_STEPS if self._steps_left <= 0 else self._steps_left - 1
        return self._steps_left <= 0


def _class(expected: float) -> int:
    return sum(expected >= limit for limit in _EXPECTED)


def worthwhile(gains: SequenceOf[float], token_s: float, cost_s: Callable[[SequenceOf[int]], float]) -> list[int]:
    """Which of some sequences to draft for: those with the greatest gains, as many as save the most time.

    `gains` in tokens, `token_s` seconds a token saves, `cost_s` the time of drafting for some of them together.
    """
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    best, best_s, gained = 0, 0.0, 0.0
    for count, i in enumerate(order, 1):
        gained += gains[i]
        saved_s = gained * token_s - cost_s(order[:count])
        if saved_s > best_s:
            best, best_s = count, saved_s
    return sorted(order[:best])
