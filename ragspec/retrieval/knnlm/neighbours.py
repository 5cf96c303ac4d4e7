"""KNN-LM: the next token of similar contexts, mixed into a language model's own prediction.

For every token of a corpus, a datastore holds the target's hidden state before the token (the key) and the token (the value). The
`num_neighbours` nearest entries vote with weight softmax(-distance / temperature). The next token is sampled from

    p = weight * p_neighbours + (1 - weight) * p_target

in float64 and a fixed order: equal neighbours give equal bits.

A `NeighbourCache` guesses the vote from entries that one request has seen and from the entries after them in the corpus.

Source: Khandelwal et al. 2020, Generalization through Memorization (arXiv 1911.00172); the cache and its verification by
tokens: Zhang et al. 2024 (arXiv 2401.14021), section 5.3.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ragspec.config import ConfigSection, StrideConfig
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray

EntryNumbers = NDArray[np.int64]
Values = NDArray[np.int32]
Doubles = NDArray[np.float64]

_LEAST_NORM = 1e-30


class KnnConfig(ConfigSection):
    """`weight` of the neighbours' vote; `temperature` in units of squared distance between unit vectors (0 to 4).

    The cache receives every neighbour of a verification and the `num_following` entries after each of the `num_followed` nearest.
    It holds at most `max_cached_entries`.
    """

    num_neighbours: int = Field(8, ge=1, le=65_536)
    weight: float = Field(0.25, ge=0.0, lt=1.0)
    temperature: float = Field(0.03, gt=0.0)
    num_following: int = Field(10, ge=0, le=1024)
    num_followed: int = Field(64, ge=0)
    max_cached_entries: int = Field(16_384, ge=1)
    stride: StrideConfig = StrideConfig(least_gain=0.1)


class DatastoreEntries(NamedTuple):
    """Entries of a datastore. Shapes: numbers int64 [M], ascending; keys float32 [M, H]; values int32 [M]."""

    numbers: EntryNumbers
    keys: FloatArray
    values: Values


class PrefetchRequest(NamedTuple):
    """Entries to return with a search: the neighbours, and the `num_following` entries after each of the `num_followed` nearest
    of every query, without the entries whose numbers are in `known`."""

    num_following: int
    num_followed: int
    known: EntryNumbers


class Neighbours(NamedTuple):
    """The nearest entries of some queries, nearest first, ties by number. Shapes: all [B, k]; float64 squared distances."""

    numbers: EntryNumbers
    values: Values
    distances: Doubles
    entries: DatastoreEntries | None = None


class DatastoreLike(Protocol):
    """A datastore, local or remote. Safe to call from several threads."""

    @property
    def target(self) -> EncoderIdentity:
        """The target whose states the keys are."""
        ...

    def search(self, queries: FloatArray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        """The `k` nearest entries, fewer only if there are fewer; bitwise the same alone and in a batch.

        Shapes: queries [B, H] float32, L2-normalised. Raises: RagspecError.
        """
        ...


def unit_rows(states: FloatArray) -> FloatArray:
    """Each row divided by its length, bitwise independent of the other rows; zeros stay zeros. Shapes: [N, H] -> [N, H]."""
    doubles = states.astype(np.float64)
    squares = np.add.accumulate(doubles * doubles, axis=1)[:, -1:]  # [N, 1]
    rows: FloatArray = (doubles / np.maximum(np.sqrt(squares), _LEAST_NORM)).astype(np.float32)
    return rows


def squared_distances(scores: NDArray[np.floating]) -> Doubles:
    """Between unit vectors, from their cosines."""
    return 2.0 - 2.0 * scores.astype(np.float64)


def softmax(logits: NDArray[np.floating]) -> Doubles:
    """In float64, summed from left to right. Shapes: [V] -> [V]."""
    doubles = logits.astype(np.float64)
    powers = np.exp(doubles - doubles.max())
    probs: Doubles = powers / np.add.accumulate(powers)[-1]
    return probs


def mixed_logits(target_probs: Doubles, values: Values, distances: Doubles, config: KnnConfig) -> FloatArray:
    """Logarithm of the mixture, which replaces the target's logits. Without neighbours only the target's part.

    Shapes: target_probs [V], values and distances [k], nearest first -> float32 [V].
    """
    probs = (1.0 - config.weight) * target_probs
    if len(values):
        votes = softmax(-distances / config.temperature)
        probs += config.weight * np.bincount(values, votes, minlength=len(probs))
    with np.errstate(divide="ignore"):  # tokens of probability 0
        logits: FloatArray = np.log(probs).astype(np.float32)
    return logits


class NeighbourCache:
    """Entries that one request has seen. A full cache drops its older half. A guess costs one float32 product."""

    def __init__(self, dimension: int, max_entries: int) -> None:
        self._max_entries = max_entries
        self._size = 0
        self._numbers = np.empty(0, np.int64)
        self._keys = np.empty((0, dimension), np.float32)
        self._values = np.empty(0, np.int32)

    def __len__(self) -> int:
        return self._size

    @property
    def known(self) -> EntryNumbers:
        """The numbers of the cached entries, in the order of insertion."""
        return self._numbers[: self._size].copy()

    def insert(self, entries: DatastoreEntries) -> None:
        """Add unknown entries. If there are more than the cache holds, only the last."""
        numbers, keys, values = (column[-self._max_entries :] for column in entries)
        if self._size + len(numbers) > self._max_entries:
            self._keep_newest(min(self._max_entries // 2, self._max_entries - len(numbers)))
        end = self._size + len(numbers)
        self._grow(end)
        self._numbers[self._size : end] = numbers
        self._keys[self._size : end] = keys
        self._values[self._size : end] = values
        self._size = end

    def nearest(self, query: FloatArray, k: int) -> tuple[Values, Doubles]:
        """Values and squared distances, nearest first. A guess: scores are not canonical. Shapes: [H] -> two [k]."""
        if not self._size:
            return self._values[:0], np.empty(0)
        scores = torch.mv(torch.from_numpy(self._keys[: self._size]), torch.from_numpy(query))
        best = torch.topk(scores, min(k, self._size))
        return self._values[best.indices.numpy()], squared_distances(best.values.numpy())

    def _keep_newest(self, count: int) -> None:
        dropped = max(0, self._size - count)
        for column in (self._numbers, self._keys, self._values):
            column[: self._size - dropped] = column[dropped : self._size].copy()
        self._size -= dropped

    def _grow(self, size: int) -> None:
        if size <= len(self._numbers):
            return
        room = min(self._max_entries, max(size, 2 * len(self._numbers)))
        self._numbers = np.resize(self._numbers, room)
        self._keys = np.resize(self._keys, (room, self._keys.shape[1]))
        self._values = np.resize(self._values, room)
