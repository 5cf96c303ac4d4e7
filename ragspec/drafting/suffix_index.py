"""All texts that a sequence may copy from, as one array of tokens, searched for the suffix of the output."""

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
def _match_lengths(tokens: Any, end: int, suffix: Any, ends: Any, lengths: Any) -> int:
    """Positions before `end` whose preceding tokens repeat the end of `suffix`; returns how many were written.

    Shapes: tokens int32 [T], suffix int32 [M]; out: ends [<= T] (position after the match) and lengths.
    """
    count, last = 0, suffix.shape[0] - 1
    for at in range(end - 1):
        if tokens[at] != suffix[last]:
            continue
        length = 1
        while length <= last and length <= at and tokens[at - length] == suffix[last - length]:
            length += 1
        ends[count], lengths[count] = at + 1, length
        count += 1
    return count


class SuffixIndex:
    """The references of one sequence with separators between them, then the output, which grows.

    Also follows an input beside the output: `expected` is the input's next position, -1 for none; `num_off` counts output tokens
    since the output left the input.
    """

    def __init__(self, references: list[Reference], sequence: SequenceView) -> None:
        self.references = references
        self.salt = sequence.request.salt
        self.remembered = True
        sizes = [len(r.token_ids) + 1 for r in references]
        self.begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._tokens = np.full(int(self.begin[-1]) + 256, SEPARATOR, np.int32)
        for reference, start in zip(references, self.begin, strict=False):
            self._tokens[start : start + len(reference.token_ids)] = reference.token_ids
        self.end = int(self.begin[-1])
        self.expected = -1
        self.num_off = 0
        self.follows_input = any(r.kind in (SourceKind.INPUT, SourceKind.PREDICTION) for r in references)
        self.quotes = _ranked_quotes(references, self.begin)
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
        suffix = self.tokens[max(int(self.begin[-1]), self.end - max_length) :]
        if not len(suffix):
            return []
        ends, lengths = np.empty(self.end, np.int32), np.empty(self.end, np.int32)
        count = _match_lengths(self.tokens, self.end, suffix, ends, lengths)
        order = np.lexsort((-ends[:count], -lengths[:count]))[:_MOST_MATCHES]
        return [(int(ends[i]), int(lengths[i])) for i in order]

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
