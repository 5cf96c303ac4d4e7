"""Keyed sampling of many rows at once, on the device that has their logits: `ragspec.verification.sampling` in torch operators.

The noise has the same 64 bits as on the CPU. No vocabulary is sorted: a search by digits finds the lowest token that top-k and
top-p leave. Probabilities above a token are added up as whole numbers, so their sum has no order. Logarithms and exponentials may
differ from the CPU's in the last bit of a float64, which decides a token only at a tie of some 16 digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.core import LEAST_TEMPERATURE, SamplingParams, TokenLogprob
from ragspec.numerics.attention import Floats
from ragspec.numerics.noise import MIX_1, MIX_2, STEP
from ragspec.numerics.torch.attention import tree_sum
from ragspec.numerics.torch.transfer import column, to_device, to_host

TokenIds = NDArray[np.int64]
_MASS_BITS = 40
"""A probability of e^0 as a whole number; a vocabulary of 2^22 tokens still fits 63 bits."""
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""First bit and number of bits of the digits of a float32, the highest first."""
_SCRATCH_BYTES = 2**28
"""Rows are sampled in groups whose float64 rows take at most so much memory."""


class LogitEdits(NamedTuple):
    """Changes of a few logits of one row, made in this order. Shapes: ids int64 [E] each, amounts float32 [E].

    `repeated`: positive logits are divided by `repetition_penalty`, negative ones multiplied. `penalties` are subtracted,
    `biases` added; `forbidden` become -inf.
    """

    repetition_penalty: float
    repeated: TokenIds
    penalties: tuple[TokenIds, Floats]
    biases: tuple[TokenIds, Floats]
    forbidden: TokenIds


PackedBits = NDArray[np.uint8]
"""A bit for each token, eight in a byte, the lowest first. Shape: uint8 [V / 8, rounded up]."""


class KeyedDraw(NamedTuple):
    """How one row's token is sampled: `key` is the noise of the output position; None: without noise. `edits` None: none.

    `allowed`: the tokens that may be sampled; None: all.
    """

    params: SamplingParams
    key: int | None
    edits: LogitEdits | None
    allowed: PackedBits | None = None


class BestTokens(NamedTuple):
    """The best tokens of each row, falling; ties to the lower column. Shapes: columns int64 [N, k] (-1: none), scores float64
    [N, k], finite bool [N]: whether all logits of the row are finite."""

    columns: TokenIds
    scores: NDArray[np.float64]
    finite: NDArray[np.bool_]

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> BestTokens:
        """Rows of columns, scores and 1.0 for finite. Shape: [N, 2 k + 1]."""
        columns, scores, finite = np.split(numbers, [numbers.shape[1] // 2, numbers.shape[1] - 1], 1)
        return cls(columns.astype(np.int64), scores, finite[:, 0] > 0)


def _signed(number: int | np.uint64) -> int:
    """The int64 of the same 64 bits."""
    return (int(number) ^ 2**63) - 2**63


def _shifted(x: Tensor, count: int) -> Tensor:
    """A logical shift to the right; torch's shift of int64 repeats the sign."""
    return torch.bitwise_and(x >> count, 2 ** (64 - count) - 1)


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x = torch.bitwise_xor(x, _shifted(x, shift)) * _signed(factor)
    return torch.bitwise_xor(x, _shifted(x, 31))


def gumbel_rows(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The noise of each key's output position. Shapes: int64 [W], the bits of the keys; int64 [V] -> float64 [W, V]."""
    h = _shifted(_mixed(keys[:, None] + (token_ids + 1) * _signed(STEP)), 11)
    low = torch.log((h.double() + 0.5) * 2.0**-53)
    high = torch.log1p((0.5 - (2**53 - h).double()) * 2.0**-53)
    return -torch.log(-torch.where(h < 2**52, low, high))


class TorchLogits:
    """Logits of some rows that stay on a device, float32 [W, V]: tokens are chosen there.

    `token_ids`: the token of each column. Shape: int64 [V].
    """

    def __init__(self, values: Tensor, token_ids: Tensor | None = None, vocab_size: int = 0) -> None:
        self._values, self._vocab_size = values, vocab_size or values.shape[1]  # [W, V]
        self.token_ids = torch.arange(values.shape[1], device=values.device) if token_ids is None else token_ids

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: slice) -> TorchLogits:
        """Fewer rows."""
        return TorchLogits(self._values[rows], self.token_ids, self._vocab_size)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        """All rows on the host, for tests of the numerics."""
        rows: Floats = to_host(self._values)
        return rows

    @torch.inference_mode()
    def sample(self, draws: Sequence[KeyedDraw | None]) -> list[int]:
        """The token of each row; of a row without a draw or without numbers, any token."""
        parts = [_sampled(values, some, self.token_ids) for values, some in self._groups(draws)]
        return [int(token) for part in parts for token in to_host(part)]

    @torch.inference_mode()
    def best(self, draws: Sequence[KeyedDraw] | None, count: int) -> Tensor:
        """Each row's `count` greatest of warped logit and noise, among the tokens that survive the warps; without draws the most
        probable ones, and their log-probabilities. They stay on the device, in the form that `BestTokens.of` reads.

        Shape: float64 [W, 2 count + 1].
        """
        if draws is None:
            columns, log_probs = _most_probable(self._values, count)
            finite = torch.isfinite(log_probs).all(1, keepdim=True)
            return torch.cat([columns.double(), log_probs, finite.double()], 1)
        return torch.cat([_best(values, some, self.token_ids, count) for values, some in self._groups(draws)])

    @torch.inference_mode()
    def log_probs(self, rows: Sequence[int], token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """As `ragspec.verification.sampling.logprob`, for a token of each of some rows."""
        values = self._values[to_device(np.array(rows, np.int64), self._values.device)]
        own = to_device(np.array(token_ids, np.int64), values.device)[:, None]
        found = to_host(torch.cat([part.double() for part in _most_probable(values, num_top, own)], 1))
        found_ids, logs = (half.tolist() for half in np.split(found, 2, 1))
        return [
            TokenLogprob(int(own[0]), log[0], tuple((int(v), p) for v, p in zip(own[1:], log[1:], strict=True)))
            for own, log in zip(found_ids, logs, strict=True)
        ]

    @torch.inference_mode()
    def probs(self, row: int, draw: KeyedDraw) -> TorchProbs:
        """Warped probabilities of one row over the target's vocabulary; they stay on the device."""
        x = self._values[row : row + 1]
        vocab_size = self._vocab_size
        if x.shape[1] < vocab_size:
            x = torch.full_like(x[:, :1], -torch.inf).repeat(1, vocab_size).index_copy(1, self.token_ids, x)
        x = _warped(x, [draw])
        one_hot = (torch.arange(vocab_size, device=x.device) == _first_greatest(x)[:, None]).double()
        if draw.params.greedy:
            return TorchProbs(one_hot[0])
        greatest = x.amax(1, keepdim=True).double()
        mass = torch.exp(x.double() - greatest) * _survivors(x, [draw])
        return TorchProbs(torch.where(torch.isfinite(greatest), mass / tree_sum(mass), one_hot)[0])

    def _groups(self, draws: Sequence[Any]) -> Iterator[tuple[Tensor, Sequence[Any]]]:
        size = max(1, _SCRATCH_BYTES // (8 * self._values.shape[1]))
        for at in range(0, len(draws), size):
            yield self._values[at : at + size], draws[at : at + size]


def _most_probable(values: Tensor, count: int, *own: Tensor) -> tuple[Tensor, Tensor]:
    """Columns `own` [W, 1], then those of the greatest logits, and log-probabilities of all. Shapes: float32 [W, V]."""
    wide, maxima = values.double(), values.amax(1, keepdim=True).double()
    norms = maxima + torch.log(tree_sum(torch.exp(wide - maxima)))
    columns = torch.cat([*own, _greatest(values, count)], 1)
    return columns, wide.gather(1, columns) - norms


def _sampled(logits: Tensor, draws: Sequence[KeyedDraw | None], token_ids: Tensor) -> Tensor:
    """The column of each row's token. Shapes: float32 [W, V], int64 [V] -> int64 [W]."""
    x = _warped(logits, draws)
    tokens = _first_greatest(x)
    for rows, survivors in _noisy_sums(x, draws, token_ids):
        tokens[rows] = _first_greatest(survivors)
    return tokens


def _best(logits: Tensor, draws: Sequence[KeyedDraw], token_ids: Tensor, count: int) -> Tensor:
    """Columns, scores, and whether all logits are finite. Shapes: float32 [W, V], int64 [V] -> float64 [W, 2 count + 1]."""
    finite = torch.isfinite(logits).all(1, keepdim=True)
    x = torch.where(finite, _warped(logits, draws), 0.0)
    scores = x.double()
    for rows, survivors in _noisy_sums(x, draws, token_ids):
        scores[rows] = survivors
    ranked = _greatest(scores, count)
    scores = scores.gather(1, ranked)
    columns = torch.where(scores > -torch.inf, ranked, -1)
    return torch.cat([columns.double(), scores, finite.double()], 1)


def _noisy_sums(x: Tensor, draws: Sequence[KeyedDraw | None], token_ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers of the rows that are not greedy, and the sums of warped logit and noise, -inf for tokens that the warps leave
    out; once, or not if there are none.

    Shapes: float32 [W, V], int64 [V] -> int64 [R], float64 [R, V].
    """
    sampled = [(row, draw) for row, draw in enumerate(draws) if draw is not None and not draw.params.greedy]
    if not sampled:
        return
    rows = to_device(np.array([row for row, _ in sampled], np.int64), x.device)
    warped, own = x[rows], [draw for _, draw in sampled]
    sums = warped.double()
    if any(draw.key is not None for draw in own):
        keys = to_device(np.array([_signed(draw.key or 0) for draw in own], np.int64), x.device)
        sums = sums + gumbel_rows(keys, token_ids) * column([float(draw.key is not None) for draw in own], x.device)
    yield rows, sums.masked_fill(~_survivors(warped, own), -torch.inf)


def _first_greatest(x: Tensor) -> Tensor:
    """argmax with ties to the lower id, on every device. Shapes: [W, V] -> int64 [W]."""
    ids = torch.arange(x.shape[1], device=x.device)
    greatest = x == x.amax(1, keepdim=True)
    return torch.where(greatest, ids, x.shape[1] - 1).amin(1)


def _warped(logits: Tensor, draws: Sequence[KeyedDraw | None]) -> Tensor:
    """Edits, masks and temperatures. Shapes: float32 [W, V] twice."""
    x = logits
    edits = [(row, draw.edits) for row, draw in enumerate(draws) if draw is not None and draw.edits is not None]
    if edits:
        x = x.clone()
        repeated = [(row, e.repeated, np.full(len(e.repeated), e.repetition_penalty, np.float32)) for row, e in edits]
        _edit(x, repeated, lambda old, penalty: torch.where(old > 0, old / penalty, old * penalty))
        _edit(x, [(row, *e.penalties) for row, e in edits], torch.sub)
        _edit(x, [(row, *e.biases) for row, e in edits], torch.add)
        forbidden = [(row, e.forbidden, np.full(len(e.forbidden), -np.inf, np.float32)) for row, e in edits]
        _edit(x, forbidden, lambda old, amount: amount)
    masked = [(row, draw.allowed) for row, draw in enumerate(draws) if draw is not None and draw.allowed is not None]
    if masked:
        x = _masked(x, *zip(*masked, strict=True))
    temperatures = [1.0 if draw is None or draw.params.greedy else draw.params.temperature for draw in draws]
    if any(temperature != 1.0 for temperature in temperatures):
        divisors = np.maximum(np.array(temperatures), LEAST_TEMPERATURE).astype(np.float32)
        x = x / to_device(divisors, x.device)[:, None]
    return x


def _edit(
    x: Tensor, edits: Iterable[tuple[int, NDArray[np.int64], Floats]], change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Change some logits in place; a row's ids are distinct. Each edit: row, ids, amounts."""
    chosen = [(np.full(len(ids), row), ids, amounts) for row, ids, amounts in edits if len(ids)]
    if chosen:
        rows, ids, amounts = (to_device(np.concatenate(each), x.device) for each in zip(*chosen, strict=True))
        x[rows, ids] = change(x[rows, ids], amounts)


def _masked(x: Tensor, rows: Sequence[int], allowed: Sequence[PackedBits]) -> Tensor:
    """Some rows with -inf where they have no bit; the bits are unpacked on the device. Shape: float32 [W, V] twice."""
    packed = to_device(np.stack(allowed), x.device)[:, :, None]  # [R, bytes, 1]
    bits = (packed >> torch.arange(8, dtype=torch.uint8, device=x.device)) & 1
    at = to_device(np.array(rows, np.int64), x.device)
    return x.index_copy(0, at, x[at].masked_fill(bits.flatten(1)[:, : x.shape[1]] == 0, -torch.inf))


def _survivors(x: Tensor, draws: Sequence[KeyedDraw]) -> Tensor:
    """Tokens that top-k, top-p and min-p leave, ranked by (greater logit, lower id). Shapes: float32 [W, V] -> bool [W, V]."""
    params = [draw.params for draw in draws]
    kept = torch.ones_like(x, dtype=torch.bool)
    if not any(p.truncates for p in params):
        return kept
    wide, keys = x.double(), _in_order(x)
    maxima = wide.amax(1, keepdim=True)
    if any(p.top_k for p in params):
        counts = column([p.top_k or x.shape[1] for p in params], x.device)
        kept = _above_limit(keys, kept.long(), counts)
    if any(p.top_p < 1.0 for p in params):
        mass = (torch.exp(wide - maxima) * 2.0**_MASS_BITS).long() * kept
        shares = column([p.top_p if p.top_p < 1.0 else math.inf for p in params], x.device)
        kept = kept & _above_limit(keys, mass, shares * mass.sum(1, keepdim=True).double())
    if any(p.min_p for p in params):
        least = column([math.log(p.min_p) if p.min_p else -math.inf for p in params], x.device)
        kept = kept & (wide >= maxima + least)
    return kept


def _in_order(x: Tensor) -> Tensor:
    """Whole numbers below 2^32 in the order of the floats, equal for both zeros. Shapes: float32 [W, V] -> int64 [W, V]."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ (2**31 - 1), bits).long() + 2**31


def _above_limit(keys: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
    """Tokens for which all tokens ranked above, by (greater key, lower column), weigh less than the row's limit.

    The digits of the lowest such key are found one after another, from the weights of all tokens by their digit; sums of whole
    numbers have no order. Shapes: int64 [W, V] twice, float64 [W, 1] -> bool [W, V].
    """
    lowest, above = torch.zeros_like(keys[:, :1]), torch.zeros_like(keys[:, :1])  # above: the weight of greater keys
    for first, size in _DIGITS:
        is_open = keys >> (first + size) == lowest >> (first + size)
        digits = (keys >> first) & (2**size - 1)
        by_digit = weights.new_zeros((len(keys), 2**size)).scatter_add_(1, digits, weights * is_open)
        greater = above + by_digit.flip(1).cumsum(1).flip(1) - by_digit
        # Why a greatest digit: the weights of a row without numbers may pass any limit
        digit = (greater.double() >= limits).sum(1, keepdim=True).clip(max=2**size - 1)
        lowest, above = lowest + (digit << first), greater.gather(1, digit)
    tied = weights * (keys == lowest)
    return (keys > lowest) | ((keys == lowest) & ((above + tied.cumsum(1) - tied).double() < limits))


def _greatest(x: Tensor, count: int) -> Tensor:
    """The columns of each row's `count` greatest numbers, ranked by (greater, lower column). Shapes: [W, V] -> int64 [W, count].

    A device's choice among equal numbers is its own, so the numbers are chosen first, then the columns.
    """
    num_columns, ids = x.shape[1], torch.arange(x.shape[1], device=x.device)
    least = torch.topk(x, min(max(1, count), num_columns), dim=1).values[:, -1:]
    places = torch.where(x > least, ids - num_columns, torch.where(x == least, ids, num_columns))
    columns = torch.topk(places, min(count, num_columns), dim=1, largest=False).values % num_columns
    ranked = torch.sort(x.gather(1, columns), dim=1, descending=True, stable=True).indices
    return columns.gather(1, ranked)


class TorchProbs:
    """A row of probabilities on a device, with the array operations that the published acceptance rules use.

    Single numbers reach the host, rows stay. Every sum has a fixed order.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values  # float64 [V]
        self.shape: tuple[int, ...] = (len(values),)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, token_id: int) -> float:
        return _number(self._values[token_id])

    def __setitem__(self, token_id: int, prob: float) -> None:
        self._values[token_id] = prob

    def __rmul__(self, factor: float) -> TorchProbs:
        return TorchProbs(self._values * factor)

    def __truediv__(self, divisor: float) -> TorchProbs:
        return TorchProbs(self._values / divisor)

    def __sub__(self, other: TorchProbs) -> TorchProbs:
        return TorchProbs(self._values - other._values)

    def clip(self, least: float) -> TorchProbs:
        return TorchProbs(self._values.clip(least))

    def copy(self) -> TorchProbs:
        return TorchProbs(self._values.clone())

    def sum(self) -> float:
        return _number(tree_sum(self._values)[0])

    def min(self) -> float:
        return _number(self._values.amin())

    def max(self) -> float:
        return _number(self._values.amax())

    def entropy_nats(self) -> float:
        logs = torch.log(torch.where(self._values > 0.0, self._values, 1.0))
        return -_number(tree_sum(self._values * logs)[0])

    def rank(self, token_id: int) -> int:
        """How many tokens are more probable, or as probable with a lower id."""
        own, ids = self._values[token_id], torch.arange(len(self._values), device=self._values.device)
        above = (self._values > own) | ((self._values == own) & (ids < token_id))
        return int(_number(above.sum().double()))

    def index_at(self, share: float) -> int:
        """The token where the running sum passes this share of the whole. Whole numbers are added: their sum has no order."""
        mass = (self._values / self._values.amax() * 2.0**_MASS_BITS).long().cumsum(0)
        return int(_number((mass <= (mass[-1].double() * share).long()).sum().double()))


Probs = NDArray[np.float64] | TorchProbs
"""A token's probabilities over the vocabulary. Shape: float64 [V]."""


def _number(x: Tensor) -> float:
    return float(to_host(x.reshape(1))[0])
