"""Where the target looks when an answer over passages begins: how much of a head's attention falls on each span.

A few heads of a language model look from where an answer begins to the text that it is copied from. A request whose prompt is
the answer's, and a quotation mark, shows the attention of one of them; it makes the span that is looked at a likelier quote
(`ragspec.rag.quote_choice`), and the answer finds its prompt in the prefix cache. It depends on the prompt alone: drafts change
no token. `pipelines.fit_retrieval_head` finds the head. Source: Wu et al., Retrieval Head Mechanistically Explains Long-Context
Factuality (2024).

    >>> SpanAttention(PassageTokens.of(prompt_ids, passages, tokenizer), row).log_shares([(passages[0], 0, 40)])
    array([-0.86])
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Attention, Passage, Request, SamplingParams
from ragspec.rag.wording import numbered

_LEAST_SHARE = 1e-3
"""Added to a share before its logarithm is taken."""


class PassageTokens(NamedTuple):
    """Where the tokens of a prompt, and its passages, stand in its text, in characters. Shapes: begins, ends [T]."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    places: dict[Passage, int]

    @classmethod
    def of(cls, prompt_ids: Sequence[int], passages: Sequence[Passage], tokenizer: Any) -> Self | None:
        """`passages`: in the order of the prompt; `tokenizer`: of the package tokenizers, whose state no call changes. None where
        the prompt's tokens are not those of its text, or the text does not hold the passages, each once."""
        ids, context = list(prompt_ids), numbered([passage.text for passage in passages])
        text = tokenizer.decode(ids, skip_special_tokens=False)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if encoded.ids != ids or (at := text.rfind(context)) < 0 or len(set(passages)) < len(passages):
            return None
        places = dict[Passage, int]()
        for number, passage in enumerate(passages, 1):
            places[passage] = at = at + len(f"[{number}] ")
            at += len(passage.text) + len("\n\n")
        begins, ends = np.array(encoded.offsets).T
        return cls(begins, ends, places)

    def between(self, begin: int, end: int) -> tuple[int, int]:
        """The first token that reaches into [begin, end), and the first behind these."""
        return int(np.searchsorted(self.ends, begin, "right")), int(np.searchsorted(self.begins, end, "left"))


class SpanAttention:
    """A head's attention on the passages of a prompt."""

    def __init__(self, tokens: PassageTokens, row: Sequence[float]) -> None:
        """`row`: of each token of the prompt, and of the mark [T + 1]."""
        self._tokens, self._sums = tokens, np.concatenate([[0.0], np.cumsum(row[:-1])])  # [T + 1]
        self._total = max(1e-9, sum(self._between(at, at + len(p.text)) for p, at in tokens.places.items()))

    def log_shares(self, spans: Sequence[tuple[Passage, int, int]]) -> NDArray[np.float64]:
        """The logarithm of each span's part of the attention on all passages. Shapes: -> [spans]."""
        firsts = [self._tokens.places[passage] for passage, _, _ in spans]
        parts = [self._between(at + start, at + end) for at, (_, start, end) in zip(firsts, spans, strict=True)]
        return np.log(np.array(parts) / self._total + _LEAST_SHARE)

    def _between(self, begin: int, end: int) -> float:
        first, last = self._tokens.between(begin, end)
        return float(self._sums[last] - self._sums[first])


class Look(NamedTuple):
    """A request before an answer's. `biased`: the answer's sampling parameters by the attention that it shows, `seen`."""

    request: Request
    tokens: PassageTokens
    biased: Callable[..., SamplingParams]

    def params(self, attention: Attention) -> SamplingParams:
        return self.biased(seen=SpanAttention(self.tokens, attention[0]) if attention else None)
