"""How good corrected sentences are: GLEU as JFLEG defines it, and the distance in words.

Pure functions over lists of words.
"""

import math
import random
from collections import Counter

import numpy as np


def edit_distance(a: list[str], b: list[str]) -> int:
    """Insertions, deletions and substitutions of words (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]


def gleu(
    sources: list[list[str]], outputs: list[list[str]], references: list[list[list[str]]], draws: int = 500
) -> float:
    """GLEU of JFLEG, 0-100: BLEU-4 against a randomly drawn reference, minus n-grams kept wrongly; mean over draws.

    Source: Napoles et al. 2015 and 2016 (arXiv 1605.02592), the version without tuning.
    """
    rows = list(zip(sources, outputs, references, strict=True))
    table = np.array([[_gleu_counts(s, o, r) for r in refs] for s, o, refs in rows])  # [sentences, references, 10]
    scores = []
    for draw in range(draws):
        rng = random.Random(draw * 101)
        picked = [rng.randint(0, table.shape[1] - 1) for _ in rows]
        scores.append(_gleu_from_counts(table[np.arange(len(rows)), picked].sum(axis=0).tolist()))
    return 100 * float(np.mean(scores))


def _ngrams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _gleu_counts(source: list[str], output: list[str], reference: list[str]) -> list[int]:
    """Output length, reference length, then (matches minus penalties, n-grams) for n = 1 to 4."""
    counts = [len(output), len(reference)]
    for n in range(1, 5):
        out, ref = _ngrams(output, n), _ngrams(reference, n)
        wrong = Counter({gram: c for gram, c in _ngrams(source, n).items() if gram not in ref})
        counts += [max(sum((out & ref).values()) - sum((out & wrong).values()), 0), max(len(output) + 1 - n, 0)]
    return counts


def _gleu_from_counts(counts: list[int]) -> float:
    if min(counts) == 0:
        return 0.0
    log_precision = sum(math.log(counts[i] / counts[i + 1]) for i in range(2, 10, 2)) / 4
    return math.exp(min(0.0, 1 - counts[1] / counts[0]) + log_precision)
