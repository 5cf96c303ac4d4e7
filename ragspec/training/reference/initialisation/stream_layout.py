"""Where the residual stream of the reference target keeps what, before training and for the circuits that are written into it.

>>> stream_layout(416).columns(SPELLING)
slice(361, 393, None)
"""

from typing import NamedTuple

HEAD_DIM = 128
RECENT, SIGNATURE, VOTES, BEFORE, MEANING, SPELLING = 3, 4, 5, 6, 7, 8
"""Slots after the token itself (0) and those 1 and 2 places back: the average of the recent tokens; which sentence; what the
question's words vote for; what stands before the word; what the token means, and how it is spelt."""


class StreamLayout(NamedTuple):
    """Sizes of the slots: of the token itself, of each that is shifted or derived, of the meaning, of the spelling."""

    identity: int
    shifted: int
    meaning: int
    spelling: int

    def start(self, slot: int) -> int:
        """First column of a slot."""
        if slot == SPELLING:
            return self.start(MEANING) + self.meaning
        return 0 if slot == 0 else self.identity + (slot - 1) * self.shifted

    def columns(self, slot: int) -> slice:
        """All columns of a slot."""
        size = {0: self.identity, MEANING: self.meaning, SPELLING: self.spelling}.get(slot, self.shifted)
        return slice(self.start(slot), self.start(slot) + size)


def stream_layout(hidden_size: int) -> StreamLayout:
    """Three eighths, at most a head, are the identity, a thirteenth each shifted slot and the spelling, a tenth the meaning."""
    identity, part = min(HEAD_DIM, hidden_size * 3 // 8), hidden_size // 13
    meaning = min(hidden_size // 10, hidden_size - identity - 7 * part)
    return StreamLayout(identity, part, meaning, part)
