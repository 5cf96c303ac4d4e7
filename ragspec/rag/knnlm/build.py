"""Builds a KNN-LM datastore: the target's hidden states over a corpus, each with the token that follows.

>>> build_datastore(texts, target, "datastore")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils.hub import cached_file

from ragspec.core import check_text
from ragspec.engine.checkpoints.target_files import files_digest, target_folder
from ragspec.engine.target import FINAL, Target
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.numerics.torch.transfer import to_host
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray
from ragspec.retrieval.knnlm.datastore import DatastoreSource, write_datastore
from ragspec.retrieval.knnlm.neighbours import Values, unit_rows


def build_datastore(
    texts: Iterable[str], target: Target, folder: str | Path, context_tokens: int = 256, num_threads: int | None = None
) -> int:
    """Write one entry per token of each text, except the first token; the number of entries.

    The target reads each text in separate chunks of `context_tokens`, so a key depends only on its chunk.
    Raises: SaveError, InputError, ConfigError for chunks longer than the target's context.
    """
    if not 1 <= context_tokens <= min(target.max_context_tokens, target.pool.num_slots):
        raise ConfigError(f"context_tokens is {context_tokens}, but the target reads {target.max_context_tokens}")
    origin = DatastoreSource(target_identity(target), target.vocab_size, context_tokens)
    blocks = (_entries(target, chunk) for chunk in _chunks(texts, target.tokenizer, context_tokens))
    return run_in_thread(lambda: write_datastore(folder, blocks, origin), num_threads or num_processors())


def target_identity(target: Target, *, of_texts: bool = False) -> EncoderIdentity:
    """The identity of a target as an encoder: targets with equal identities have equal states, or with `of_texts` equal tokens.

    Raises: ModelError if its files are gone.
    """
    try:
        folder = Path(str(cached_file(target_folder(target.config), "config.json", local_files_only=True))).parent
        digest = files_digest(folder, target.config.numerics_dtype, of_texts=of_texts)
    except OSError as cause:
        raise ModelError(f"the files of the target {target.config.model} cannot be read: {cause}") from cause
    return EncoderIdentity(target.config.model, digest, target.hidden_size)


def _chunks(texts: Iterable[str], tokenizer: Any, context_tokens: int) -> Iterator[list[int]]:
    """Chunks of up to `context_tokens` + 1 token ids; the last token is the first of the next chunk."""
    for text in texts:
        ids = tokenizer(check_text(text, "a text"), add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids) - 1, context_tokens):
            yield ids[start : start + context_tokens + 1]


def hidden_state_keys(target: Target, token_ids: Sequence[int]) -> FloatArray:
    """The target's hidden state after each token, normalised. Shapes: -> float32 [T, H], unit rows."""
    slots = SequenceSlots(target.pool)
    try:
        batch = Batch([ScheduledSequence(slots, token_ids)])
        _, tapped = target.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows[:0], (FINAL,))
        batch.sequences[0].drop()
    finally:
        slots.release()
    return unit_rows(to_host(tapped[FINAL]))


def _entries(target: Target, chunk: list[int]) -> tuple[FloatArray, Values]:
    """The keys and values of one chunk."""
    return hidden_state_keys(target, chunk[:-1]), np.array(chunk[1:], np.int32)
