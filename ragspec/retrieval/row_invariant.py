"""The base of encoder and reranker: the result of a text is bitwise the same in any batch.

Linear layers are packed (row-invariant) and nothing is padded: only texts of equal token length share a forward, unless the model
takes ragged batches. If a self-test at start finds that batching changes a bit, texts go through the model one at a time.

    class Encoder(RowInvariantModel): ...    # adds `_forward` and the public methods
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import ModelError, RagspecError
from ragspec.numerics.health import why_lost
from ragspec.numerics.linear import packing_available, replace_linears
from ragspec.numerics.threads import compute_threads, num_processors, run_in_thread

log = logging.getLogger(__name__)

TokenIds = Sequence[Sequence[int]]

MAX_BATCH_SIZE = 32
_MAX_BATCH_TOKENS, _MAX_PART_TOKENS = 1024, 256
"""Tokens of a batch: so many, or for each processor so many if that is more. Measured: larger batches leave the cache, smaller
ones waste calls on short texts."""

_SHARED_BATCH_TOKENS, _SHARED_S = 64, 10.0
"""Tokens of a batch within these seconds after a caller had to wait for its turn. A question waits for the batch that the rows of
a file have begun, and a full one takes as long as a short answer."""
_PART_TOKENS = 64
"""Tokens that are worth a processor of their own."""
TOKENISED_AT_ONCE = 64
_MAX_CHARS_PER_TOKEN = 64
_SELF_TEST_LENGTHS = (3, 17, 129)
_RAGGED_LENGTHS = (3, 17, 129, 3, 200, 17, 129, 200)
_SELF_TEST_TEXTS = 8


class TurnLock:
    """A lock that threads get in the order in which they came.

    Why: whoever releases a plain lock and takes it again at once gets it before those who wait.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.num_taken = self.num_over = 0
        self.waited_s = -math.inf
        """When a caller last had to wait, of time.monotonic."""

    def __enter__(self) -> None:
        with self._changed:
            turn, self.num_taken = self.num_taken, self.num_taken + 1
            if turn != self.num_over:
                self.waited_s = time.monotonic()
                self._changed.wait_for(lambda: self.num_over == turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self.num_over += 1
            self._changed.notify_all()


class RowInvariantModel(ABC):
    """A model over token ids. Safe to call from several threads.

    They compute in turn, one batch at a time, and in small batches while they meet, so that a query does not wait for all texts
    of a file. Parts of a batch run side by side, each on one processor.
    """

    is_ragged = False
    """Whether `_forward` takes texts of different lengths together."""

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int) -> None:
        """Take over `model`: its linear layers are packed in place. Read its weights before."""
        self._model = model.eval()
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        """The longest text the model reads, special tokens included."""
        self._computing = TurnLock()
        self._tokenizing = TurnLock()  # Why: truncation is a state of the tokenizer
        self.max_batch_size = MAX_BATCH_SIZE
        if packing_available():
            run_in_thread(lambda: replace_linears(model), num_processors())
        if not run_in_thread(self.self_test, 1):
            self.max_batch_size = 1
        self.lost = ""
        compute_threads(num_processors())  # begins them before the first query
        """Why nothing can be computed any more; empty as long as it can."""

    @abstractmethod
    def _forward(self, token_ids: TokenIds, type_ids: TokenIds | None = None) -> NDArray[np.float32]:
        """One row per text. Shapes: two [B, T] without padding -> [B, ...]."""

    def self_test(self) -> bool:
        """Whether every text's result is bitwise the same alone and in larger batches."""
        generator = torch.Generator().manual_seed(0)
        equal = [(length,) * _SELF_TEST_TEXTS for length in _SELF_TEST_LENGTHS if length <= self.max_tokens]
        ragged = [tuple(min(length, self.max_tokens) for length in _RAGGED_LENGTHS)]
        for lengths in ragged if self.is_ragged else equal:
            token_ids = [torch.randint(len(self._tokenizer), (n,), generator=generator).tolist() for n in lengths]
            whole = self._forward(token_ids)
            alone = np.concatenate([self._forward([ids]) for ids in token_ids[:3]])
            pair = self._forward(token_ids[1:3])
            if not (np.array_equal(alone, whole[:3]) and np.array_equal(pair, whole[1:3])):
                return False
        return True

    def _tokenized(self, *texts: Sequence[str]) -> Mapping[str, list[list[int]]]:
        """The tokenizer's output for texts, or for pairs given as two lists; cut to `max_tokens`, the longer text first."""
        most_chars = self.max_tokens * _MAX_CHARS_PER_TOKEN  # Why: a megabyte takes seconds to tokenise
        cut = [[text[:most_chars] for text in column] for column in texts]
        encoded: dict[str, list[list[int]]] = {}
        for first in range(0, len(cut[0]), TOKENISED_AT_ONCE):
            part = [column[first : first + TOKENISED_AT_ONCE] for column in cut]
            with self._tokenizing:
                for name, rows in self._tokenizer(*part, truncation=True, max_length=self.max_tokens).items():
                    encoded.setdefault(name, []).extend(rows)
        return encoded

    def _features(self, token_ids: TokenIds, type_ids: TokenIds | None = None) -> dict[str, Tensor]:
        """The model's inputs. Shapes: two [B, T]; `type_ids` None means zeros."""
        ids = torch.tensor(token_ids)  # [B, T]
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "token_type_ids" in self._tokenizer.model_input_names:
            features["token_type_ids"] = torch.zeros_like(ids) if type_ids is None else torch.tensor(type_ids)
        return features

    def _compute(self, results: NDArray[Any], token_ids: TokenIds, *more_inputs: TokenIds) -> None:
        """Fill `results`, one row per text, by forwards of many texts. Shapes: each input [B, T].

        Why a forward on each processor, and no threads inside it: those would wait for each other at every product.
        """

        def compute(rows: list[int]) -> None:
            results[rows] = self._forward(*([each[row] for row in rows] for each in (token_ids, *more_inputs)))

        threads = compute_threads(num_processors())
        for parts in self._parts(token_ids):
            with self._computing:
                running = [threads.submit(compute, rows) for rows in parts]
                wait(running)
                if any(part.exception() for part in running):
                    lengths = [[len(token_ids[row]) for row in rows] for rows in parts]
                    threads.submit(self._check, lengths).result()
            for part in running:
                part.result()

    def _check(self, lengths: list[list[int]]) -> None:
        """After a failed forward of one of these parts: sets `lost` if forwards of other texts of these lengths fail too."""

        def compute() -> None:
            for own in lengths:
                self._forward([[0] * length for length in own])

        if reason := why_lost(f"the {type(self).__name__.lower()}", compute):
            log.error(reason)
            self.lost = reason

    def _parts(self, token_ids: TokenIds) -> Iterator[list[list[int]]]:
        """Row numbers of forwards that run side by side: parts of a batch, or batches that are too small for parts."""
        parts, num_tokens = list[list[int]](), 0
        for rows in self._batches(token_ids):
            num_own = sum(len(token_ids[row]) for row in rows)
            num_parts = min(num_processors(), len(rows), max(1, num_own // _PART_TOKENS))
            if len(parts) + num_parts > num_processors() or (parts and num_tokens + num_own > self._most_tokens()):
                yield parts
                parts, num_tokens = [], 0
            parts += [rows[first::num_parts] for first in range(num_parts)]
            num_tokens += num_own
            if self.is_ragged or len(parts) == num_processors():
                yield parts
                parts, num_tokens = [], 0
        if parts:
            yield parts

    def _batches(self, token_ids: TokenIds) -> Iterator[list[int]]:
        """Row numbers that share a batch, the shortest texts first: at most `_most_tokens` tokens together, and of equal length
        unless batches may be ragged."""
        batch: list[int] = []
        num_tokens = 0
        for row in sorted(range(len(token_ids)), key=lambda row: len(token_ids[row])):
            length = len(token_ids[row])
            is_full = len(batch) == self.max_batch_size or num_tokens + length > self._most_tokens()
            if batch and (is_full or not (self.is_ragged or length == len(token_ids[batch[0]]))):
                yield batch
                batch, num_tokens = [], 0
            batch.append(row)
            num_tokens += length
        if batch:
            yield batch

    def _most_tokens(self) -> int:
        is_shared = time.monotonic() < self._computing.waited_s + _SHARED_S
        return _SHARED_BATCH_TOKENS if is_shared else max(_MAX_BATCH_TOKENS, _MAX_PART_TOKENS * num_processors())


@contextmanager
def model_loading(what: str) -> Iterator[None]:
    """Loads a model inside the block, without progress bars of transformers.

    Raises: ModelError, naming `what`, for any error of the libraries.
    """
    try:
        with without_progress_bars():
            yield
    except RagspecError:
        raise
    except Exception as cause:  # safetensors, tokenizers and pickle raise classes of their own
        first_line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise ModelError(f"{what}: {first_line}") from cause


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hides the progress bars of transformers inside the block."""
    from transformers.utils import logging  # Why: seconds of imports, only when a model is wanted

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()
