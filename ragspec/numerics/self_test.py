"""Start-up self-test: do this machine's kernels give a row the same bits in any company?

One text is computed whole, in chunks of awkward sizes, one token at a time, in a batch of two sequences, and as trees with
decoys; every logit must agree bit for bit. Passing is what lets a target promise the same text with and without speculation.
The hash of these bits, with the versions that made them, is the numerics id: replay means something only between equal ids.
"""

from __future__ import annotations

import hashlib
import math
import platform
from typing import NamedTuple, Protocol

import numba
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.threads import set_num_threads

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

SAMPLING_VERSION = 1
"""To be raised with every change of the noise, the warps or their order: the same key would give other tokens."""

_ID_ROWS = 16
_MARGIN = 2.0
_LEAST = float(np.finfo(np.float32).tiny)
"""What differs is never taken for equal, however small the difference."""

CHUNKS = (1, 2, 3, 7, 16, 64, 65, 257, 513)
"""Numbers of rows of one forward that are compared with the whole text at once."""


class Forward(Protocol):
    """What is tested: the target, or anything that computes rows over a slot pool."""

    pool: KvPool
    vocab_size: int

    def forward(self, token_ids: Ints, metadata: AttentionMetadata, logit_rows: Ints) -> Floats: ...


class Failure(NamedTuple):
    """One way to compute the text: how many of how many rows differed, and by how much a logit did at most."""

    what: str
    difference: float

    def __str__(self) -> str:
        return f"{self.what}, by up to {self.difference:.2g}"


class SelfTest(NamedTuple):
    """`failures` names what differed. Of `num_rows`, the largest forward compared, more at once are not known to be invariant."""

    failures: tuple[Failure, ...]
    numerics_id: str
    num_rows: int

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def fingerprint(self) -> str:
        """Of what is written here: the id, or one that promises nothing where the test has failed."""
        return self.numerics_id if self.passed else f"{self.numerics_id}-fast"

    @property
    def uncertainty(self) -> float:
        """By how much a logit may depend on its row's company: as much again as was seen, for other texts; 0 where none did."""
        return _MARGIN * max((failure.difference for failure in self.failures), default=0.0)


def self_test(target: Forward, longest: int, dtype: str, num_threads: int) -> SelfTest:
    """Compare the bits; at most `longest` tokens of text. Takes a few forwards of that length."""
    length = min(longest, max(CHUNKS), target.pool.num_slots // 3)
    rng = np.random.default_rng(20)
    text = rng.integers(0, target.vocab_size, length).astype(np.int32)
    set_num_threads(num_threads)
    whole = _run(target, text, [length])
    failures = []
    for threads in sorted({1, num_threads}):  # last the count that stays
        set_num_threads(threads)
        found = _compare_all(target, text, whole, rng)
        failures += [failure._replace(what=f"{threads} threads, {failure.what}") for failure in found]
    return SelfTest(tuple(failures), _numerics_id(whole, dtype), length)


def _compare_all(target: Forward, text: Ints, whole: Floats, rng: np.random.Generator) -> list[Failure]:
    """Every way to compute the text, against the whole of it; what differed."""
    length = len(text)
    failures = _compare("whole", _run(target, text, [length]), whole)
    for size in (c for c in CHUNKS if c < length):
        start = 0 if size > 7 else max(0, length - 3 * size)  # small chunks only at the end: enough rows, less time
        sizes = ([start] if start else []) + [size] * ((length - start) // size)
        got = _run(target, text, sizes)
        failures += _compare(f"chunks of {size}", got[start:], whole[start : len(got)])
    failures += _compare("trees with decoys", *_trees(target, text, whole, rng))
    return failures + _compare("another sequence beside", _beside(target, text, rng), whole[-min(40, length // 2) :])


def _compare(name: str, got: Floats, expected: Floats) -> list[Failure]:
    same = (got == expected).all(-1)
    if same.all():
        return []
    apart = float(np.abs(got - expected).max())  # no number where either is none
    what = f"{name}: {int((~same).sum())} of {len(same)} rows differ"
    return [Failure(what, math.inf if math.isnan(apart) else max(apart, _LEAST))]


def _run(target: Forward, text: Ints, sizes: list[int]) -> Floats:
    """Logits of every row when the text is computed in pieces of these sizes."""
    slots = SequenceSlots(target.pool)
    logits = [_extend(target, slots, text[slots.length : slots.length + size]) for size in sizes]
    slots.release()
    return np.concatenate(logits)


def _extend(target: Forward, slots: SequenceSlots, tokens: Ints) -> Floats:
    batch = Batch([ScheduledSequence(slots, tokens)])
    logits = target.forward(tokens, batch.metadata, np.arange(len(tokens), dtype=np.int32))
    batch.sequences[0].keep()
    return logits


def _trees(target: Forward, text: Ints, whole: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """The last tokens hidden as a path in trees of random shape, against the same rows of the whole text."""
    slots = SequenceSlots(target.pool)
    hidden = min(24, len(text) // 2)
    root = len(text) - hidden
    _extend(target, slots, text[: root - 1])
    got = []
    for size in (hidden, hidden + 8, hidden + 40):
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
        batch.sequences[0].drop()
    slots.release()
    return np.concatenate(got), np.concatenate([whole[root - 1 : -1]] * 3)


def _beside(target: Forward, text: Ints, rng: np.random.Generator) -> Floats:
    """The last rows of the text, up to 40, with another sequence's rows before them in the same forward."""
    own, other = SequenceSlots(target.pool), SequenceSlots(target.pool)
    num_own = min(40, len(text) // 2)
    num_other = min(29, len(text))
    _extend(target, own, text[:-num_own])
    others = rng.integers(0, target.vocab_size, num_other).astype(np.int32)
    batch = Batch([ScheduledSequence(other, others), ScheduledSequence(own, text[-num_own:])])
    logits = target.forward(batch.token_ids, batch.metadata, np.arange(num_other + num_own, dtype=np.int32))
    for scheduled in batch.sequences:
        scheduled.keep()
    own.release()
    other.release()
    return logits[num_other:]


def _numerics_id(logits: Floats, dtype: str) -> str:
    """Of the first rows alone: the id must not depend on how long the pool or the context lets the text be."""
    logits = logits[:_ID_ROWS]
    versions = (
        SAMPLING_VERSION,
        torch.__version__,
        transformers.__version__,
        numba.__version__,
        np.__version__,
        platform.machine(),
        dtype,
    )
    digest = hashlib.sha256(repr(versions).encode())
    digest.update(np.ascontiguousarray(logits).tobytes())
    return "rs_" + digest.hexdigest()[:16]
