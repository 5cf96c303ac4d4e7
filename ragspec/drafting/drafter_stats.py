"""How a drafter fares: over all requests, and in one sequence. From this the planner decides whether to ask the drafter again.

Every number here is an estimate that decides about time alone. Only counts are kept, never text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

_FREE_MISSES = 3
"""Drafts in a row without an accepted token before a drafter is asked less often."""
_MAX_BACKOFF_STEPS = 8

_PRIOR_TOKENS = 6.0
"""Expected tokens after which a sequence's own acceptance weighs as much as that of other sequences' first steps."""
_NUM_FIRST_STEPS, _FIRST_TOKENS, _FIRST_MEMORY = 24, 6.0, 0.95
"""Steps with guesses that count of a sequence, tokens expected and found before any sequence, and the memory of one sequence."""
_RATIO_MEMORY = 0.98
"""Memory of one step with guesses, drafted or cut, so that a sequence that begins to copy late is trusted again."""

_CLASS_LIMITS = (0.02, 0.5, 1.0, 2.0, 4.0)
_PRIOR_GAIN, _PRIOR_DRAFTS = 0.6, 4.0
_GAIN_MEMORY = 1.0 - 1.0 / 150.0

TRIAL_HIT_GAIN = 3.0
"""Accepted tokens that a full draft may add after a trial that hit."""
_PRIOR_SEQUENCE = 0.5
"""Tokens that a new sequence is credited with having gained, out of as many expected."""
_SEQUENCE_MEMORY = 0.9
_MAX_FACTOR = 8.0
_PAUSE_STEPS = 5
_MIN_TRIAL_STEPS, _MAX_TRIAL_STEPS = 3, 48
"""Steps before the first trial of a sequence if all trials succeed, and at most. Later intervals double."""
_PRIOR_SUCCESS, _SUCCESS_MEMORY = 0.25, 0.95
_SUCCESS_TOKENS = 2
"""A trial succeeds if the full draft after it adds so many accepted tokens."""


class FirstSteps:
    """How a drafter's expectations came true in the first steps of one tenant's sequences: where a new sequence begins.

    Why not in all steps, and no sequence with more than was expected: drafts are right most often in long answers that repeat
    themselves, which say nothing about other answers.
    """

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0

    @property
    def ratio(self) -> float:
        return (_FIRST_TOKENS + self._accepted) / (_FIRST_TOKENS + self._expected)

    def learn(self, expected: float, num_accepted: float) -> None:
        """Count a sequence."""
        self._expected = self._expected * _FIRST_MEMORY + expected
        self._accepted = self._accepted * _FIRST_MEMORY + min(expected, num_accepted)


class AcceptanceRatio:
    """Accepted over expected tokens of one drafter in one sequence, at most 1: where it guesses badly, drafts soon end.

    A new sequence begins with the ratio of its tenant's first steps, as if from `_PRIOR_TOKENS` expected tokens.
    """

    def __init__(self, first_steps: FirstSteps) -> None:
        self._first_steps, self._steps_left = first_steps, _NUM_FIRST_STEPS
        self._expected, self._accepted, self._prior = 0.0, 0.0, first_steps.ratio
        self.factor = self._prior

    def learn(self, expected: float, num_accepted: int) -> None:
        """`expected` by the drafter's own probabilities, which the factor did not scale."""
        self._expected = self._expected * _RATIO_MEMORY + expected
        self._accepted = self._accepted * _RATIO_MEMORY + num_accepted
        accepted = _PRIOR_TOKENS * self._prior + self._accepted
        self.factor = min(1.0, accepted / (_PRIOR_TOKENS + self._expected))
        self._steps_left -= 1
        if self._steps_left == 0:
            self._first_steps.learn(self._expected, self._accepted)

    def finish(self) -> None:
        """The sequence has ended. A sequence without a guess says nothing."""
        if 0 < self._steps_left < _NUM_FIRST_STEPS:
            self._first_steps.learn(self._expected, self._accepted)


class Backoff:
    """After some misses in a row a drafter is asked again after 1, 2, 4 and then every 8 steps."""

    def __init__(self) -> None:
        self._steps_left = self._num_misses = 0

    def due(self) -> bool:
        """Whether to ask in this step. Counts the step as waited."""
        self._steps_left -= self._steps_left > 0
        return self._steps_left == 0

    def note(self, accepted: bool) -> None:
        self._num_misses = 0 if accepted else self._num_misses + 1
        beyond = self._num_misses - _FREE_MISSES
        self._steps_left = min(_MAX_BACKOFF_STEPS, 2 ** (beyond - 1)) + 1 if beyond > 0 else 0


class Pause:
    """When the worth of drafts that take time is computed: in every step; after some steps without such a draft, in every fifth.

    It is also computed in the first steps of a sequence, where sequences have ended, and where less is expected of the other
    drafters than in the step before, since drafts may pay there.
    """

    def __init__(self) -> None:
        self._num_misses = self._num_waited = self._num_sequences = 0
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}
        """Of each sequence the class in its last step, and the number of its steps."""
        self.num_steps = 1
        """Steps since the last computation, this step included."""

    def begin_step(self, expected_of_others: Mapping[tuple[str, int], float]) -> bool:
        """Whether to compute in this step. `expected_of_others`: accepted tokens by sequence. Call once a step."""
        self._num_waited += 1
        if len(self._seen) > 2 * len(expected_of_others) + 64:  # most have ended
            self._seen = {key: self._seen[key] for key in expected_of_others if key in self._seen}
        may_pay, self._num_sequences = len(expected_of_others) < self._num_sequences, len(expected_of_others)
        for key, expected in expected_of_others.items():
            last, count = self._seen.get(key, (0, 0))
            found = _class_of(expected) if expected else 0
            may_pay |= found < last or count < _FREE_MISSES
            self._seen[key] = found, count + 1
        if not may_pay and self._num_misses >= _FREE_MISSES and self._num_waited < _PAUSE_STEPS:
            return False
        self.num_steps, self._num_waited = self._num_waited, 0
        return True

    def num_steps_of(self, key: tuple[str, int]) -> int:
        """As `num_steps`, of a sequence: no more than it has had."""
        return min(self.num_steps, max(1, self._seen.get(key, (0, 0))[1]))

    def note(self, was_asked: bool) -> None:
        """Whether a draft was worth its time in this step, or tried."""
        self._num_misses = 0 if was_asked else min(_FREE_MISSES, self._num_misses + 1)


class SequenceStats:
    """One drafter in one sequence. For a drafter whose drafts take time also: its gain here, and when to try it.

    Where a full draft does not seem to pay, one level of a draft is tried now and then; after a hit a full draft follows.
    """

    def __init__(self, first_steps: FirstSteps, first_trial_steps: int = _MIN_TRIAL_STEPS) -> None:
        self.ratio, self.backoff = AcceptanceRatio(first_steps), Backoff()
        self.trial_hit = False
        self._gained = self._expected = _PRIOR_SEQUENCE
        self._steps_left = self._interval = first_trial_steps

    @property
    def factor(self) -> float:
        """The gain of a draft here over the usual gain."""
        return min(_MAX_FACTOR, self._gained / self._expected)

    def learn(self, expected: float, num_added: int) -> None:
        """Count a full draft. `expected`: the usual gain."""
        self._gained = self._gained * _SEQUENCE_MEMORY + num_added
        self._expected = self._expected * _SEQUENCE_MEMORY + expected
        self.trial_hit = False
        if num_added:
            self._steps_left = self._interval = _MIN_TRIAL_STEPS

    def trial_due(self, num_steps: int) -> bool:
        """Whether to try one level in this step. Counts so many steps as waited, this one included."""
        self._steps_left -= num_steps
        if self._steps_left >= 0:
            return False
        self._steps_left, self._interval = self._interval, min(_MAX_TRIAL_STEPS, 2 * self._interval)
        return True


class DrafterStats:
    """One drafter over all requests: accepted tokens that its drafts add to the drafts of cheaper drafters.

    Beside a long copied match a draft adds little, so the gain is learned for each class of the others' expected tokens.
    """

    def __init__(self) -> None:
        self._tokens = [_PRIOR_GAIN * _PRIOR_DRAFTS] * (len(_CLASS_LIMITS) + 1)
        self._drafts = [_PRIOR_DRAFTS] * (len(_CLASS_LIMITS) + 1)
        self._success = _PRIOR_SUCCESS
        self._joint_steps_left = _MIN_TRIAL_STEPS
        self.num_nodes = 3.0
        """Mean number of nodes that a draft adds to a tree; their rows cost time too."""

    @property
    def first_trial_steps(self) -> int:
        """Steps before the first trial of a sequence. The less trials succeed, the longer: short answers get none."""
        return min(_MAX_TRIAL_STEPS, round(_MIN_TRIAL_STEPS / max(self._success, 1e-3)))

    def note_trial(self, success: bool) -> None:
        self._success = self._success * _SUCCESS_MEMORY + success * (1.0 - _SUCCESS_MEMORY)

    def joint_trial_due(self, num_steps: int) -> bool:
        """Whether to try all sequences of a step together, where a draft for one sequence alone could not pay. Counts steps."""
        self._joint_steps_left -= num_steps
        if self._joint_steps_left > 0:
            return False
        self._joint_steps_left = self.first_trial_steps
        return True

    def gain(self, expected_of_others: float) -> float:
        """Accepted tokens that a draft is expected to add."""
        row = _class_of(expected_of_others)
        return self._tokens[row] / self._drafts[row]

    def learn(self, pending: PendingDraft, num_added: int, num_nodes: int) -> None:
        """Count a full draft: `num_added` accepted tokens by `num_nodes` nodes."""
        if pending.after_hit:
            self.note_trial(num_added >= _SUCCESS_TOKENS)
        row = _class_of(pending.expected_of_others)
        self._tokens[row] = self._tokens[row] * _GAIN_MEMORY + num_added
        self._drafts[row] = self._drafts[row] * _GAIN_MEMORY + 1.0
        self.num_nodes += 0.05 * (num_nodes - self.num_nodes)


class HeadChoice:
    """Which of several heads drafts in one sequence: the head of most worth so far, and now and then the one asked least."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._steps_left = self._interval = _MIN_TRIAL_STEPS

    def pick(self, worth: Mapping[str, float], num_steps: int) -> str:
        """`worth`: seconds that a draft of each head is expected to save. `num_steps`: since the last choice."""
        self._steps_left -= num_steps
        if self._steps_left >= 0:
            name = max(worth, key=worth.__getitem__)
        else:
            name = min(worth, key=self._asked.__getitem__)
            self._steps_left, self._interval = self._interval, min(_MAX_TRIAL_STEPS, 2 * self._interval)
        self._asked[name] += 1
        return name


class PendingDraft(NamedTuple):
    """A draft of this step that took time, until its outcome is known.

    `expected_of_others`: accepted tokens expected of the other drafters; `after_hit`: a trial that hit caused the draft;
    `first_tokens`: the draft's guesses of the next token.
    """

    expected_of_others: float
    is_trial: bool
    after_hit: bool
    first_tokens: frozenset[int] = frozenset()


def _class_of(expected: float) -> int:
    return sum(expected >= limit for limit in _CLASS_LIMITS)


def select_paying(
    gains: SequenceOf[float], saved_s: Callable[[SequenceOf[float]], float], cost_s: Callable[[SequenceOf[int]], float]
) -> list[int]:
    """The sequences whose drafts together save the most time: of the greatest gains the first 1, 2, 4 and so on, or all.

    `saved_s`: seconds that some gains, in tokens, save together. `cost_s`: seconds that drafts for some sequences take.
    """
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    counts = {len(order), *(2**n for n in range(len(order).bit_length()))} - {0}
    best, best_s = 0, 0.0
    for count in sorted(counts):
        left_s = saved_s([gains[i] for i in order[:count]]) - cost_s(order[:count])
        if left_s > best_s:
            best, best_s = count, left_s
    return sorted(order[:best])
