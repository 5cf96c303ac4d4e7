"""The start-up self-test: do this machine's kernels give a row the same bits in every batch?

One text is computed whole; its end again in chunks of awkward sizes, token by token, beside another sequence, and as trees with
decoys. All logits must agree bit for bit. A target that passes promises the same text with and without speculation. The hash of
these bits and of the library versions is the numerics id; replay is possible only between equal ids.

    >>> self_test(target, longest=513, dtype="float32", num_threads=2).passed
"""

import hashlib
import math
import platform
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numba
import numpy as np
import torch
import transformers

from ragspec.core import Say, log_progress
from ragspec.numerics.attention import AttentionMetadata, Floats, Ints
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.threads import set_num_threads

SAMPLING_VERSION = 1
"""Raise this with every change of the noise, the warps or their order: the same key then gives other tokens."""

_ID_ROWS = 16
_LEAST = float(np.finfo(np.float32).tiny)
"""The least difference reported for rows that differ."""

CHUNKS = (1, 2, 3, 7, 16, 64, 65, 257, 513)
"""Numbers of rows of the forwards that are compared with the forward of the whole text."""
_NUM_CHUNKS = 3
_DECOYS, _QUICK_DECOYS = (0, 8, 40), (8,)
"""Nodes beside the true path, of each tree."""
QUICK_ROWS, QUICK_CHUNKS = 17, (1,)
"""Length and chunks of a self-test that confirms an earlier one."""


class Forward(Protocol):
    """The target's part in the test."""

    pool: KvPool
    vocab_size: int

    def forward(self, token_ids: Ints, metadata: AttentionMetadata, logit_rows: Ints) -> Floats: ...


class Failure(NamedTuple):
    """A way of computing the text whose rows differ. `difference`: the greatest difference of a logit."""

    what: str
    difference: float

    def __str__(self) -> str:
        return f"{self.what}, by up to {self.difference:.2g}"


class SelfTest(NamedTuple):
    """`num_rows`: rows of the largest forward that was compared; larger forwards are not known to be invariant."""

    failures: tuple[Failure, ...]
    numerics_id: str
    num_rows: int

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def fingerprint(self) -> str:
        """The numerics id, marked as not reproducible if the test has failed."""
        return self.numerics_id if self.passed else f"{self.numerics_id}-fast"


def self_test(
    target: Forward,
    longest: int,
    dtype: str,
    num_threads: int,
    chunks: tuple[int, ...] = CHUNKS,
    say: Say = log_progress,
) -> SelfTest:
    """Compare the bits of a text of at most `longest` tokens. With all `chunks`, computes some seven times as many rows.

    Both thread counts are compared with the text computed by all threads. With fewer chunks, one thread alone is, in a few
    forwards.
    """
    length = min(longest, max(CHUNKS), target.pool.num_slots // 3)
    rng = np.random.default_rng(20)
    text = rng.integers(0, target.vocab_size, length).astype(np.int32)
    slots, failures = SequenceSlots(target.pool), list[Failure]()
    set_num_threads(num_threads)
    whole = _extend(target, slots, text)
    for threads in sorted({1, num_threads}) if chunks == CHUNKS else (1,):
        set_num_threads(threads)
        stage = f"testing the numerics: {length} rows in every batch, {threads} thread{'s' * (threads > 1)}"
        found = _compare_all(target, slots, text, whole, chunks, rng, partial(say, stage))
        failures += [failure._replace(what=f"{threads} threads, {failure.what}") for failure in found]
    set_num_threads(num_threads)
    slots.release()
    return SelfTest(tuple(failures), _numerics_id(whole, dtype), length)


def _compare_all(
    target: Forward,
    slots: SequenceSlots,
    text: Ints,
    whole: Floats,
    chunks: tuple[int, ...],
    rng: np.random.Generator,
    tick: Callable[[int, int], object],
) -> list[Failure]:
    """Compare every way of computing the end of the text with one forward of the whole text. Leaves the text in `slots`."""
    length, is_whole, failures = len(text), chunks == CHUNKS, list[Failure]()
    if is_whole:
        slots.release()  # the pages of an earlier round's trees
        failures += _compare("whole", _end(target, slots, text, 0, [length]), whole)
    sizes = [size for size in chunks if size < length]
    for number, size in enumerate(sizes):
        tick(number, len(sizes))
        count = min(_NUM_CHUNKS, length // size)
        start = length - count * size
        failures += _compare(f"chunks of {size}", _end(target, slots, text, start, [size] * count), whole[start:])
    num_own = min(40, length // 2)
    failures += _compare("another sequence beside", _beside(target, slots, text, num_own, rng), whole[-num_own:])
    trees = _trees(target, slots, text, whole, rng, _DECOYS if is_whole else _QUICK_DECOYS)
    return failures + _compare("trees with decoys", *trees)


def _compare(name: str, got: Floats, expected: Floats) -> list[Failure]:
    same = (got == expected).all(-1)
    if same.all():
        return []
    apart = float(np.abs(got - expected).max())  # nan if either row has a nan
    what = f"{name}: {int((~same).sum())} of {len(same)} rows differ"
    return [Failure(what, math.inf if math.isnan(apart) else max(apart, _LEAST))]


def _end(target: Forward, slots: SequenceSlots, text: Ints, start: int, sizes: list[int]) -> Floats:
    """Logits of the rows from `start` on when they are computed in pieces of these sizes."""
    slots.truncate(start)
    return np.concatenate([_extend(target, slots, text[slots.length : slots.length + size]) for size in sizes])


def _extend(target: Forward, slots: SequenceSlots, tokens: Ints) -> Floats:
    batch = Batch([ScheduledSequence(slots, tokens)])
    logits = target.forward(tokens, batch.metadata, np.arange(len(tokens), dtype=np.int32))
    batch.keep(())
    return logits


def _trees(
    target: Forward, slots: SequenceSlots, text: Ints, whole: Floats, rng: np.random.Generator, decoys: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """The last tokens as a path hidden in random trees; returns their rows and the same rows of the whole text."""
    hidden = min(24, len(text) // 2)
    root = len(text) - hidden
    slots.truncate(root - 1)
    got = []
    for size in (hidden + count for count in decoys):
        true_path = [0, *sorted(1 + rng.permutation(size)[: hidden - 1])]
        tokens = rng.integers(0, target.vocab_size, size + 1).astype(np.int32)
        tokens[true_path] = text[root - 1 : root - 1 + hidden]
        parents, depths = [-1], [0]
        for node in range(1, size + 1):
            on_path = node in true_path
            parent = int(true_path[true_path.index(node) - 1]) if on_path else int(rng.integers(0, node))
            parent = parent if depths[parent] < hidden else 0  # no decoy beyond the last position
            parents.append(parent)
            depths.append(depths[parent] + 1)
        batch = Batch([ScheduledSequence(slots, tokens, parents)])
        logits = target.forward(tokens, batch.metadata, batch.logit_rows)
        got.append(logits[true_path])
        batch.drop()
    _extend(target, slots, text[root - 1 :])
    return np.concatenate(got), np.concatenate([whole[root - 1 : -1]] * len(decoys))


def _beside(target: Forward, slots: SequenceSlots, text: Ints, num_own: int, rng: np.random.Generator) -> Floats:
    """The last `num_own` rows of the text, with another sequence's rows before them in the same forward."""
    other = SequenceSlots(target.pool)
    num_other = min(29, len(text))
    slots.truncate(len(text) - num_own)
    others = rng.integers(0, target.vocab_size, num_other).astype(np.int32)
    batch = Batch([ScheduledSequence(other, others), ScheduledSequence(slots, text[-num_own:])])
    logits = target.forward(batch.token_ids, batch.metadata, np.arange(num_other + num_own, dtype=np.int32))
    batch.keep((), ())
    other.release()
    return logits[num_other:]


def _numerics_id(logits: Floats, dtype: str) -> str:
    """Hashes the first rows alone, so that the id does not depend on the length of pool or context."""
    logits = logits[:_ID_ROWS]
    versions = [library.__version__ for library in (torch, transformers, numba, np)]
    digest = hashlib.sha256(repr((SAMPLING_VERSION, *versions, platform.machine(), dtype)).encode())
    digest.update(np.ascontiguousarray(logits).tobytes())
    return "rs_" + digest.hexdigest()[:16]
