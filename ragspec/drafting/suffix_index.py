"""All texts that a sequence may copy from, as one array of tokens, searched for the suffix of the output.

A search compares the places of the last token alone, so its time grows with how often that token occurs, not with the texts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.core import SourceKind
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.references import Reference
from ragspec.numerics.compiled import compiled

Ints = NDArray[np.int32]

SEPARATOR = -1
_MOST_MATCHES = 24


@compiled(nogil=True)
def _longest_matches(tokens: Any, known: Any, output_begin: int, end: int, suffix: Any, most: int) -> Any:
    """(position after the match, its length) of at most `most` earlier occurrences of the suffix's end, longest and latest first.

    Shapes: tokens int32 [T]; known int32 [K]: the places before `output_begin` that hold the last token, ascending; suffix int32
    [M] -> int32 [<= most, 2].
    """
    last = suffix.shape[0] - 1
    ends = np.empty((last + 1, most), np.int32)
    counts = np.zeros(last + 1, np.int64)
    at, left = end - 2, known.shape[0]
    while counts[last] < most:
        if at >= output_begin:  # Why no index: the output grows with every token, and is short
            place = at
            at -= 1
            if tokens[place] != suffix[last]:
                continue
        elif left > 0:
            left -= 1
            place = known[left]
        else:
            break
        length = 1
        while length <= last and length <= place and tokens[place - length] == suffix[last - length]:
            length += 1
        if counts[length - 1] < most:
            ends[length - 1, counts[length - 1]] = place + 1
            counts[length - 1] += 1
    found = np.empty((most, 2), np.int32)
    count = 0
    for length in range(last + 1, 0, -1):
        for n in range(min(counts[length - 1], most - count)):
            found[count, 0], found[count, 1] = ends[length - 1, n], length
            count += 1
    return found[:count]


class ReferenceIndex:
    """The references of one request with separators between them, and the places of every token. Sequences share it."""

    def __init__(self, references: list[Reference]) -> None:
        self.references = references
        sizes = [len(r.token_ids) + 1 for r in references]
        self.begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.tokens = np.full(int(self.begin[-1]), SEPARATOR, np.int32)
        for reference, start in zip(references, self.begin, strict=False):
            self.tokens[start : start + len(reference.token_ids)] = reference.token_ids
        self.follows_input = any(r.kind in (SourceKind.INPUT, SourceKind.PREDICTION) for r in references)
        self.quotes = _ranked_quotes(references, self.begin)
        self._order = np.argsort(self.tokens, kind="stable").astype(np.int32)
        self._sorted = self.tokens[self._order]

    def places(self, token: int) -> Ints:
        """Where a token stands, ascending."""
        first, last = np.searchsorted(self._sorted, np.array([token, token + 1], np.int32))
        return self._order[first:last]


class SuffixIndex:
    """The references of one sequence, then the output, which grows.

    Also follows an input beside the output: `expected` is the input's next position, -1 for none; `num_off` counts output tokens
    since the output left the input.
    """

    def __init__(self, base: ReferenceIndex, sequence: SequenceView) -> None:
        self._base = base
        self.references, self.begin, self.quotes = base.references, base.begin, base.quotes
        self.follows_input = base.follows_input
        self.salt = sequence.request.salt
        self.remembered = True
        self._tokens = np.concatenate([base.tokens, np.full(256, SEPARATOR, np.int32)])
        self.end = int(self.begin[-1])
        self.expected = -1
        self.num_off = 0
        for token in sequence.tokens[sequence.num_prompt :]:
            self.append(token)

    @property
    def tokens(self) -> Ints:
        return self._tokens[: self.end]

    def append(self, token: int) -> None:
        if self.end == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.full(len(self._tokens), SEPARATOR, np.int32)])
        self._tokens[self.end] = token
        self.end += 1

    def matches(self, max_length: int) -> list[tuple[int, int]]:
        """(position after the match, its length) of every earlier occurrence of the output's end; longest first, then latest."""
        begin = int(self.begin[-1])
        suffix = self.tokens[max(begin, self.end - max_length) :]
        if not len(suffix):
            return []
        places = self._base.places(int(suffix[-1]))
        found: list[list[int]] = _longest_matches(self._tokens, places, begin, self.end, suffix, _MOST_MATCHES).tolist()
        return [(end, length) for end, length in found]

    def reference_at(self, at: int) -> int:
        """Number of the reference that contains position `at`; len(references) for the output."""
        return int(np.searchsorted(self.begin, at, "right")) - 1

    def follow(self, token: int) -> None:
        """Advance the position in the input by one output token."""
        if self.expected < 0:
            return
        if self.num_off == 0 and self.tokens[self.expected] == token:
            self.expected += 1
        else:
            self.num_off += 1


def _ranked_quotes(references: list[Reference], begin: NDArray[np.int64]) -> list[int]:
    """Starts of the passages' sentences and their parts; sentences that share the rarest tokens with the question come first."""
    whole = [r for r in references if r.is_sentence and not r.is_part]
    counts = Counter(token for r in whole for token in set(r.token_ids))
    question = {t for r in references if r.kind in (SourceKind.HISTORY, SourceKind.INPUT) for t in r.token_ids}
    scores, score = list[tuple[float, int]](), 0.0
    for at, reference in zip(begin, references, strict=False):
        if reference.is_sentence:
            if not reference.is_part:
                score = -sum(1.0 / counts[t] for t in question.intersection(reference.token_ids))
            scores.append((score, int(at)))
    return [at for _, at in sorted(scores)]
