"""Whether a drafter is worth asking: how it has fared in a sequence, and what its drafts bring for their time.

Everything here is an estimate that decides about time alone. Only counts are kept, never text.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

_PATIENCE = 3
"""Drafts in a row without an accepted token before a drafter is asked less often."""
_LONGEST_SLEEP = 8

_PRIOR_TOKENS = 6.0
"""Accepted tokens that a new sequence is believed to have had, of as many expected."""
_TRUST_MEMORY = 0.98
"""What is kept of the balance a step, drafted or not, so that a sequence that begins to copy late is tried again."""

_EXPECTED = (0.02, 0.5, 1.0, 2.0, 4.0)
_PRIOR_GAIN, _PRIOR_DRAFTS = 0.6, 4.0
_GAIN_MEMORY = 1.0 - 1.0 / 150.0

CALLED_GAIN = 3.0
"""Accepted tokens that a draft may bring where a trial has just hit."""
_PRIOR_SEQUENCE = 0.5
"""Tokens that a sequence is believed to have gained, of as many foreseen."""
_SEQUENCE_MEMORY = 0.9
_MOST_FACTOR = 8.0
_FIRST_WAIT, _LONGEST_WAIT = 3, 48
"""Steps to the first trial where all trials lead to drafts that pay, and at most; from one to the next they double."""
_PRIOR_SUCCESS, _SUCCESS_MEMORY = 0.25, 0.95
_ENOUGH = 2
"""Accepted tokens of the draft that a trial called for: then it was worth trying."""


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
    """One drafter in one sequence. The rest is of a drafter whose drafts take time: what it gains here, and when to try it.

    Where a whole draft does not seem to pay, one level of it is tried now and then; a hit there calls for a whole one.
    """

    def __init__(self, first_wait: int = _FIRST_WAIT) -> None:
        self.trust, self.rest = Trust(), Rest()
        self.called = False
        self._gained = self._foreseen = _PRIOR_SEQUENCE
        self._left = self._wait = first_wait

    @property
    def factor(self) -> float:
        """What a draft gains here, over what drafts gain in general."""
        return min(_MOST_FACTOR, self._gained / self._foreseen)

    def learn(self, foreseen: float, num_added: int) -> None:
        """A whole draft was made. `foreseen`: what it gains in general."""
        self._gained = self._gained * _SEQUENCE_MEMORY + num_added
        self._foreseen = self._foreseen * _SEQUENCE_MEMORY + foreseen
        self.called = False
        if num_added:
            self._left = self._wait = _FIRST_WAIT

    def trial_due(self) -> bool:
        """Whether to try one level in this step; counts it as waited if not."""
        self._left -= 1
        if self._left >= 0:
            return False
        self._left, self._wait = self._wait, min(_LONGEST_WAIT, 2 * self._wait)
        return True

    def note_trial(self, hit: bool) -> None:
        """A hit calls for a whole draft."""
        self.called = hit


class Worth:
    """What a drafter that takes time adds to what cheaper ones have proposed: accepted tokens a draft, by their expectation.

    Beside a long match it adds little, so the gain is learned apart for each class of what others expect.
    """

    def __init__(self) -> None:
        self._tokens = [_PRIOR_GAIN * _PRIOR_DRAFTS] * (len(_EXPECTED) + 1)
        self._drafts = [_PRIOR_DRAFTS] * (len(_EXPECTED) + 1)
        self._success = _PRIOR_SUCCESS
        self._joint_left = _FIRST_WAIT
        self.num_nodes = 3.0
        """Nodes that a draft adds to a tree, of late: their rows are to be paid for, too."""

    @property
    def first_wait(self) -> int:
        """Steps before the first trial of a sequence: where trials lead nowhere, short answers are better left alone."""
        return min(_LONGEST_WAIT, round(_FIRST_WAIT / max(self._success, 1e-3)))

    def note_trial(self, success: bool) -> None:
        """What a trial led to."""
        self._success = self._success * _SUCCESS_MEMORY + success * (1.0 - _SUCCESS_MEMORY)

    def joint_trial_due(self) -> bool:
        """Whether to try all sequences of a step at once, where drafting for one of them would not pay."""
        self._joint_left -= 1
        if self._joint_left > 0:
            return False
        self._joint_left = self.first_wait
        return True

    def note_nodes(self, num_nodes: int) -> None:
        self.num_nodes += 0.05 * (num_nodes - self.num_nodes)

    def gain(self, expected_of_others: float) -> float:
        """Accepted tokens that a draft is expected to add."""
        row = _class(expected_of_others)
        return self._tokens[row] / self._drafts[row]

    def learn(self, asked: Asked, num_added: int) -> None:
        """What a whole draft has added."""
        if asked.was_called:
            self.note_trial(num_added >= _ENOUGH)
        row = _class(asked.expected_of_others)
        self._tokens[row] = self._tokens[row] * _GAIN_MEMORY + num_added
        self._drafts[row] = self._drafts[row] * _GAIN_MEMORY + 1.0


class Asked(NamedTuple):
    """A drafter that takes time was asked for one sequence in this step.

    `expected_of_others`: accepted tokens, before it was; `guesses`: what it guessed to come next. `was_called`: by a trial.
    """

    expected_of_others: float
    is_trial: bool
    was_called: bool
    guesses: frozenset[int] = frozenset()


def _class(expected: float) -> int:
    return sum(expected >= limit for limit in _EXPECTED)


def worthwhile(
    gains: SequenceOf[float], saved_s: Callable[[SequenceOf[int]], float], cost_s: Callable[[SequenceOf[int]], float]
) -> list[int]:
    """Which of some sequences to draft for: those with the greatest gains; all, or of 1, 2, 4 and so on what saves the most time.

    `gains` in tokens; `saved_s` and `cost_s`: the time that drafting for some of them together saves and takes.
    """
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    counts = {len(order), *(2**n for n in range(len(order).bit_length()))} - {0}
    best, best_s = 0, 0.0
    for count in sorted(counts):
        left_s = saved_s(order[:count]) - cost_s(order[:count])
        if left_s > best_s:
            best, best_s = count, left_s
    return sorted(order[:best])
