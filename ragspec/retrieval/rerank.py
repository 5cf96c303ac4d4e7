"""The reranker: a cross-encoder scores a query and a passage together, and its scores order the hits of a search.

The score of a pair is bitwise the same in any batch; see `ragspec.retrieval.row_invariant`.

    >>> Reranker.load("cross-encoder/ms-marco-MiniLM-L6-v2").scores("When did it rain?", texts)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import ModelError
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.retrieval.row_invariant import RowInvariantModel, TokenIds, model_loading

_MAX_TOKENS = 512


PairsToScore = tuple[str, Sequence[str]]
"""A query and the texts to score against it."""

PairScoring = Callable[[Sequence[PairsToScore]], list[NDArray[np.float64]]]
"""Returns the scores of the texts of several queries."""


def score_in_turn(scorer: Reranker | None) -> PairScoring | None:
    return None if scorer is None else lambda asked: [scorer.scores(*each) for each in asked]


class Reranker(RowInvariantModel):
    """A sequence classifier with one label behind `scores`. Safe to call from several threads."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        """Take over `model` (of transformers): its linear layers are packed in place."""
        self._name = name
        super().__init__(model, tokenizer, min(_MAX_TOKENS, _positions(model, tokenizer)))

    @classmethod
    def load(cls, path: str) -> Reranker:
        """`path`: or name of a sentence-transformers cross-encoder with one label.

        Raises: ModelError if weights are missing or a pair gets other than one score.
        """
        with model_loading(f"{path} cannot be loaded as a reranker"):
            from transformers import AutoModelForSequenceClassification, AutoTokenizer  # Why: seconds of imports

            is_local = Path(path).exists()
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=is_local)
            options = {"local_files_only": is_local, "dtype": torch.float32, "output_loading_info": True}
            load: Any = partial(AutoModelForSequenceClassification.from_pretrained, path, **options)
            model, report = run_in_thread(load, num_processors())
            if absent := sorted(report["missing_keys"]):
                raise ModelError(
                    f"{path} is no reranker: it lacks {len(absent)} of the classifier's tensors, the first is {absent[0]}"
                )
            if model.config.num_labels != 1:
                raise ModelError(f"{path} gives a pair {model.config.num_labels} scores; a reranker gives one")
            return cls(model, tokenizer, path)

    def scores(self, query: str, texts: Sequence[str]) -> NDArray[np.float64]:
        """How well each text answers the query, in order: the model's logit, any real number, higher is better.

        Where a pair exceeds `max_tokens`, the longer of query and text is cut first.
        Shapes: returns [len(texts)].
        Raises: ModelError if a score is not finite.
        """
        scores = np.empty(len(texts), np.float64)
        if not texts:
            return scores
        encoded = self._tokenized([query] * len(texts), texts)
        self._compute(scores, *(encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded))
        if not np.isfinite(scores).all():
            raise ModelError(f"{self._name} gave a score that is not a finite number")
        return scores

    def _forward(self, token_ids: TokenIds, type_ids: TokenIds | None = None) -> NDArray[np.float32]:
        """Shapes: two [B, T] without padding -> [B]."""
        with torch.inference_mode():
            logits: NDArray[np.float32] = self._model(**self._features(token_ids, type_ids)).logits[:, 0].numpy()
        return logits


def _positions(model: Any, tokenizer: Any) -> int:
    """Tokens that the model has positions for. RoBERTa models number positions from after the padding token's id."""
    reserved = [
        module.padding_idx + 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
    ]
    positions = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    return int(min(positions - max(reserved, default=0), tokenizer.model_max_length))
