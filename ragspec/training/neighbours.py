"""Passages that a word search finds for a text, by the index's own BM25; distractors are drawn from them.

>>> Neighbours(["A cat sat.", "It rained."]).nearest("Did it rain?", 1)
[1]
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ragspec.config import AnalyzerConfig
from ragspec.retrieval.search.analysis import Analyzer
from ragspec.retrieval.search.bm25 import Postings, SparseConfig, sparse_query
from ragspec.retrieval.search.bm25_builder import PostingsBuilder


class Neighbours:
    """Texts and their postings."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._analyzer, builder = Analyzer(AnalyzerConfig()), PostingsBuilder()
        for text in texts:
            builder.add(self._analyzer.terms(text))
        with tempfile.TemporaryDirectory() as folder:
            builder.write(Path(folder))
            self._postings = Postings.open(Path(folder))  # a mapped file outlives its name

    def nearest(self, text: str, count: int) -> list[int]:
        """Numbers of at most `count` texts, the best first."""
        terms = self._analyzer.terms(text)
        rows, scores = self._postings.scores(sparse_query(terms, self._postings.statistics(terms), SparseConfig()))
        return [int(row) for row in rows[np.lexsort((rows, -scores))[:count]]]
