"""From a row of logits to one token: warps, then argmax of (warped logit + keyed noise).

Order: penalties, logit bias, minimum length, temperature; then a token survives if it is among the `top_k` best, if the mass
ranked above it (within those) is under `top_p`, and if its probability is at least `min_p` times the greatest. Rank is
(greater logit, then lower id), so a survivor is decided without sorting: all three conditions fail for every token ranked
below a token that fails.

At temperature 0 the token is the greatest logit (ties to the lower id).
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numba
import numpy as np
from numpy.typing import NDArray

from ragspec.core import LEAST_TEMPERATURE, Request, SamplingParams, TokenLogprob
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.compiled import compiled
from ragspec.numerics.noise import ABOVE_ANY_GUMBEL, MOST_REST, bits, gumbel, output_key, output_keys
from ragspec.numerics.torch.sampling import KeyedDraw, LogitEdits
from ragspec.tree import DraftTree

Logits = NDArray[np.float32]


@compiled(nogil=True)
def _argmax(x: Any) -> int:
    best = 0
    for v in range(1, x.shape[0]):
        if x[v] > x[best]:
            best = v
    return best


@numba.njit(nogil=True)
def _lowest_of_top_k(x: Any, k: int) -> tuple[Any, int]:
    """(logit, id) of the token ranked k-th. The heap holds the k best, the lowest of them on top."""
    best = [(x[v], -v) for v in range(k)]
    heapq.heapify(best)
    for v in range(k, x.shape[0]):
        if x[v] > best[0][0]:  # an equal logit with a higher id ranks lower
            heapq.heapreplace(best, (x[v], -v))
    logit, negative_id = best[0]
    return logit, -negative_id


@numba.njit(inline="always")
def _ranks_above(x: Any, v: int, logit: Any, token_id: int) -> bool:
    return bool(x[v] > logit or (x[v] == logit and v < token_id))


@numba.njit(nogil=True)
def _mass_above(x: Any, maximum: Any, logit: Any, token_id: int) -> float:
    """Sum of e^(x - maximum) over tokens ranked above the given one, in the order of ids, in float64."""
    mass = 0.0
    for v in range(x.shape[0]):
        if _ranks_above(x, v, logit, token_id):
            mass += math.exp(np.float64(x[v]) - maximum)
    return mass


@numba.njit(nogil=True)
def _best_noisy(x: Any, key: Any, start: int, floor_logit: Any, floor_id: int) -> int:
    """argmax of x + G over tokens ranked above the floor; ties to the lower id. `start` is a token of high rank.

    A token's noise is at most `-log(1 - u)`, so for most tokens comparing 1 - u with a table replaces the logarithm.
    """
    best = start
    best_sum = np.float64(x[start]) + gumbel(bits(key, np.uint64(start)))
    for v in range(x.shape[0]):
        wanted = best_sum - np.float64(x[v])  # the noise that would tie with the best token
        if wanted > ABOVE_ANY_GUMBEL or not _ranks_above(x, v, floor_logit, floor_id):
            continue
        h = bits(key, np.uint64(v))
        if wanted >= 1.0 and np.uint64(2**53) - h > MOST_REST[int(wanted)]:
            continue
        total = np.float64(x[v]) + gumbel(h)
        if total > best_sum or (total == best_sum and v < best):
            best, best_sum = v, total
    return best


@compiled(nogil=True)
def _sample(x: Any, top_k: int, top_p: float, min_p: float, key: Any) -> int:
    greatest = _argmax(x)
    maximum = np.float64(x[greatest])
    floor_logit, floor_id = np.float32(-np.inf), x.shape[0]  # survivors rank above the floor (exclusive)
    if 0 < top_k < x.shape[0]:
        floor_logit, floor_id = _lowest_of_top_k(x, top_k)
        floor_id += 1
    total = 0.0
    threshold = maximum + math.log(min_p) if min_p > 0.0 else -np.inf
    while True:
        v = _best_noisy(x, key, greatest, floor_logit, floor_id)
        if v == greatest:
            return v
        if top_p < 1.0 and total == 0.0:  # before the floor rises; most samples are the greatest logit and need no mass
            total = _mass_above(x, maximum, floor_logit, floor_id)
        if np.float64(x[v]) >= threshold and (top_p >= 1.0 or _mass_above(x, maximum, x[v], v) < top_p * total):
            return v
        floor_logit, floor_id = x[v], v


def sample(logits: Logits, params: SamplingParams, seed: int, choice: int, index: int) -> int:
    """Token `index` of a choice's output, from its warped logits (see `warp`). Shape: float32 [V] -> id."""
    if params.greedy:
        return int(_argmax(logits))
    key = output_key(seed, choice, index)
    return int(_sample(logits, params.top_k, params.top_p, params.min_p, key))


def compile_samplers() -> None:
    """Compile the samplers now, which takes a second or more, instead of at the first sampled token."""
    row = np.zeros(4, np.float32)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
        sample(row, params, seed=0, choice=0, index=0)
    output_keys(seed=0, choice=0, first=0, count=1)


class TokenCounts:
    """The tokens of prompt and output (repetition), and how often each is in the output (presence, frequency)."""

    def __init__(self, prompt_ids: tuple[int, ...], output_ids: list[int]) -> None:
        self._seen = dict.fromkeys((*prompt_ids, *output_ids))
        self._output = dict(Counter(output_ids))

    def after(self, tokens: list[int]) -> TokenCounts:
        """A copy with further output tokens."""
        later = copy.copy(self)
        later._seen, later._output = self._seen.copy(), self._output.copy()
        for token in tokens:
            later.push(token)
        return later

    def push(self, token: int) -> None:
        self._seen[token] = None
        self._output[token] = self._output.get(token, 0) + 1

    def repeated(self, params: SamplingParams) -> NDArray[np.int64]:
        """The ids that the repetition penalty changes."""
        return np.fromiter(self._seen if params.repetition_penalty != 1.0 else (), np.int64)

    def penalties(self, params: SamplingParams) -> tuple[NDArray[np.int64], Logits]:
        """Ids, and the presence and frequency penalties that their logits lose."""
        output = self._output if params.presence_penalty or params.frequency_penalty else {}
        counts = np.fromiter(output.values(), np.float32)
        amounts = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        return np.fromiter(output, np.int64), amounts


def logit_edits(
    params: SamplingParams, counts: TokenCounts | None, forbidden: tuple[int, ...] = ()
) -> LogitEdits | None:
    """The changes of single logits that parameters and tokens ask for; None: none."""
    if counts is None and not params.logit_bias and not forbidden:
        return None
    counts = counts or TokenCounts((), [])
    biases = np.fromiter(params.logit_bias, np.int64), np.fromiter(params.logit_bias.values(), np.float32)
    return LogitEdits(
        params.repetition_penalty,
        counts.repeated(params),
        counts.penalties(params),
        biases,
        np.array(forbidden, np.int64),
    )


def warp(logits: Logits, params: SamplingParams, counts: TokenCounts | None, forbidden: tuple[int, ...] = ()) -> Logits:
    """Penalties, logit bias, forbidden ids and temperature, in this order; the input is not changed. Shape: float32 [V]."""
    return edited(logits, params, logit_edits(params, counts, forbidden))


def edited(logits: Logits, params: SamplingParams, edits: LogitEdits | None) -> Logits:
    """As `warp`, by edits whose ids are places in `logits`. Shape: float32 [N]."""
    x = logits
    if edits is not None:
        x, penalty = logits.copy(), np.float32(edits.repetition_penalty)
        old = x[edits.repeated]
        x[edits.repeated] = np.where(old > 0, old / penalty, old * penalty)
        for change, (ids, amounts) in ((np.subtract, edits.penalties), (np.add, edits.biases)):
            x[ids] = change(x[ids], amounts)
        x[edits.forbidden] = -np.inf
    if params.greedy or params.temperature == 1.0:
        return x
    return x / np.float32(max(params.temperature, LEAST_TEMPERATURE))


@compiled(nogil=True)
def _log_sum_exp(x: Any) -> float:
    maximum = np.float64(x[_argmax(x)])
    total = 0.0
    for v in range(x.shape[0]):
        total += math.exp(np.float64(x[v]) - maximum)
    return maximum + math.log(total)


def logprob(logits: Logits, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probabilities of the unwarped logits, in float64 and a fixed order. Shape: float32 [V]."""
    norm = _log_sum_exp(logits)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        best = np.lexsort((np.arange(logits.shape[0]), -logits))[:num_top]
        top = tuple((int(v), float(logits[v]) - norm) for v in best)
    return TokenLogprob(int(token_id), float(logits[token_id]) - norm, top)


def log_probs(logits: LogitRows, rows: Sequence[int], token_ids: Sequence[int], num_top: int) -> Sequence[TokenLogprob]:
    """Log-probabilities of tokens, one in each of these rows, where the logits are."""
    if isinstance(logits, np.ndarray):
        return [logprob(logits[row], token, num_top) for row, token in zip(rows, token_ids, strict=True)]
    return logits.log_probs(rows, token_ids, num_top)


class Sampler(Protocol):
    """Decides the output tokens of one choice, in order."""

    def __call__(self, logits: Logits) -> int:
        """The next output token, from the target's logits at its position. Shape: float32 [V]."""


class ChoiceSampler:
    """The state that all samplers of one choice share: parameters, rule, seed, output position, token counts."""

    def __init__(
        self, request: Request, seed: int, choice: int, eos_ids: tuple[int, ...], output_ids: list[int]
    ) -> None:
        self._params, self._rule = request.params, request.speculation.rule
        self._seed, self._choice, self._eos_ids = seed, choice, eos_ids
        self._index = len(output_ids)
        self._biased_lengths = request.params.biased_lengths
        self._output = list(output_ids) if self._biased_lengths else []
        self._counts = TokenCounts(request.prompt_ids, output_ids) if request.params.has_penalties else None

    def take(self, tokens: Sequence[int]) -> None:
        """Count tokens as decided."""
        if self._counts is not None:
            for token in tokens:
                self._counts.push(token)
        if self._biased_lengths:
            self._output.extend(tokens)
        self._index += len(tokens)

    def _after(self, path: list[int]) -> tuple[SamplingParams, TokenCounts | None, tuple[int, ...]]:
        """Of the token behind the output and further tokens: parameters, counts, and ids that it may not have."""
        params, counts, index = self._params, self._counts, self._index + len(path)
        if index in self._biased_lengths:
            params = params.after([*self._output, *path])
        if counts is not None and path:
            counts = counts.after(path)
        return params, counts, self._forbidden(index)

    def _forbidden(self, index: int) -> tuple[int, ...]:
        return self._eos_ids if index < self._params.min_tokens else ()


class KeyedSampler(ChoiceSampler):
    """The definition of the output: token i is the argmax of the warped logits plus the noise of (seed, choice, i)."""

    def __call__(self, logits: Logits) -> int:
        token = sample(self.warped(logits), self._params, self._seed, self._choice, self._index)
        self.take((token,))
        return token

    def warped(self, logits: Logits) -> Logits:
        """The logits that the next token is sampled from; -inf for tokens that cannot be sampled. Shape: float32 [V]."""
        return warp(logits, *self._after([]))

    def draws(self, tree: DraftTree) -> list[KeyedDraw]:
        """How the token after each node is sampled, for a backend that samples all nodes at once."""
        params, index, num_levels = self._params, self._index, max(tree.depths) + 1
        keys: list[int | None] = [None] * num_levels
        if not params.greedy:
            keys = [*output_keys(self._seed, self._choice, index, num_levels)]
        if self._counts is None and self._biased_lengths.isdisjoint(range(index, index + num_levels)):
            edits = [logit_edits(params, None, self._forbidden(index + n)) for n in range(num_levels)]
            levels = [KeyedDraw(params, *each) for each in zip(keys, edits, strict=True)]
            return [levels[depth] for depth in tree.depths]
        paths = ([tree.token_ids[n] for n in tree.ancestors(node)[1:]] for node in range(len(tree)))
        return [KeyedDraw(params, keys[len(path)], logit_edits(*self._after(path))) for path in paths]
