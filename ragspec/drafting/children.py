"""The children of a draft's nodes: coupled with the target's sampling noise, or drawn at random for a published acceptance rule.

The target's token is the argmax of its logits plus the keyed noise of (seed, choice, output position). So the children of a node
are the tokens with the greatest (drafter's logit + the same noise), under the request's temperature and warps. The target's token
is among a few such children far more often than among the most probable few. The output depends on no draft.

Published acceptance rules need the distribution that a child was drawn from, and no drawn child may be left out because of its
token. The distribution has the request's own warps. Random numbers are keyed, so a repeated request draws the same children.

Sources: Daliri, Musco, Suresh 2024 (arXiv 2408.07978); design section 4.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.core import SamplingParams
from ragspec.drafting.drafter import SequenceView
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.compiled import compiled
from ragspec.numerics.noise import bits, gumbel, output_key
from ragspec.numerics.torch.sampling import BestTokens, KeyedDraw, LogitEdits
from ragspec.speculation import CHAIN_RULES, LOSSY_RULES, AcceptanceRule
from ragspec.tree import Draw
from ragspec.verification.probabilities import KeyedRandom, RandomStream, draw_iid, draw_without_replacement, row_probs
from ragspec.verification.sampling import TokenCounts, edited, logit_edits

Floats = NDArray[np.float32]

_ALL = np.float32(-np.inf)
_RARE_NOISE = 12.0


@compiled(nogil=True)
def _pick(logits: Any, ids: Any, keys: Any, noisy: Any, floors: Any, columns: Any, scores: Any) -> None:
    """Each row's k greatest of logit + noise, falling; ties to the lower column.

    A token far behind is left out: noise above `_RARE_NOISE` occurs once in 160,000 tokens, and a draft may miss it. Noise is at
    most `-log(1 - u)`, so the leading zero bits of 1 - u bound it.
    """
    k = columns.shape[1]
    for row in range(logits.shape[0]):
        columns[row, :] = -1
        scores[row, :] = -np.inf
        for v in range(logits.shape[1]):
            total = np.float64(logits[row, v])
            if not logits[row, v] >= floors[row] or total == -np.inf:
                continue
            if noisy[row]:
                if total + _RARE_NOISE < scores[row, k - 1]:
                    continue
                h = bits(keys[row], np.uint64(ids[v]))
                rest = np.float64(np.uint64(2**53) - h)
                if rest > 1.0 and total + math.log(2.0**53 / (rest - 0.5)) < scores[row, k - 1] - 1e-9:
                    continue
                total += gumbel(h)
            if not total > scores[row, k - 1]:
                continue
            at = k - 1
            while at > 0 and total > scores[row, at - 1]:
                scores[row, at], columns[row, at] = scores[row, at - 1], columns[row, at - 1]
                at -= 1
            scores[row, at], columns[row, at] = total, v


class Coupling:
    """Picks children for one drafter. `draft_ids`: the target's id of each token of the draft vocabulary, rising."""

    def __init__(self, draft_ids: NDArray[np.int64], vocab_size: int) -> None:
        self._ids = draft_ids
        self._vocab_size = vocab_size

    def draws(self, owners: Sequence[SequenceView], depth: int) -> list[KeyedDraw]:
        """How to pick children of N nodes at `depth` - 1; node n belongs to the sequence `owners[n]`."""
        known = {sequence.key: sequence for sequence in owners}  # all nodes of a sequence at one depth share one noise
        draws = {k: KeyedDraw(s.request.params, self._key(s, depth), self._edits(s)) for k, s in known.items()}
        return [draws[sequence.key] for sequence in owners]

    def pick(self, logits: Floats, owners: Sequence[SequenceView], depth: int, num_children: int) -> BestTokens:
        """Children of N nodes, as `draws` names them. Shape: float32 [N, Vd]."""
        draws, size = self.draws(owners, depth), (len(owners), num_children)
        floors: Floats = np.full(len(owners), _ALL)
        finite = np.atleast_1d(np.isfinite(logits).all(1))
        scaled = np.zeros(logits.shape, np.float32)
        for row in np.flatnonzero(finite).tolist():
            params = draws[row].params
            scaled[row] = edited(logits[row], params, draws[row].edits)
            if params.truncates:
                floors[row] = survivor_floor(scaled[row], params)
        best = BestTokens(np.empty(size, np.int64), np.empty(size, np.float64), finite)
        keys = np.array([draw.key or 0 for draw in draws], np.uint64)
        noisy = np.array([draw.key is not None for draw in draws])
        _pick(scaled, self._ids, keys, noisy, floors, best.columns, best.scores)
        return best

    def _key(self, sequence: SequenceView, depth: int) -> int | None:
        params = sequence.request.params
        if params.greedy or not uses_noise(sequence):
            return None
        return int(output_key(params.seed or 0, sequence.key[1], sequence.num_output + depth - 1))

    def _edits(self, sequence: SequenceView) -> LogitEdits | None:
        """Penalties and biases of the tokens decided so far, by column of the draft vocabulary."""
        edits = logit_edits(sequence.request.params, _counts(sequence))
        if edits is None or len(self._ids) == self._vocab_size:
            return edits
        repeated, _ = self._columns(edits.repeated, edits.repeated)
        penalties, biases = self._columns(*edits.penalties), self._columns(*edits.biases)
        return edits._replace(repeated=repeated, penalties=penalties, biases=biases)

    def _columns(self, ids: NDArray[np.int64], amounts: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Of tokens and their amounts, the ones that the draft vocabulary has; tokens as its columns."""
        columns = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        known = self._ids[columns] == ids
        return columns[known], amounts[known]


def most_probable(logits: Floats, count: int) -> BestTokens:
    """Each row's most probable tokens at temperature 1, without noise and warps; scores are log-probabilities."""
    columns = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    wide = np.where(np.isfinite(logits), logits, np.float32(0.0)).astype(np.float64)
    greatest = wide.max(1, keepdims=True)
    norms = greatest + np.log(np.exp(wide - greatest).sum(1, keepdims=True))
    finite = np.atleast_1d(np.isfinite(logits).all(1))
    return BestTokens(columns, np.take_along_axis(wide, columns, 1) - norms, finite)


def _counts(sequence: SequenceView) -> TokenCounts | None:
    if not sequence.request.params.has_penalties:
        return None
    return TokenCounts(sequence.request.prompt_ids, sequence.tokens[sequence.num_prompt :])


def survivor_floor(logits: Floats, params: SamplingParams) -> np.float32:
    """The least logit that survives top-k, top-p and min-p, over the draft vocabulary. Shape: float32 [Vd]."""
    floor = _ALL
    if 0 < params.top_k < len(logits):
        floor = np.float32(np.partition(logits, len(logits) - params.top_k)[len(logits) - params.top_k])
    if params.min_p > 0.0:
        floor = max(floor, np.float32(logits.max() + math.log(params.min_p)))
    if params.top_p < 1.0:
        falling = -np.sort(-logits[logits >= floor])
        mass = np.cumsum(np.exp(falling.astype(np.float64) - float(falling[0])))
        floor = falling[min(int(np.searchsorted(mass, params.top_p * mass[-1])), len(falling) - 1)]
    return np.float32(floor)


class DrawnChildren(NamedTuple):
    """A draw, its distinct tokens in order, and their log-probabilities."""

    draw: Draw
    token_ids: list[int]
    log_probs: list[float]


def uses_noise(sequence: SequenceView) -> bool:
    """Whether drafts for this request use its sampling noise."""
    return sequence.request.speculation.rule is AcceptanceRule.KEYED


def draws_children(sequence: SequenceView) -> bool:
    """Whether the request's rule gains from drawn children: all rules but the keyed and the lossy ones."""
    return sequence.request.speculation.rule not in (AcceptanceRule.KEYED, *LOSSY_RULES)


def needs_chain(sequence: SequenceView) -> bool:
    """Whether the request's rule needs drafts without branches."""
    return sequence.request.speculation.rule in CHAIN_RULES


class ChildSampler:
    """Draws children in one step of one sequence, all from one random stream."""

    def __init__(self, sequence: SequenceView, draft_ids: NDArray[np.int64], vocab_size: int) -> None:
        params = sequence.request.params
        self._params, self._counts = params, _counts(sequence)
        self._ids, self._vocab_size = draft_ids, vocab_size
        self._iid = sequence.request.speculation.rule is AcceptanceRule.IID
        self._random = KeyedRandom(params.seed or 0, sequence.key[1], sequence.num_output, RandomStream.DRAFT)

    def children(self, logits: LogitRows, row: int, count: int) -> DrawnChildren:
        """Shape: float32 [N, Vd]; `row`: of one node."""
        if isinstance(logits, np.ndarray):
            full = np.full((1, self._vocab_size), np.float32(-np.inf))
            full[0, self._ids] = logits[row]
            logits, row = full, 0
        probs = row_probs(logits, row, self._params, self._counts)
        draw = draw_iid if self._iid else draw_without_replacement
        tokens = draw(probs, count, self._random)
        distinct = list(dict.fromkeys(tokens))
        log_probs = [float(np.log(probs[token])) for token in distinct]
        return DrawnChildren(Draw(tokens, probs, self._iid), distinct, log_probs)
